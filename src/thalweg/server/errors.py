"""Errors as OpenAI's API words them: {"error": {"message", "type", "param", "code"}} and a status."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic_core import PydanticCustomError
from starlette.exceptions import HTTPException

_KEY = re.compile(r"(?!str$)\w+")  # and not what the schema adds to a path to say which type it tried
REFUSED = "refused"
"""Type of the schema's errors whose message is the whole message."""


class ApiError(Exception):
    """What a client is told instead of an answer."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers
        self.body: dict[str, Any] = {"error": {"message": message, "type": type, "param": param, "code": code}}

    def response(self) -> JSONResponse:
        """The error as an HTTP answer."""
        return JSONResponse(self.body, self.status, self.headers)


def refused(param: str, message: str) -> PydanticCustomError:
    """What a validator of the schema raises about one parameter."""
    return PydanticCustomError(REFUSED, "{message}", {"param": param, "message": message})


def unknown_model(name: str, served: str) -> ApiError:
    """404, as the clients expect it."""
    message = f"the model {name!r} does not exist here; this server has {served!r}"
    return ApiError(message, status=404, param="model", code="model_not_found")


def unavailable(message: str, code: str) -> ApiError:
    """503: try again, here or elsewhere."""
    return ApiError(message, status=503, type="server_error", code=code, headers={"Retry-After": "1"})


def engine_died() -> ApiError:
    """500 for what was in flight. The clients are asked not to repeat it unasked: it may be what killed the engine."""
    message = "the engine died while it worked on this request"
    headers = {"x-should-retry": "false"}
    return ApiError(message, status=500, type="server_error", code="engine_died", headers=headers)


def failed(message: str) -> ApiError:
    """500 for a request that the model could not compute; others go on."""
    return ApiError(message, status=500, type="server_error", code="request_failed")


def install(app: FastAPI) -> None:
    """Every error of the application in this shape: ours, the schema's, unknown paths and methods, and bugs."""

    @app.exception_handler(ApiError)
    async def ours(request: Request, error: ApiError) -> JSONResponse:
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def schema(request: Request, error: RequestValidationError) -> JSONResponse:
        return _invalid(error.errors()).response()

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        message = f"{request.method} {request.url.path}: {error.detail}"
        return ApiError(message, status=error.status_code, headers=error.headers).response()

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> JSONResponse:
        # The traceback is logged by the server; a client learns nothing of the inside.
        return ApiError("internal error, see the server's log", status=500, type="server_error").response()


def _invalid(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """One line for what the schema found: the first parameter, and all that it says about it."""
    first = errors[0]
    if first["type"] == "json_invalid":
        return ApiError(f"the body is not JSON: {first['ctx']['error']} at byte {first['loc'][-1]}")
    if first["type"] == REFUSED:
        return ApiError(first["msg"], param=first["ctx"]["param"])
    path = [part for part in first["loc"] if part != "body"]
    if not path:
        return ApiError("the body is no JSON object; send one, with the header Content-Type: application/json")
    param = str(path[0])
    messages = dict.fromkeys(error["msg"] for error in errors if param in error["loc"])
    value = first.get("input")
    given = f" ({value!r} was given)" if isinstance(value, str | int | float) and len(repr(value)) <= 80 else ""
    where = ".".join(str(part) for part in path if _KEY.fullmatch(str(part)))
    return ApiError(f"{where}: {', or '.join(messages)}{given}", param=param)
