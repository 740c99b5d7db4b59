"""One implementation at one case: inputs, check, time. What is not right gets no time."""

from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch

from thalweg.kernels.bench.benchmark import Adapter, Benchmark, Bind
from thalweg.kernels.bench.cases import Case
from thalweg.kernels.bench.clock import Call, Outputs


class Clock(Protocol):
    """See `GraphClock`."""

    def usable(self) -> bool: ...
    def retained_bytes(self) -> int: ...
    def scratch_bytes(self, call: Call) -> int: ...
    def replayed(self, call: Call) -> Outputs: ...
    def median_us(self, calls: list[Call]) -> float: ...


@dataclass
class Result:
    """The fastest right variant of an operation, and the times of all of them."""

    impl: str
    op: str
    variant: str
    us: float
    error: float
    checked_rows: int
    scratch_bytes: int
    variants: dict[str, float]
    sets: int


@dataclass
class Answer:
    """What one implementation gave for a case; `failures` are lines for people."""

    results: list[Result] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def measure(
    benchmark: Benchmark,
    adapters: list[tuple[Adapter, Bind]],
    case: Case,
    device: torch.device,
    seed: int,
    clock: Clock,
    kept: dict[str, int],
) -> Answer:
    """Every operation of an implementation at `case`. Raises Unusable where the device is lost to this process.

    `kept` holds, from one call to the next, the bytes that each operation keeps allocated between its calls: they are part of
    its scratch. What operations share counts for the first of them.
    """
    answer = Answer()
    sets = benchmark.make_inputs(case, [adapter.op for adapter, _ in adapters], device, seed)
    for adapter, bind in adapters:
        before = clock.retained_bytes()
        _measure_one(benchmark, adapter, bind, sets, clock, kept.get(adapter.op, 0), answer)
        kept[adapter.op] = kept.get(adapter.op, 0) + clock.retained_bytes() - before
    return answer


def _measure_one(
    benchmark: Benchmark, adapter: Adapter, bind: Bind, sets: list[Any], clock: Clock, kept: int, answer: Answer
) -> None:
    try:
        bound = [bind(each) for each in sets]
    except Exception as error:
        _note(answer, f"{adapter.impl} {adapter.op}", error, clock)
        return
    right: dict[str, tuple[float, float, int, int]] = {}
    for variant in bound[0]:
        calls = [each[variant] for each in bound]
        try:
            scratch = kept + clock.scratch_bytes(calls[0])
            off, rows = benchmark.check(sets[0], clock.replayed(calls[0]), adapter.op)
            right[variant] = clock.median_us(calls), off, rows, scratch
        except Exception as error:
            _note(answer, f"{adapter.impl} {adapter.op} ({variant})", error, clock)
    if right:
        best = min(right, key=lambda name: right[name][0])
        us, off, rows, scratch = right[best]
        times = {name: value[0] for name, value in right.items()}
        answer.results.append(Result(adapter.impl, adapter.op, best, us, off, rows, scratch, times, len(sets)))


def _note(answer: Answer, what: str, error: Exception, clock: Clock) -> None:
    answer.failures.append(f"{what}: {one_line(error)}")
    if not clock.usable():
        raise Unusable(answer) from error


class Unusable(Exception):
    """The device cannot be used by this process any more; holds the answer so far."""

    def __init__(self, answer: Answer) -> None:
        super().__init__("the device cannot be used by this process any more")
        self.answer = answer


def one_line(error: BaseException) -> str:
    """An error as one line of at most 300 characters."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300]
