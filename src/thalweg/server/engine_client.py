"""The HTTP process's side of the engine: its child process, its messages, and one restart after a death."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable
from enum import Enum

from thalweg.errors import UserError
from thalweg.server.errors import ApiError, engine_died, failed, unavailable
from thalweg.server.messages import (
    LENGTH_BYTES,
    Accepted,
    Cancel,
    EngineReport,
    FromEngine,
    LoadFailed,
    ProfileAnswer,
    Ready,
    Refused,
    Shutdown,
    Start,
    StartProfile,
    Step,
    StopProfile,
    Submit,
    ToEngine,
    frame,
    from_engine,
    length,
)
from thalweg.server.metrics import Metrics
from thalweg.server.settings import EngineSettings
from thalweg.server.streams import Stream

_EXIT_SECONDS = 5.0  # from a closed socket to the end of the child


class State(Enum):
    """Whether the engine takes requests."""

    LOADING = "loading"
    READY = "ready"
    GONE = "gone"


class EngineDied(Exception):
    """The engine's process ended and is not started again."""


class EngineClient:
    """on_ready is called each time the engine is loaded, before it takes requests; what it raises ends `run`."""

    def __init__(self, settings: EngineSettings, metrics: Metrics, on_ready: Callable[[Ready], None]) -> None:
        self.settings, self.metrics, self._on_ready = settings, metrics, on_ready
        self.state = State.LOADING
        self.restarts = 0
        self.ready: Ready | None = None
        self.report: EngineReport | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._load_error: UserError | None = None
        self._stopping = False
        self._submitted: dict[str, Stream] = {}
        self._streams: dict[str, Stream] = {}
        self._profile: asyncio.Future[ProfileAnswer] | None = None

    async def run(self) -> None:
        """Keeps an engine until `stop`. Raises UserError where it cannot load, EngineDied after its second death."""
        try:
            while True:
                code = await self._live()
                if self._stopping:
                    return
                if self._load_error is not None:
                    raise self._load_error
                cause = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
                if self.ready is None:
                    raise EngineDied(f"the engine's process died while it loaded ({cause})")
                if self.restarts:
                    raise EngineDied(f"the engine's process died again ({cause})")
                self.restarts += 1
                self.metrics.engine_restarts.inc()
                print(f"thalweg serve: the engine's process died ({cause}); it is started once more", file=sys.stderr)
        finally:
            self.state = State.GONE
            self._fail_all(unavailable("the server is going down", "shutting_down"))

    def submit(self, submit: Submit) -> Stream:
        """Queues the sequences. Raises ApiError where there is no engine now."""
        if self.state is not State.READY:
            raise unavailable(f"the engine is {self.state.value}", "engine_not_ready")
        stream = Stream([sequence.id for sequence in submit.sequences], self._cancel)
        self._submitted[submit.id] = stream
        self._streams.update(dict.fromkeys(stream.ids, stream))
        self._send(submit)
        return stream

    @property
    def in_flight(self) -> int:
        """Sequences that have not ended."""
        return len(self._streams)

    async def profile(self, message: StartProfile | StopProfile) -> str:
        """The path of the trace. Raises ApiError where the engine refuses, and where another call is under way."""
        if self.state is not State.READY:
            raise unavailable(f"the engine is {self.state.value}", "engine_not_ready")
        if self._profile is not None:
            raise ApiError("another call to start or stop a profile is under way")
        self._profile = asyncio.get_running_loop().create_future()
        self._send(message)
        try:
            answer = await self._profile
        finally:
            self._profile = None
        if answer.error:
            raise ApiError(answer.error)
        return answer.path

    def stop(self) -> None:
        """Tells the engine to end; `run` then returns."""
        self._stopping = True
        self.state = State.GONE
        if self._writer is not None:
            self._send(Shutdown())

    def abandon(self) -> None:
        """Ends every sequence in flight with an error."""
        streams = list(dict.fromkeys(self._streams.values()))
        for stream in streams:
            self._cancel(stream, [id for id in stream.ids if id in self._streams])
            stream.put(unavailable("the server is going down", "shutting_down"))

    async def _live(self) -> int:
        """One life of the child; its exit code (the negative signal where it was killed)."""
        self.state = State.GONE if self._stopping else State.LOADING
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-c",
                _child_code(theirs.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=2,
                pass_fds=[theirs.fileno()],
                process_group=0,  # Ctrl-C in the terminal is for this process
            )
        reader, self._writer = await asyncio.open_unix_connection(sock=ours)
        try:
            self._send(Start(self.settings))
            while True:
                head = await reader.readexactly(LENGTH_BYTES)
                self._take(from_engine(await reader.readexactly(length(head))))
        except (asyncio.IncompleteReadError, ConnectionError):
            self._lost()
            await _ended(process)
        finally:
            self._lost()
            if process.returncode is None:
                process.kill()
                await process.wait()
        return process.returncode or 0

    def _lost(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self.state is State.READY:
            self.state = State.LOADING
        self._fail_all(engine_died())

    def _take(self, message: FromEngine) -> None:
        match message:
            case Step():
                self.report = message.report
                for tokens in message.outputs:
                    stream = self._streams.get(tokens.id)
                    if stream is None:
                        continue  # cancelled while the step ran
                    if tokens.error is not None:
                        del self._streams[tokens.id]
                        self.metrics.finished("error", 1)
                        self._cancel(stream, stream.ids)  # its other sequences: one answer, one error
                        stream.put(failed(tokens.error))
                        continue
                    self.metrics.tokens(tokens, stream)
                    stream.put(tokens)
                    if tokens.finish is not None:
                        del self._streams[tokens.id]
            case Accepted(id):
                if stream := self._submitted.pop(id, None):
                    stream.put(message)
            case Refused(id):
                if stream := self._submitted.pop(id, None):
                    for sequence in stream.ids:
                        self._streams.pop(sequence, None)
                    self.metrics.finished("refused", len(stream.ids))
                    stream.put(message)
            case ProfileAnswer():
                if self._profile is not None and not self._profile.done():
                    self._profile.set_result(message)
            case Ready():
                self._on_ready(message)
                self.ready, self.report = message, message.report
                if not self._stopping:
                    self.state = State.READY
            case LoadFailed(text):
                self._load_error = UserError(text)

    def _cancel(self, stream: Stream, ids: list[str]) -> None:
        known = [id for id in ids if self._streams.pop(id, None) is not None]
        for id in [id for id, submitted in self._submitted.items() if submitted is stream]:
            del self._submitted[id]
        if known:
            self.metrics.finished("cancelled", len(known))
            if self._writer is not None:
                self._send(Cancel(known))

    def _fail_all(self, error: ApiError) -> None:
        for stream in dict.fromkeys(self._streams.values()):
            stream.put(error)
        self.metrics.finished("error", len(self._streams))
        self._streams.clear()
        self._submitted.clear()
        if self._profile is not None and not self._profile.done():
            self._profile.set_exception(error)

    def _send(self, message: ToEngine) -> None:
        assert self._writer is not None
        self._writer.write(frame(message))


def _child_code(descriptor: int) -> str:
    # The child imports what this process imports, and nothing that merely lies in the working directory.
    return (
        f"import sys; sys.path[:] = {sys.path!r}; from thalweg.server.engine_process import main; "
        f"sys.exit(main({descriptor}, {os.getpid()}))"
    )


async def _ended(process: asyncio.subprocess.Process) -> None:
    try:
        await asyncio.wait_for(process.wait(), _EXIT_SECONDS)
    except TimeoutError:
        process.kill()
        await process.wait()
