"""Answers that end with their client: server-sent events, and work that stops when the connection closes."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from thalweg.server.errors import ApiError

_T = TypeVar("_T")
_DONE = b"data: [DONE]\n\n"


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """The result of `work`. Raises ClientDisconnect, with `work` cancelled, where the client leaves before it is done."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.wait((task, gone))


class EventStream(Response):
    """`data:` events, one for each object, and `[DONE]`; an ApiError on the way is the last event instead.

    on_close runs once, however the stream ends: done, failed, or left by its client.
    """

    media_type = "text/event-stream"

    def __init__(self, objects: AsyncIterator[dict[str, Any]], on_close: Callable[[], None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._objects, self._on_close = objects, on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._send_all(send))
        except ClientDisconnect:
            pass  # nobody to tell
        finally:
            self._on_close()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        last = _DONE
        try:
            async for item in self._objects:
                await send({"type": "http.response.body", "body": _event(item), "more_body": True})
        except ApiError as error:
            last = _event(error.body)
        await send({"type": "http.response.body", "body": last, "more_body": False})


def json_response(item: Any) -> Response:
    """A whole answer."""
    return Response(msgspec.json.encode(item), media_type="application/json")


def _event(item: Any) -> bytes:
    return b"data: " + msgspec.json.encode(item) + b"\n\n"


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
