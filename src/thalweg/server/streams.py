"""The sequences of one HTTP request on their way from the engine."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable

from thalweg.server.errors import ApiError
from thalweg.server.messages import Accepted, Refused, Tokens


class Stream:
    """Iterates over what the engine writes, sequence by sequence as it comes, until all have ended.

    Raises ApiError where the engine refuses, dies or is told to stop. `close` cancels what is unfinished; call it always.
    """

    def __init__(self, ids: list[str], cancel: Callable[["Stream", list[str]], None]) -> None:
        self.ids = ids
        self.began = time.perf_counter()
        self.last_token: dict[str, float] = {}
        """when each sequence's newest token arrived; none before its first"""
        self._open = set(ids)
        self._cancel = cancel
        self._arrived: asyncio.Queue[Accepted | Refused | Tokens | ApiError] = asyncio.Queue()

    def put(self, message: Accepted | Refused | Tokens | ApiError) -> None:
        """Called as messages arrive."""
        self._arrived.put_nowait(message)

    async def accepted(self) -> None:
        """Returns once the engine has queued all sequences."""
        message = await self._arrived.get()
        if isinstance(message, Refused):
            self._open.clear()
            code = "context_length_exceeded" if "context length" in message.message else None
            raise ApiError(message.message, code=code)
        if isinstance(message, ApiError):
            self._open.clear()
            raise message

    async def __aiter__(self) -> AsyncIterator[Tokens]:
        while self._open:
            message = await self._arrived.get()
            if isinstance(message, ApiError):
                self._open.clear()
                raise message
            assert isinstance(message, Tokens)
            if message.finish is not None:
                self._open.discard(message.id)
            yield message

    def close(self) -> None:
        """Cancels the sequences that have not ended."""
        self._cancel(self, sorted(self._open))
        self._open.clear()
