"""Generation from the bundled checkpoint: the same tokens however the prompt is cut, and every page given back."""

import gc

import pytest
import torch

from thalweg.engine.generation import Generation
from thalweg.engine.pools import CachePools, CacheSettings, OutOfRows
from thalweg.engine.sampler import Sampling
from thalweg.errors import UserError
from thalweg.models.batch import RowBatch
from thalweg.models.deepseek_v4.model import DeepseekV4Model
from thalweg.models.interface import PoolSizes

PROMPT = [256, *(b"import os\n\n\ndef walk(path):\n    for name in sorted(os.listdir(path)):\n" * 6)]
GREEDY = Sampling()


def pools_for(model: DeepseekV4Model, tokens: int = 1024, chunk: int = 256, **changes: object) -> CachePools:
    return CachePools(model, CacheSettings(tokens, tokens, chunk_tokens=chunk, **changes))  # type: ignore[arg-type]


def greedy_without_reuse(model: DeepseekV4Model, prompt: list[int], count: int) -> list[int]:
    """Every token from a fresh forward over everything before it: no decode step, no carried state."""
    tokens = list(prompt)
    for _ in range(count):
        caches = model.allocate(PoolSizes(pages=5, window_pages=5, state_slots=2))
        batch = RowBatch(
            tokens=torch.tensor(tokens),
            positions=torch.arange(len(tokens)),
            row_to_request=torch.zeros(len(tokens), dtype=torch.int64),
            page_table=torch.arange(1, 5).view(1, 4),
            window_table=torch.arange(1, 5).view(1, 4),
            state_slots=torch.tensor([1]),
        )
        with torch.inference_mode():
            tokens.append(int(model.logits(model.forward(batch, caches)[-1:]).argmax()))
    return tokens[len(prompt) :]


def test_decoding_gives_the_tokens_of_a_fresh_forward_each_time(tiny: DeepseekV4Model) -> None:
    tokens = list(Generation(tiny, pools_for(tiny), PROMPT, GREEDY, 6))
    assert tokens == greedy_without_reuse(tiny, PROMPT, 6)


@pytest.mark.parametrize("chunk", [1, 64, 100])
def test_text_does_not_depend_on_how_the_prompt_is_cut(tiny: DeepseekV4Model, chunk: int) -> None:
    whole = list(Generation(tiny, pools_for(tiny, chunk=512), PROMPT, GREEDY, 40))
    assert list(Generation(tiny, pools_for(tiny, chunk=chunk), PROMPT, GREEDY, 40)) == whole


def test_every_page_comes_back_when_a_request_ends(tiny: DeepseekV4Model) -> None:
    pools = pools_for(tiny)
    generation = Generation(tiny, pools, PROMPT, GREEDY, 3)
    list(generation)
    assert generation.stats.pages == 2
    assert (pools.pages.used, pools.window_pages.used) == (0, 0)
    assert bool((pools.page_table == -1).all()) and bool((pools.window_table == -1).all())


def test_every_page_comes_back_when_a_request_is_abandoned(tiny: DeepseekV4Model) -> None:
    pools = pools_for(tiny)
    tokens = iter(Generation(tiny, pools, PROMPT, GREEDY, 100))
    next(tokens)
    assert pools.pages.used > 0
    tokens.close()  # type: ignore[attr-defined]
    assert (pools.pages.used, pools.window_pages.used) == (0, 0)


def test_every_page_comes_back_when_a_step_fails(tiny: DeepseekV4Model, monkeypatch: pytest.MonkeyPatch) -> None:
    pools = pools_for(tiny, chunk=64)
    expected = list(Generation(tiny, pools, PROMPT, GREEDY, 4))
    real, calls = tiny.logits, 0

    def fail_in_the_third(streams: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise MemoryError("in a step")
        return real(streams)

    with monkeypatch.context() as patch:
        patch.setattr(tiny, "logits", fail_in_the_third)
        with pytest.raises(MemoryError, match="in a step"):
            list(Generation(tiny, pools, PROMPT, GREEDY, 4))
    assert (pools.pages.used, pools.window_pages.used) == (0, 0)
    assert list(Generation(tiny, pools, PROMPT, GREEDY, 4)) == expected


def test_two_requests_at_once_need_two_rows_and_do_not_touch_each_other(tiny: DeepseekV4Model) -> None:
    alone = [list(Generation(tiny, pools_for(tiny), prompt, GREEDY, 6)) for prompt in (PROMPT, PROMPT[:90])]
    pools = CachePools(tiny, CacheSettings(1024, 2048, max_requests=2))
    together = [[], []]
    streams = [iter(Generation(tiny, pools, prompt, GREEDY, 6)) for prompt in (PROMPT, PROMPT[:90])]
    for _ in range(6):
        for tokens, stream in zip(together, streams, strict=True):
            tokens.append(next(stream))
    assert together == alone
    with pytest.raises(OutOfRows, match="2 requests at once"):
        next(iter(Generation(tiny, pools, PROMPT[:5], GREEDY, 1)))
    del stream, streams  # never finished: collected as garbage
    gc.collect()
    assert (pools.pages.used, pools.window_pages.used) == (0, 0)
    assert list(Generation(tiny, pools, PROMPT[:90], GREEDY, 6)) == alone[1]


def test_a_generation_runs_once(tiny: DeepseekV4Model) -> None:
    pools = pools_for(tiny)
    generation = Generation(tiny, pools, PROMPT[:20], GREEDY, 2)
    list(generation)
    with pytest.raises(RuntimeError, match="iterated before"):
        list(generation)
    assert pools.claim() == 0, "the refused iteration took nothing and gave nothing back"


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=1.0)])
def test_logits_that_are_no_numbers_are_an_error_not_a_token(
    tiny: DeepseekV4Model, monkeypatch: pytest.MonkeyPatch, wrong: float, sampling: Sampling
) -> None:
    real = tiny.logits
    monkeypatch.setattr(tiny, "logits", lambda streams: real(streams).index_fill(1, torch.tensor([7]), wrong))
    pools = pools_for(tiny)
    with pytest.raises(UserError, match="no finite numbers at position 19: its weights are damaged"):
        next(iter(Generation(tiny, pools, PROMPT[:20], sampling, 2)))
    assert pools.pages.used == 0


