"""What the HTTP process and the engine's process say to each other: typed structs as MessagePack, each behind its length.

A frame is a 4-byte big-endian length and that many bytes. The socket is a pair made before the child starts, so nobody
else can connect to it.
"""

import struct

import msgspec

from thalweg.engine.params import Params
from thalweg.server.settings import EngineSettings


class Start(msgspec.Struct, tag=True, frozen=True):
    """The first message to the child: load this."""

    settings: EngineSettings


class Sequence(msgspec.Struct, array_like=True, frozen=True):
    """One text to write: behind which prompt of its Submit, and how."""

    id: str
    prompt: int
    params: Params


class Submit(msgspec.Struct, tag=True, frozen=True):
    """What one HTTP request asks for; all of it is queued, or none. Answered by Accepted or Refused."""

    id: str
    prompts: list[list[int]]
    sequences: list[Sequence]


class Cancel(msgspec.Struct, tag=True, frozen=True):
    """Sequences by id. Their pages are free before the next step. Not answered; tokens of a step that ran meanwhile may
    still come."""

    ids: list[str]


class StartProfile(msgspec.Struct, tag=True, frozen=True):
    """Record a torch profiler trace from now on. Answered by ProfileAnswer."""

    folder: str


class StopProfile(msgspec.Struct, tag=True, frozen=True):
    """Write that trace. Answered by ProfileAnswer."""


class Shutdown(msgspec.Struct, tag=True, frozen=True):
    """End the process, whatever it is doing."""


ToEngine = Start | Submit | Cancel | StartProfile | StopProfile | Shutdown


class PhaseReport(msgspec.Struct, frozen=True):
    """Sums since the engine started, of steps that read prompts or that only decoded."""

    rows: int = 0
    steps: int = 0
    seconds: float = 0.0


class EngineReport(msgspec.Struct, frozen=True):
    """The engine between two steps. Page counts leave out page 0; cached pages are used by nobody but the prefix tree."""

    running: int
    waiting: int
    retractions: int
    pages_used: int
    pages_cached: int
    pages_total: int
    window_pages_used: int
    window_pages_total: int
    prefill: PhaseReport
    decode: PhaseReport


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The engine is loaded; the settings are those it resolved."""

    settings: EngineSettings
    architecture: str
    vocab_size: int
    bos_token_id: int | None
    eos_token_ids: list[int]
    process_id: int
    torch_version: str
    load_seconds: float
    report: EngineReport


class LoadFailed(msgspec.Struct, tag=True, frozen=True):
    """A person's mistake kept the engine from loading; the process ends."""

    message: str


class Accepted(msgspec.Struct, tag=True, frozen=True):
    """The Submit of that id is queued."""

    id: str


class Refused(msgspec.Struct, tag=True, frozen=True):
    """The Submit of that id could never be served; nothing of it is queued."""

    id: str
    message: str


class Token(msgspec.Struct, array_like=True, frozen=True):
    """A token id, the natural log of its probability if asked for, and the most probable alternatives."""

    id: int
    logprob: float | None = None
    top: list[tuple[int, float]] = []


class Tokens(msgspec.Struct, frozen=True):
    """What a step gave one sequence. finish: "stop" or "length" at its end, or "error", and error then says what went wrong
    with this sequence alone; output_tokens counts from its beginning."""

    id: str
    tokens: list[Token]
    text: str
    finish: str | None
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    error: str | None = None


class Step(msgspec.Struct, tag=True, frozen=True):
    """A step is done, or requests were taken out: the outputs, and how the engine stands now."""

    outputs: list[Tokens]
    report: EngineReport


class ProfileAnswer(msgspec.Struct, tag=True, frozen=True):
    """path: the trace that is being or was written; error: why not."""

    path: str = ""
    error: str = ""


FromEngine = Ready | LoadFailed | Accepted | Refused | Step | ProfileAnswer

_LENGTH = struct.Struct(">I")
LENGTH_BYTES = _LENGTH.size
_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(FromEngine)


def frame(message: ToEngine | FromEngine) -> bytes:
    """The message as it goes over the socket."""
    data = _encoder.encode(message)
    return _LENGTH.pack(len(data)) + data


def length(head: bytes) -> int:
    """Bytes of the message behind a frame's first LENGTH_BYTES bytes."""
    return _LENGTH.unpack(head)[0]


def to_engine(data: bytes) -> ToEngine:
    """A message to the engine from its bytes. Raises msgspec.DecodeError for anything else."""
    return _to_engine.decode(data)


def from_engine(data: bytes) -> FromEngine:
    """A message from the engine from its bytes. Raises msgspec.DecodeError for anything else."""
    return _from_engine.decode(data)
