"""A request that the model cannot compute gets an error of its own; its neighbours and the engine go on."""

import asyncio

import pytest
import torch

from tests.server.test_engine_loop import Loop, loop, submit  # noqa: F401  (loop is a fixture)
from thalweg.engine.params import Params
from thalweg.models.interface import Model
from thalweg.server.engine_client import EngineClient, State
from thalweg.server.errors import ApiError
from thalweg.server.messages import (
    Accepted,
    Cancel,
    EngineReport,
    PhaseReport,
    Sequence,
    Step,
    Submit,
    Tokens,
    frame,
)
from thalweg.server.metrics import Metrics
from thalweg.server.settings import EngineSettings

REPORT = EngineReport(0, 0, 0, 0, 0, 0, 0, 0, PhaseReport(0, 0, 0.0), PhaseReport(0, 0, 0.0))


def test_the_engine_reports_logits_that_are_no_numbers_as_that_sequences_error(
    loop: Loop,  # noqa: F811
    tiny: Model,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = tiny.logits

    def damaged(streams: torch.Tensor) -> torch.Tensor:
        logits = real(streams)
        logits[0, 5] = float("nan")
        return logits

    monkeypatch.setattr(tiny, "logits", damaged)
    step = loop.turn(submit("a", [256, 97]), submit("b", [256, 98]))[-1]
    assert isinstance(step, Step)
    hurt, sound = step.outputs
    assert (hurt.id, hurt.finish, hurt.tokens) == ("a-0", "error", [])
    assert hurt.error is not None and "no finite numbers at position 1" in hurt.error
    assert sound.id == "b-0" and sound.error is None and len(sound.tokens) == 1
    assert step.report.running == 1


class Writer:
    """Keeps what would go to the engine."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.frames.append(data)


def test_the_client_gets_500_and_the_other_choices_of_that_request_are_cancelled() -> None:
    async def talk() -> tuple[ApiError, Writer, EngineClient]:
        client = EngineClient(EngineSettings(), Metrics(), lambda ready: None)
        client.state, client._writer = State.READY, Writer()  # type: ignore[assignment]
        sequences = [Sequence(f"a-{number}", 0, Params()) for number in range(2)]
        stream = client.submit(Submit("a", [[1]], sequences))
        neighbour = client.submit(Submit("b", [[2]], [Sequence("b-0", 0, Params())]))
        client._take(Accepted("a"))
        client._take(Step([Tokens("a-0", [], "", "error", 1, 0, 0, "the model computed no numbers")], REPORT))
        await stream.accepted()
        with pytest.raises(ApiError) as caught:
            async for _ in stream:
                pass
        assert list(client._streams.values()) == [neighbour]
        return caught.value, client._writer, client  # type: ignore[return-value]

    error, writer, client = asyncio.run(talk())
    assert error.status == 500
    assert error.body["error"]["message"] == "the model computed no numbers"
    assert error.body["error"]["code"] == "request_failed"
    assert writer.frames[-1] == frame(Cancel(["a-1"]))
    assert b'thalweg:sequences_total{finish="error"} 1.0' in client.metrics.text()
