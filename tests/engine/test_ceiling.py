"""Cost follows the tokens that are there: a step under a ceiling of 1,048,576 tokens does what it does under 8,192."""

from collections.abc import Iterator

import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from tests.engine.conftest import MakeEngine
from thalweg.engine.params import Params
from thalweg.layouts.work import Work
from thalweg.models.deepseek_v4.model import DeepseekV4Model

PROMPT = [256, *(b"The river carries what the rain brings. " * 30)]
KV_TOKENS = 1048576


def allocated_bytes(trace: profile) -> int:
    """Every byte that torch allocated while `trace` ran, freed again or not."""
    assert trace.profiler is not None and trace.profiler.kineto_results is not None

    def walk(events: list) -> Iterator[int]:
        for event in events:
            if event.tag == _EventType.Allocation:
                yield max(event.extra_fields.alloc_size, 0)
            yield from walk(event.children)

    return sum(walk(trace.profiler.kineto_results.experimental_event_tree()))


def measure(make_engine: MakeEngine, ceiling: int) -> tuple[list[int], Work, Work, list[int]]:
    """(tokens, work of prefill, work of decoding, bytes allocated by each of four decode steps)."""
    engine = make_engine(context=ceiling, kv_tokens=KV_TOKENS)
    engine.add("one", PROMPT, Params(max_tokens=5))
    tokens, allocated = [], []
    while engine.busy:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
            outputs = engine.step()
        tokens += [drawn.token for output in outputs for drawn in output.drawn]
        allocated.append(allocated_bytes(trace))
    return tokens, engine.stats.prefill.work, engine.stats.decode.work, allocated[-4:]


def test_a_step_does_not_depend_on_the_ceiling(make_engine: MakeEngine) -> None:
    assert len(PROMPT) > 260, "the selection must bite"
    low, high = measure(make_engine, 8192), measure(make_engine, 1048576)
    assert low == high
    assert low[2].keys_scored > 0 and low[2].pages_read > 0 and min(low[3]) > 0


def test_bytes_allocated_by_a_step_are_really_counted() -> None:
    """A negative control: one more tensor of 4,096 floats is seen."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        torch.empty(4096)
    assert allocated_bytes(trace) >= 4 * 4096


def test_work_follows_the_tokens_that_are_there(tiny: DeepseekV4Model, make_engine: MakeEngine) -> None:
    """Keys scored by a decode step grow with the context, one for every four tokens and CSA layer."""
    layers = sum(ratio == 4 for ratio in tiny.config.compress_ratios)
    for length in (400, 800):
        engine = make_engine(context=4096)
        list(engine.stream(PROMPT[:length], Params(max_tokens=2)))
        assert engine.stats.decode.work.keys_scored == layers * ((length + 1) // 4)
