"""Measuring with a clock that runs calls on the CPU: what is wrong gets no time, and one failure ends nothing else."""

import pytest
import torch

from thalweg.kernels.bench.benchmark import Adapter, Bind
from thalweg.kernels.bench.clock import Call, Outputs
from thalweg.kernels.bench.index import BENCHMARK
from thalweg.kernels.bench.index.cases import Case
from thalweg.kernels.bench.index.inputs import Inputs
from thalweg.kernels.bench.measure import Unusable, measure

CASE = Case(batch=2, keys=600, ceiling=8192, rows=2, k=512)
CPU = torch.device("cpu")


class FakeClock:
    """Runs calls as they are; a call takes the microseconds that it says in `us`, or 10."""

    def __init__(self, usable: bool = True) -> None:
        self._usable = usable
        self._retained = 0

    def usable(self) -> bool:
        return self._usable

    def retained_bytes(self) -> int:
        self._retained += 50
        return self._retained

    def scratch_bytes(self, call: Call) -> int:
        call()
        return 11

    def replayed(self, call: Call) -> Outputs:
        return call()

    def median_us(self, calls: list[Call]) -> float:
        return getattr(calls[0], "us", 10.0)


def fake(bind) -> list[tuple[Adapter, Bind]]:
    return [(Adapter("fake", "topk", lambda: bind), bind)]


def right(inputs: Inputs) -> Call:
    def call() -> Outputs:
        order = torch.topk(inputs.logits[:, : CASE.keys], CASE.k).indices
        return {"indices": order.int()}

    return call


def wrong(inputs: Inputs) -> Call:
    def call() -> Outputs:
        return {"indices": torch.zeros(CASE.total_rows, CASE.k, dtype=torch.int32)}

    call.us = 1.0  # type: ignore[attr-defined]
    return call


def broken(inputs: Inputs) -> Call:
    def call() -> Outputs:
        raise RuntimeError("no such\nkernel")

    return call


@pytest.mark.parametrize("impl", ["thalweg", "torch"])
def test_the_implementations_that_run_here_are_right(impl: str) -> None:
    loaded = [(adapter, adapter.load()) for adapter in BENCHMARK.adapters_of(impl)]
    answer = measure(BENCHMARK, loaded, CASE, CPU, 5, FakeClock(), {})
    assert answer.failures == []
    assert [result.op for result in answer.results] == [adapter.op for adapter, _ in loaded]
    assert all(result.error == 0.0 and result.scratch_bytes == 11 for result in answer.results)


def test_torch_pads_where_a_row_has_fewer_keys_than_k() -> None:
    loaded = [(adapter, adapter.load()) for adapter in BENCHMARK.adapters_of("torch")]
    assert measure(BENCHMARK, loaded, Case(2, 128, 8192), CPU, 5, FakeClock(), {}).failures == []


def test_a_variant_that_is_wrong_gets_no_time_however_fast_it_is() -> None:
    bound = fake(lambda i: {"wrong": wrong(i), "broken": broken(i), "right": right(i)})
    answer = measure(BENCHMARK, bound, CASE, CPU, 5, FakeClock(), {})
    (result,) = answer.results
    assert (result.variant, result.us, result.variants) == ("right", 10.0, {"right": 10.0})
    assert len(answer.failures) == 2
    assert answer.failures[0].startswith("fake topk (wrong): Wrong: ")
    assert answer.failures[1] == "fake topk (broken): RuntimeError: no such kernel"


def test_the_fastest_right_variant_is_the_result() -> None:
    def fast(inputs: Inputs) -> Call:
        call = right(inputs)
        call.us = 3.0  # type: ignore[attr-defined]
        return call

    answer = measure(BENCHMARK, fake(lambda i: {"slow": right(i), "fast": fast(i)}), CASE, CPU, 5, FakeClock(), {})
    assert (answer.results[0].variant, answer.results[0].us) == ("fast", 3.0)
    assert answer.results[0].variants == {"slow": 10.0, "fast": 3.0}


def test_nothing_more_runs_once_the_device_is_lost_and_what_ran_is_kept() -> None:
    bound = fake(lambda i: {"right": right(i), "broken": broken(i), "never": wrong(i)})
    with pytest.raises(Unusable) as lost:
        measure(BENCHMARK, bound, CASE, CPU, 5, FakeClock(usable=False), {})
    assert lost.value.answer.failures == ["fake topk (broken): RuntimeError: no such kernel"]


def test_a_peer_that_cannot_be_imported_says_which_module_is_missing() -> None:
    for impl in ("deepgemm", "tilelang", "sglang-topk", "flashinfer"):
        (adapter,) = BENCHMARK.adapters_of(impl)
        with pytest.raises(ModuleNotFoundError):
            adapter.load()


def test_what_an_operation_keeps_between_its_calls_is_part_of_its_scratch() -> None:
    kept: dict[str, int] = {}
    clock = FakeClock()  # every operation keeps 50 bytes more
    taken = [
        measure(BENCHMARK, fake(lambda i: {"right": right(i)}), CASE, CPU, 5, clock, kept).results[0] for _ in range(3)
    ]
    assert [result.scratch_bytes for result in taken] == [11, 61, 111]
