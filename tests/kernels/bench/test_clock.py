"""The clock's arithmetic, with an allocator and replays that stand in for the card's."""

from collections.abc import Sequence

import pytest
import torch

from thalweg.kernels.bench import clock
from thalweg.kernels.bench.clock import Call, GraphClock, Outputs


class Allocator:
    """Counts bytes as torch's allocator does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current = self.peak = 1000
        monkeypatch.setattr(clock, "_requested_bytes", lambda when: getattr(self, when))
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self.reset)

    def reset(self) -> None:
        self.peak = self.current

    def take(self, size: int) -> None:
        self.current += size
        self.peak = max(self.peak, self.current)

    def results(self) -> Outputs:
        """A fresh result of 64 bytes."""
        self.take(64)
        return {"out": torch.empty(16)}


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    return Allocator(monkeypatch)


def test_scratch_is_what_a_call_takes_and_what_it_keeps_without_its_results(allocator: Allocator) -> None:
    kept: list[int] = []

    def call() -> Outputs:
        if not kept:
            kept.append(300)
            allocator.take(300)
        allocator.take(50)
        outputs = allocator.results()
        allocator.take(-50)
        return outputs

    assert GraphClock().scratch_bytes(call) == 350


def test_what_only_a_first_call_takes_and_gives_back_is_no_scratch(allocator: Allocator) -> None:
    first = [True]

    def call() -> Outputs:
        if first.pop() if first else False:
            allocator.take(2**28)
            allocator.take(-(2**28))
        return allocator.results()

    assert GraphClock().scratch_bytes(call) == 0


def test_a_result_in_the_callers_buffer_is_no_new_memory(allocator: Allocator) -> None:
    buffer = {"out": torch.empty(16)}
    assert GraphClock().scratch_bytes(lambda: buffer) == 0


class Replays(GraphClock):
    """Every call takes `us`; notes how often a graph was replayed, and with how many rounds."""

    def __init__(self, us: float) -> None:
        self.us = us
        self.graphs: list[tuple[int, int]] = []

    def _warm_up(self, call: Call) -> None:
        pass

    def _replay_times(self, calls: Sequence[Call], rounds: int, replays: int) -> list[float]:
        self.graphs.append((rounds, replays))
        return [self.us] * replays


@pytest.mark.parametrize(
    ("us", "calls", "rounds", "replays"),
    [(4.0, 1, 512, 20), (4.0, 512, 1, 20), (100.0, 2, 20, 20), (100e3, 1, 1, 10), (400e3, 1, 1, 5)],
)
def test_short_calls_fill_a_graph_and_long_ones_are_replayed_less(
    us: float, calls: int, rounds: int, replays: int
) -> None:
    replays_of = Replays(us)
    assert replays_of.median_us([dict] * calls) == us
    assert replays_of.graphs[-1] == (rounds, replays)
