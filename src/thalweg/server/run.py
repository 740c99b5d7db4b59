"""The HTTP process from its socket to its exit code: start, signals, drain."""

import asyncio
import contextlib
import errno
import ipaddress
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator

import uvicorn

from thalweg.errors import UserError
from thalweg.server.app import create_app
from thalweg.server.engine_client import EngineDied
from thalweg.server.service import Service
from thalweg.server.settings import ServerSettings

EXIT_ENGINE_DIED = 3
_STOP_SECONDS = 5  # for the engine to end, and for answers that are finished to be read
_POLL_SECONDS = 0.05
_ONE_SIGNAL_SECONDS = 1.0  # wrappers pass on a signal that the whole process group got: not meant twice


def run(settings: ServerSettings) -> int:
    """Serves until a signal; the exit code: 0 after a drain, 3 where the engine died twice. Raises UserError."""
    with _listen(settings.host, settings.port) as listener:
        return asyncio.run(_Server(settings, listener).run())


class _Http(uvicorn.Server):
    """Signals are ours: a drain still answers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Server:
    def __init__(self, settings: ServerSettings, listener: socket.socket) -> None:
        self.settings, self.listener = settings, listener
        self.service = Service(settings, int(time.time()), _say)
        config = uvicorn.Config(
            create_app(self.service),
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            timeout_graceful_shutdown=_STOP_SECONDS,
        )
        self.http = _Http(config)
        self.signalled = asyncio.Event()
        self.signalled_at = 0.0

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        self._say_where()
        http = asyncio.create_task(self.http.serve([self.listener]))
        engine = asyncio.create_task(self.service.engine.run())
        signalled = asyncio.create_task(self.signalled.wait())
        try:
            await asyncio.wait((http, engine, signalled), return_when=asyncio.FIRST_COMPLETED)
            if not engine.done():
                await self._drain(engine)
            with contextlib.suppress(asyncio.CancelledError):
                await engine
            return 0
        except EngineDied as error:
            print(f"thalweg serve: {error}; its last words are above. The server ends.", file=sys.stderr)
            return EXIT_ENGINE_DIED
        finally:
            signalled.cancel()
            engine.cancel()
            self.http.should_exit = True
            await asyncio.wait((engine,))
            await http

    def _on_signal(self, number: int) -> None:
        if not self.signalled.is_set():
            self.service.draining = True
            self.signalled_at = time.monotonic()
            self.signalled.set()
        elif time.monotonic() - self.signalled_at > _ONE_SIGNAL_SECONDS:
            os._exit(128 + number)  # the kernel ends the engine with this process

    async def _drain(self, engine: asyncio.Task[None]) -> None:
        client, seconds = self.service.engine, self.settings.drain_seconds
        self.service.draining = True
        if client.in_flight:
            _say(f"going down; waits up to {seconds:g} s for {client.in_flight} running")
        deadline = time.monotonic() + seconds
        while client.in_flight and time.monotonic() < deadline and not engine.done():
            await asyncio.sleep(_POLL_SECONDS)
        client.abandon()
        client.stop()
        await asyncio.wait((engine,), timeout=_STOP_SECONDS)
        engine.cancel()

    def _say_where(self) -> None:
        host, port = self.listener.getsockname()[:2]
        _say(f"listening on http://{f'[{host}]' if ':' in host else host}:{port}")
        if not ipaddress.ip_address(host).is_loopback:
            print("thalweg serve: other machines can reach this address, and no key is asked of them", file=sys.stderr)


def _say(line: str) -> None:
    print(f"thalweg serve: {line}", flush=True)


def _listen(host: str, port: int) -> socket.socket:
    if not 0 <= port <= 65535:
        raise UserError(f"port {port}: possible are 1 to 65535, and 0 for one that is free")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UserError(f"port {port} of {host} is in use; give another with --port (0: a free one)") from None
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or error
        raise UserError(f"cannot listen on {host} port {port}: {reason}") from None
    listener.setblocking(False)
    return listener
