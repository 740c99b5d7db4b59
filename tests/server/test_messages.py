"""Messages between the processes come out as they went in, however the socket cuts them."""

import socket

import msgspec
import pytest

from thalweg.engine.params import Params, Sampling
from thalweg.server.connection import Connection
from thalweg.server.messages import (
    LENGTH_BYTES,
    Accepted,
    Cancel,
    EngineReport,
    FromEngine,
    LoadFailed,
    PhaseReport,
    ProfileAnswer,
    Ready,
    Refused,
    Sequence,
    Shutdown,
    Start,
    StartProfile,
    Step,
    StopProfile,
    Submit,
    ToEngine,
    Token,
    Tokens,
    frame,
    from_engine,
    length,
    to_engine,
)
from thalweg.server.settings import EngineSettings

PARAMS = Params(Sampling(temperature=0.7, top_k=3, seed=2**64 - 1), 9, ("\n\n", "é"), (5, 7), True, 2)
REPORT = EngineReport(1, 2, 3, 4, 5, 6, 7, 8, PhaseReport(9, 10, 0.5), PhaseReport())
SUBMIT = Submit("a", [[256, 97], [1] * 1000], [Sequence("a-0", 1, PARAMS), Sequence("a-1", 0, Params())])
TO_ENGINE = [Start(EngineSettings(model="x")), SUBMIT, Cancel(["a-0"]), StartProfile("f"), StopProfile(), Shutdown()]
FROM_ENGINE = [
    Ready(EngineSettings(), "DeepseekV4", 272, None, [257], 1, "2.13", 0.5, REPORT),
    LoadFailed("no such folder"),
    Accepted("a"),
    Refused("a", "too long"),
    Step([Tokens("a-0", [Token(5), Token(6, -0.5, [(6, -0.5), (7, -1.0)])], "é", "stop", 2, 2, 0)], REPORT),
    ProfileAnswer("trace", ""),
]


@pytest.mark.parametrize("message", TO_ENGINE)
def test_a_message_to_the_engine_comes_back_equal(message: ToEngine) -> None:
    data = frame(message)
    assert length(data[:LENGTH_BYTES]) == len(data) - LENGTH_BYTES
    assert to_engine(data[LENGTH_BYTES:]) == message


@pytest.mark.parametrize("message", FROM_ENGINE)
def test_a_message_from_the_engine_comes_back_equal(message: FromEngine) -> None:
    assert from_engine(frame(message)[LENGTH_BYTES:]) == message


@pytest.mark.parametrize("data", [b"", b"\xc1", frame(Accepted("a"))[LENGTH_BYTES:], b"\x80"])
def test_what_is_no_message_to_the_engine_is_refused(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        to_engine(data)


@pytest.mark.parametrize("piece", [1, 3, 64, 1 << 20])
def test_the_connection_puts_pieces_together(piece: int) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        connection = Connection(theirs)
        data = b"".join(map(frame, TO_ENGINE))
        received = []
        for start in range(0, len(data), piece):
            ours.sendall(data[start : start + piece])
            received += connection.receive(wait=False)
        assert received == TO_ENGINE
        assert connection.receive(wait=False) == []


def test_an_end_that_is_closed_is_noticed_in_reading_and_in_writing() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        connection = Connection(theirs)
        ours.close()
        with pytest.raises(EOFError):
            connection.receive(wait=True)
        with pytest.raises(EOFError):
            connection.send(Accepted("a"))