def test_a_pool_serves_request_after_request_with_the_same_text(tiny: DeepseekV4Model) -> None:
    pools = pools_for(tiny)
    first = list(Generation(tiny, pools, PROMPT, GREEDY, 8))
    list(Generation(tiny, pools, PROMPT[:50], GREEDY, 8))
    assert list(Generation(tiny, pools, PROMPT, GREEDY, 8)) == first


def test_window_pages_do_not_grow_with_the_prompt(tiny: DeepseekV4Model) -> None:
    """A request of 4,096 tokens keeps the pages of its last 128 tokens and of the chunk being read, no more."""
    pools = pools_for(tiny, tokens=4200, chunk=256)
    most = 0

    def watch(done: int, total: int) -> None:
        nonlocal most
        most = max(most, pools.window_pages.used)

    generation = Generation(tiny, pools, (PROMPT * 11)[:4096], GREEDY, 1, watch)
    list(generation)
    assert most <= 2 and generation.stats.window_pages <= 2
    assert generation.stats.pages == 16


def test_seed_and_temperature_fix_the_draws(tiny: DeepseekV4Model) -> None:
    def draw(seed: int) -> list[int]:
        return list(Generation(tiny, pools_for(tiny), PROMPT, Sampling(temperature=1.0, seed=seed), 30))

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_progress_reaches_the_whole_prompt(tiny: DeepseekV4Model) -> None:
    seen: list[tuple[int, int]] = []
    list(Generation(tiny, pools_for(tiny, chunk=200), PROMPT, GREEDY, 1, lambda *now: seen.append(now)))
    assert seen == [(0, len(PROMPT)), (200, len(PROMPT)), (400, len(PROMPT)), (len(PROMPT), len(PROMPT))]


def test_what_cannot_be_generated_is_refused_before_anything_is_computed(tiny: DeepseekV4Model) -> None:
    pools = pools_for(tiny, tokens=300)
    with pytest.raises(UserError, match="200 tokens and 101 new ones exceed the context length 300"):
        Generation(tiny, pools, PROMPT[:200], GREEDY, 101)
    with pytest.raises(UserError, match="prompt is empty"):
        Generation(tiny, pools, [], GREEDY, 1)
    with pytest.raises(UserError, match="token id 272"):
        Generation(tiny, pools, [272], GREEDY, 1)
    with pytest.raises(UserError, match="max-tokens is 0"):
        Generation(tiny, pools, [1], GREEDY, 0)


def test_a_pool_that_cannot_hold_one_request_of_the_ceiling_is_refused(tiny: DeepseekV4Model) -> None:
    with pytest.raises(UserError, match=r"pool of 4,096 KV tokens cannot hold one request of the context length 8,192"):
        CachePools(tiny, CacheSettings(8192, 4096))


def test_a_pool_that_memory_cannot_hold_is_refused_before_it_is_allocated(tiny: DeepseekV4Model) -> None:
    with pytest.raises(UserError, match=r"needs [\d.]+ GiB, cpu has [\d.]+ GiB available: lower --kv-tokens"):
        CachePools(tiny, CacheSettings(8192, 10**12))


def test_a_ceiling_beyond_the_model_is_refused(tiny: DeepseekV4Model) -> None:
    with pytest.raises(UserError, match="this model's is 1 to 1,048,576 tokens"):
        CachePools(tiny, CacheSettings(1048577, 1048577))


def test_planned_bytes_are_the_allocated_bytes(tiny: DeepseekV4Model) -> None:
    for layout in tiny.kv_layouts:
        sizes = PoolSizes(pages=5, window_pages=3, state_slots=2)
        storages = {}
        for layer in tiny.allocate(sizes, layout):
            for tensor in vars(layer).values():
                if tensor is not None:
                    storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        assert sum(storages.values()) == tiny.pool_bytes(sizes, layout)
