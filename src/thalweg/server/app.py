"""The endpoints."""

import platform
from importlib.metadata import version
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import ClientDisconnect

from thalweg import __version__
from thalweg.server import errors, generate
from thalweg.server.engine_client import State
from thalweg.server.errors import unavailable, unknown_model
from thalweg.server.messages import StartProfile, StopProfile
from thalweg.server.openai_schema import ChatRequest, CompletionRequest
from thalweg.server.service import Loaded, Service

_NOBODY = 499  # the client left; it will not read this


def create_app(service: Service) -> FastAPI:
    """The application over a service."""
    app = FastAPI(title="thalweg serve", version=__version__)
    errors.install(app)
    _add_openai(app, service)
    _add_operations(app, service)
    return app


def _add_openai(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(_loaded(service))]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        loaded = _loaded(service)
        if name != loaded.name:
            raise unknown_model(name, loaded.name)
        return _model(loaded)

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        try:
            return await generate.completion(service, body, request)
        except ClientDisconnect:
            return Response(status_code=_NOBODY)

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        try:
            return await generate.chat(service, body, request)
        except ClientDisconnect:
            return Response(status_code=_NOBODY)


def _add_operations(app: FastAPI, service: Service) -> None:
    @app.get("/health")
    async def health() -> dict[str, str]:
        """This process answers."""
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> Response:
        """200 while requests are taken."""
        state = "draining" if service.draining else service.engine.state.value
        taken = state == State.READY.value
        return JSONResponse({"ready": taken, "state": state}, 200 if taken else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/server_info")
    async def server_info() -> dict[str, Any]:
        """Settings as resolved, versions, and the engine's newest report."""
        engine, loaded = service.engine, service.engine.ready
        versions = {"thalweg": __version__, "python": platform.python_version(), "fastapi": version("fastapi")}
        return {
            "model": service.loaded.name if service.loaded else None,
            "architecture": loaded.architecture if loaded else None,
            "settings": msgspec.to_builtins(loaded.settings) if loaded else None,
            "versions": versions | ({"torch": loaded.torch_version} if loaded else {}),
            "engine": {
                "state": engine.state.value,
                "process_id": loaded.process_id if loaded else None,
                "load_seconds": loaded.load_seconds if loaded else None,
                "restarts": engine.restarts,
                "report": msgspec.to_builtins(engine.report),
            },
        }

    @app.post("/start_profile")
    async def start_profile() -> dict[str, str]:
        """Records a torch profiler trace of the engine's process until /stop_profile."""
        return {"trace": await service.engine.profile(StartProfile(service.settings.profile_folder))}

    @app.post("/stop_profile")
    async def stop_profile() -> dict[str, str]:
        """Writes the trace."""
        return {"trace": await service.engine.profile(StopProfile())}


def _loaded(service: Service) -> Loaded:
    if service.loaded is None:
        raise unavailable("the engine is loading", "engine_not_ready")
    return service.loaded


def _model(loaded: Loaded) -> dict[str, Any]:
    return {
        "id": loaded.name,
        "object": "model",
        "created": loaded.created,
        "owned_by": "thalweg",
        "max_model_len": loaded.context_length,
    }
