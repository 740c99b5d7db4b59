"""One request from the bundled checkpoint: the same tokens however the prompt is cut, and every page given back."""

import pytest
import torch

from tests.engine.conftest import MakeEngine, alone, assert_empty
from thalweg.engine.engine import Engine
from thalweg.engine.params import Params, Sampling
from thalweg.engine.pools import CacheSettings
from thalweg.engine.text import Text
from thalweg.errors import UserError
from thalweg.layouts.work import Work
from thalweg.models.batch import RowBatch
from thalweg.models.deepseek_v4.model import DeepseekV4Model
from thalweg.models.interface import PoolSizes

PROMPT = [256, *(b"import os\n\n\ndef walk(path):\n    for name in sorted(os.listdir(path)):\n" * 6)]


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


def test_decoding_gives_the_tokens_of_a_fresh_forward_each_time(tiny: DeepseekV4Model, make_engine: MakeEngine) -> None:
    assert alone(make_engine(), PROMPT, Params(max_tokens=6)) == greedy_without_reuse(tiny, PROMPT, 6)


@pytest.mark.parametrize("chunk", [1, 64, 100])
def test_text_does_not_depend_on_how_the_prompt_is_cut(make_engine: MakeEngine, chunk: int) -> None:
    whole = alone(make_engine(chunk_tokens=512), PROMPT, Params(max_tokens=40))
    assert alone(make_engine(chunk_tokens=chunk), PROMPT, Params(max_tokens=40)) == whole


def test_every_page_comes_back_when_a_request_is_abandoned(make_engine: MakeEngine) -> None:
    engine = make_engine()
    outputs = engine.stream(PROMPT, Params(max_tokens=100))
    next(outputs)
    assert engine.pools.pages.used > 0
    outputs.close()  # type: ignore[attr-defined]
    assert_empty(engine)


def test_window_pages_do_not_grow_with_the_prompt(make_engine: MakeEngine) -> None:
    """A request of 4,096 tokens keeps the pages of its last 128 tokens and of the chunk being read, no more."""
    engine = make_engine(context=4200, prefix_reuse=False)
    alone(engine, (PROMPT * 11)[:4096], Params(max_tokens=1))
    assert engine.pools.window_pages.most <= 2
    assert engine.pools.pages.most == 16


def test_seed_and_temperature_fix_the_draws(make_engine: MakeEngine) -> None:
    def draw(seed: int) -> list[int]:
        return alone(make_engine(), PROMPT, Params(Sampling(temperature=1.0, seed=seed), max_tokens=30))

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_what_cannot_be_served_is_refused_and_nothing_is_queued(make_engine: MakeEngine) -> None:
    engine = make_engine(context=300, kv_tokens=300)
    for prompt, params, message in (
        (PROMPT[:200], Params(max_tokens=101), "200 tokens and 101 new ones exceed the context length 300"),
        ([], Params(), "prompt is empty"),
        ([272], Params(), "token id 272 in the prompt"),
        ([1], Params(stop_token_ids=(999,)), "token id 999 in stop-token-ids"),
    ):
        with pytest.raises(UserError, match=message):
            engine.add("a", prompt, params)
    assert not engine.busy
    engine.add("a", [1], Params())
    with pytest.raises(UserError, match="one of that id already"):
        engine.add("a", [1], Params())


def test_a_pool_that_cannot_be_is_refused_before_it_is_allocated(make_engine: MakeEngine) -> None:
    with pytest.raises(UserError, match=r"pool of 4,096 KV tokens cannot hold one request of the context length 8,192"):
        make_engine(context=8192, kv_tokens=4096)
    with pytest.raises(UserError, match=r"needs [\d.]+ GiB, cpu has [\d.]+ GiB available: lower --kv-tokens"):
        make_engine(context=8192, kv_tokens=10**12)
    with pytest.raises(UserError, match="this model's is 1 to 1,048,576 tokens"):
        make_engine(context=1048577)


def test_planned_bytes_are_the_allocated_bytes(tiny: DeepseekV4Model) -> None:
    for layout in tiny.kv_layouts:
        sizes = PoolSizes(pages=5, window_pages=3, state_slots=2)
        storages = {}
        for layer in tiny.allocate(sizes, layout):
            for tensor in vars(layer).values():
                if tensor is not None:
                    storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        assert sum(storages.values()) == tiny.pool_bytes(sizes, layout)


def test_a_stretch_of_tokens_is_that_of_prompt_and_output_together(make_engine: MakeEngine) -> None:
    request = make_engine().add("a", [1, 2, 3], Params())
    request.output += [4, 5]
    for start in range(6):
        for end in range(start, 6):
            assert request.tokens_between(start, end) == [1, 2, 3, 4, 5][start:end]


def test_work_is_counted_only_where_it_is_asked_for(tiny: DeepseekV4Model, text: Text) -> None:
    engine = Engine(tiny, text, CacheSettings(256, 256))
    list(engine.stream(PROMPT[:20], Params(max_tokens=2)))
    assert engine.stats.decode.steps == 1 and engine.stats.decode.work == Work()
