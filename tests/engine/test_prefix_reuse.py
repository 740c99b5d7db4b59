"""Prompts that begin alike are read once: at 256-token boundaries, restored with all that a request carries there."""

import pytest

from tests.engine.conftest import MakeEngine, alone, assert_empty, run, tokens
from thalweg.engine.params import Params
from thalweg.models.interface import Model

TEXT = list(b"The river carries what the rain brings, and the bed keeps what the river cannot carry. " * 20)
PARAMS = Params(max_tokens=24)


def second_run(engine_model: Model | None, make_engine: MakeEngine, first: list[int], second: list[int]) -> int:
    """Reads `first`, then `second`, which must give what it gives in a fresh engine; the tokens that were reused."""
    engine = make_engine(engine_model, context=2048)
    alone(engine, first, PARAMS)
    outputs = list(engine.stream(second, PARAMS))
    fresh = make_engine(engine_model, context=2048, prefix_reuse=False)
    assert tokens(outputs) == alone(fresh, second, PARAMS)
    assert_empty(engine)
    return outputs[-1].cached_tokens


@pytest.mark.parametrize(
    ("length", "reused"),
    [(255, 0), (256, 0), (257, 256), (300, 256), (512, 256), (513, 512), (1000, 768)],
)
def test_the_same_prompt_is_restored_at_its_last_boundary(make_engine: MakeEngine, length: int, reused: int) -> None:
    """At least one token is computed: its logits are stored nowhere."""
    assert second_run(None, make_engine, TEXT[:length], TEXT[:length]) == reused


def test_a_longer_prompt_goes_on_behind_a_shorter_one(make_engine: MakeEngine) -> None:
    assert second_run(None, make_engine, TEXT[:600], TEXT[:600] + TEXT[:300]) == 512


def test_a_prompt_that_branches_off_between_snapshots_is_read_again_and_leaves_one(make_engine: MakeEngine) -> None:
    """First prompt: 3 pages, restorable at 768. The second shares 512 tokens only: nothing to restore from, so it reads
    them and leaves a snapshot where they branch; the third finds it."""
    engine = make_engine(context=2048)
    other = [byte ^ 1 for byte in TEXT]
    first, second, third = TEXT[:800], TEXT[:512] + other[:300], TEXT[:512] + other[5:200]
    cached = [list(engine.stream(prompt, PARAMS))[-1].cached_tokens for prompt in (first, second, third)]
    assert cached == [0, 0, 512]
    fresh = make_engine(context=2048, prefix_reuse=False)
    assert alone(engine, third, PARAMS) == alone(fresh, third, PARAMS)


def test_the_mla_family_restores_at_every_page(mla: Model, make_engine: MakeEngine) -> None:
    prompt = [byte % 40 for byte in TEXT]
    assert second_run(mla, make_engine, prompt[:800], prompt[:600] + prompt[3:9]) == 512


def test_running_requests_share_the_pages_of_their_common_prefix(make_engine: MakeEngine) -> None:
    engine = make_engine(context=2048, kv_tokens=2048)
    alone(engine, TEXT[:1025], PARAMS)
    for i in range(4):  # alone each would take five pages; there are eight
        engine.add(str(i), [*TEXT[:1024], 65 + i], PARAMS)
    outputs = run(engine)
    assert engine.scheduler.retractions == 0
    assert {output.cached_tokens for found in outputs.values() for output in found} == {1024}
    assert_empty(engine)


def test_cached_prefixes_give_way_to_running_requests(make_engine: MakeEngine) -> None:
    engine = make_engine(context=1024, kv_tokens=1024)
    alone(engine, TEXT[:900], PARAMS)
    assert engine.pools.pages.used == 3
    other = [byte ^ 1 for byte in TEXT[:990]]
    fresh = make_engine(context=1024, prefix_reuse=False)
    assert alone(engine, other, PARAMS) == alone(fresh, other, PARAMS)
    assert engine.scheduler.retractions == 0
    assert_empty(engine)


def test_snapshots_give_way_to_running_requests(make_engine: MakeEngine) -> None:
    """Without window pages set aside for them, snapshots last until the windows of running requests need theirs."""
    engine = make_engine(context=1024, kv_tokens=8192, max_requests=2, snapshots=0, chunk_tokens=256)
    for i in range(12):
        alone(engine, [65 + i, *TEXT[:700]], Params(max_tokens=2))
    for i in range(4):
        engine.add(str(i), [97 + i, *TEXT[:700]], PARAMS)
    assert len(run(engine)) == 4
    assert_empty(engine)


def test_without_reuse_nothing_stays(make_engine: MakeEngine) -> None:
    engine = make_engine(prefix_reuse=False)
    outputs = [list(engine.stream(TEXT[:600], PARAMS))[-1] for _ in range(2)]
    assert [output.cached_tokens for output in outputs] == [0, 0]
    assert (engine.pools.pages.used, engine.pools.window_pages.used) == (0, 0)
