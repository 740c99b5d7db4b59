from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from tests.models.test_mla import CONFIG, random_weights
from thalweg.engine.engine import Engine
from thalweg.engine.params import Params
from thalweg.engine.pools import CacheSettings
from thalweg.engine.request import Output
from thalweg.engine.text import Text
from thalweg.models.deepseek_v4.model import DeepseekV4Model
from thalweg.models.linear import Weights
from thalweg.models.mla.model import MlaModel
from thalweg.models.open import TINY, open_model

MakeEngine = Callable[..., Engine]


@pytest.fixture(scope="session")
def tiny() -> DeepseekV4Model:
    model = open_model(TINY)
    assert isinstance(model, DeepseekV4Model)
    return model


@pytest.fixture(scope="session")
def mla() -> MlaModel:
    """A random DeepSeek-V3-shaped model of 40 tokens: it writes noise, always the same."""
    return MlaModel(CONFIG, Weights(random_weights(CONFIG), torch.float32, True))


@pytest.fixture(scope="session")
def text() -> Text:
    return Text(Path(TINY), 256)


@pytest.fixture
def make_engine(tiny: DeepseekV4Model, text: Text) -> MakeEngine:
    """An engine over thalweg-tiny (or `model`): make_engine(kv_tokens=..., max_requests=..., prefix_reuse=...)."""

    def make(model: object = None, prefix_reuse: bool = True, context: int = 1024, **settings: int) -> Engine:
        settings = {"kv_tokens": context, "max_requests": 4, "chunk_tokens": 256, "snapshots": 4} | settings
        cache = CacheSettings(context, **settings)  # type: ignore[arg-type]
        return Engine(model or tiny, text, cache, prefix_reuse=prefix_reuse, count_work=True)  # type: ignore[arg-type]

    return make


def run(engine: Engine) -> dict[str, list[Output]]:
    """Steps until nothing is left; every output by request."""
    outputs: dict[str, list[Output]] = {}
    while engine.busy:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def tokens(outputs: Sequence[Output]) -> list[int]:
    return [drawn.token for output in outputs for drawn in output.drawn]


def alone(engine: Engine, prompt: Sequence[int], params: Params) -> list[int]:
    """The tokens of one request that has the engine for itself."""
    return tokens(list(engine.stream(prompt, params)))


def assert_empty(engine: Engine) -> None:
    """Every page is free but for those that the prefix tree keeps, and those can all be freed."""
    if engine.scheduler.tree is not None:
        engine.scheduler.tree.clear()
    assert (engine.pools.pages.used, engine.pools.window_pages.used) == (0, 0)
    assert bool((engine.pools.page_table == -1).all()) and bool((engine.pools.window_table == -1).all())
