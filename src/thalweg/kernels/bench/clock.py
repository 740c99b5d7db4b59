"""Times by replaying CUDA graphs: nothing of the host is in them."""

import statistics
from collections.abc import Callable, Sequence

import torch

Outputs = dict[str, torch.Tensor]
Call = Callable[[], Outputs]

_REPLAYS = 20
_LEAST_REPLAYS = 5
_ALL_REPLAYS_MS = 1000.0  # about so much for all of them where that is enough for the least number
_GRAPH_MS = 4.0  # about so much work in one graph
_MOST_CALLS = 512
_POISON = -7  # no index and no slot


class GraphClock:
    """Runs and times calls on the current CUDA device."""

    def usable(self) -> bool:
        """Whether the device still works for this process: an illegal access ends that, a failed capture does not."""
        try:
            torch.cuda.synchronize()
            return torch.ones(1, device="cuda").item() == 1
        except RuntimeError:
            return False

    def retained_bytes(self) -> int:
        """Device memory that earlier calls left allocated, without what torch's own products keep."""
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        return torch.cuda.memory_allocated()

    def scratch_bytes(self, call: Call) -> int:
        """Device memory of torch's allocator that a call takes beside its results, what it keeps for later included.

        It must be the first call of its case: what it keeps is seen once. What only a first call takes and gives back (an
        autotuner clears the L2 by a buffer) is none of it.
        """
        before = _requested_bytes("current")
        outputs = call()
        after = _requested_bytes("current")
        torch.cuda.reset_peak_memory_stats()
        again = call()
        taken = (after - before) + (_requested_bytes("peak") - after)
        # Results at the same place while the first are alive lie in a buffer of the caller's, which is no new memory.
        fresh = {_place(tensor): tensor for name, tensor in outputs.items() if _place(again[name]) != _place(tensor)}
        return taken - 2 * sum(tensor.untyped_storage().nbytes() for tensor in fresh.values())  # those of both calls

    def replayed(self, call: Call) -> Outputs:
        """What a replay of the captured call writes, over results that were poisoned after the capture."""
        graph = torch.cuda.CUDAGraph()
        self._warm_up(call)
        with torch.cuda.graph(graph):
            outputs = call()
        for tensor in outputs.values():
            tensor.fill_(float("nan") if tensor.is_floating_point() else _POISON)
        graph.replay()
        torch.cuda.synchronize()
        return {name: tensor.clone() for name, tensor in outputs.items()}

    def median_us(self, calls: Sequence[Call]) -> float:
        """Microseconds a call: the median of graph replays, each running the calls in turn, many of them in one graph."""
        for call in calls:
            self._warm_up(call)
        once = self._replay_times(calls, 1, replays=3)
        rounds = max(1, min(int(_GRAPH_MS * 1e3 / max(once[-1] * len(calls), 1.0)), _MOST_CALLS // len(calls)))
        graph_ms = once[-1] * len(calls) * rounds / 1e3
        replays = max(_LEAST_REPLAYS, min(_REPLAYS, int(_ALL_REPLAYS_MS / max(graph_ms, 1e-3))))
        return statistics.median(self._replay_times(calls, rounds, replays))

    def _replay_times(self, calls: Sequence[Call], rounds: int, replays: int) -> list[float]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(rounds):
                for call in calls:
                    call()
        graph.replay()
        times = []
        for _ in range(replays):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / (rounds * len(calls)))
        return times

    def _warm_up(self, call: Call) -> None:
        """Compiles and allocates what a first call does, on a side stream as capturing wants."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()


def _requested_bytes(when: str) -> int:
    """Device memory that is asked of torch's allocator, "current" or "peak": not rounded to its blocks."""
    torch.cuda.synchronize()
    return torch.cuda.memory_stats()[f"requested_bytes.all.{when}"]


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def e4m3_flop_per_second() -> float:
    """The rate of a large e4m3 product by torch on this card. Raises RuntimeError where torch has none."""
    size = 8192
    generator = torch.Generator("cuda").manual_seed(0)
    a, b = (torch.randn(size, size, device="cuda", generator=generator).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device="cuda")

    def product() -> Outputs:
        return {
            "c": torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)
        }

    return 2 * size**3 / (GraphClock().median_us([product]) * 1e-6)
