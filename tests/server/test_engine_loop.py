"""The engine's side of the socket, turn by turn."""

import socket
from collections.abc import Iterator

import pytest

from thalweg.engine.engine import Engine
from thalweg.engine.params import Params
from thalweg.engine.pools import CacheSettings
from thalweg.engine.text import Text
from thalweg.models.interface import Model
from thalweg.models.open import TINY
from thalweg.server.connection import Connection
from thalweg.server.engine_loop import EngineLoop
from thalweg.server.messages import (
    LENGTH_BYTES,
    Accepted,
    Cancel,
    FromEngine,
    Refused,
    Sequence,
    Shutdown,
    Step,
    Submit,
    ToEngine,
    frame,
    from_engine,
    length,
)


class Loop:
    """A loop and the other end of its socket."""

    def __init__(self, model: Model, ours: socket.socket, theirs: socket.socket) -> None:
        engine = Engine(model, Text(TINY, 256), CacheSettings(1024, 1024, max_requests=4), prefix_reuse=False)
        self.loop, self.ours = EngineLoop(engine, Connection(theirs)), ours

    def turn(self, *messages: ToEngine) -> list[FromEngine]:
        """What the engine answers to messages, in one turn."""
        for message in messages:
            self.ours.sendall(frame(message))
        assert self.loop.turn()
        answers: list[FromEngine] = []
        while not answers or not isinstance(answers[-1], Step):
            answers.append(from_engine(self._read(length(self._read(LENGTH_BYTES)))))
        return answers

    def _read(self, size: int) -> bytes:
        return self.ours.recv(size, socket.MSG_WAITALL)


@pytest.fixture
def loop(tiny: Model) -> Iterator[Loop]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Loop(tiny, ours, theirs)


def submit(id: str, *prompts: list[int], max_tokens: int = 100) -> Submit:
    return Submit(
        id, list(prompts), [Sequence(f"{id}-{i}", i, Params(max_tokens=max_tokens)) for i in range(len(prompts))]
    )


def test_a_cancelled_sequence_has_no_page_after_the_next_step(loop: Loop) -> None:
    accepted, step = loop.turn(submit("a", [256, 97, 98]))
    assert accepted == Accepted("a")
    assert isinstance(step, Step) and step.report.running == 1 and step.report.pages_used == 1
    (step,) = loop.turn(Cancel(["a-0"]))
    assert isinstance(step, Step) and step.outputs == []
    report = step.report
    assert (report.running, report.waiting, report.pages_used, report.window_pages_used) == (0, 0, 0, 0)


def test_a_neighbour_goes_on_in_the_step_that_frees_the_pages_of_a_cancelled_one(loop: Loop) -> None:
    loop.turn(submit("a", [256, 97, 98]), submit("b", [256, 99]))
    (step,) = loop.turn(Cancel(["a-0"]))
    assert isinstance(step, Step)
    assert [tokens.id for tokens in step.outputs] == ["b-0"]
    assert step.report.pages_used == 1


def test_of_a_request_that_cannot_be_served_nothing_is_queued(loop: Loop) -> None:
    refused, step = loop.turn(submit("a", [256, 97], [256, 99_999]))
    assert isinstance(refused, Refused) and "token id 99999" in refused.message
    assert isinstance(step, Step) and step.report.running == step.report.waiting == 0


def test_a_sequence_cancelled_in_the_turn_it_came_in_never_runs(loop: Loop) -> None:
    _, step = loop.turn(submit("a", [256, 97]), Cancel(["a-0"]))
    assert isinstance(step, Step) and step.outputs == [] and step.report.prefill.steps == 0


def test_shutdown_ends_the_loop_in_the_middle_of_a_request(loop: Loop) -> None:
    loop.turn(submit("a", [256, 97]))
    loop.ours.sendall(frame(Shutdown()))
    assert not loop.loop.turn()
