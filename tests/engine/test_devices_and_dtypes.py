"""The bundled checkpoint on a GPU, by the reference operations: the CPU's text; and in bf16, on either."""

import math

import pytest
import torch

from tests.engine.conftest import MakeEngine, alone
from thalweg.engine.params import Params
from thalweg.engine.pools import CachePools, CacheSettings
from thalweg.models.batch import RowBatch
from thalweg.models.interface import Model
from thalweg.models.open import TINY, open_model

PROMPT = [256, *(b"import os\n\n\ndef walk(path):\n    for name in sorted(os.listdir(path)):\n" * 6)]


@pytest.mark.gpu
def test_float32_text_on_a_gpu_equals_the_cpus(make_engine: MakeEngine) -> None:
    params = Params(max_tokens=60)
    assert alone(make_engine(open_model(TINY, device="cuda", batch_invariant=True)), PROMPT, params) == alone(
        make_engine(), PROMPT, params
    )


def bits_per_byte(model: Model) -> float:
    """Of the prompt's own bytes, read in one chunk through the caches."""
    pools = CachePools(model, CacheSettings(1024, 1024))
    pools.grow(0, 0, len(PROMPT))
    tokens = torch.tensor(PROMPT, device=model.device)
    batch = RowBatch(
        tokens=tokens[:-1],
        positions=torch.arange(len(PROMPT) - 1, device=model.device),
        row_to_request=torch.zeros(len(PROMPT) - 1, dtype=torch.int64, device=model.device),
        page_table=pools.page_table,
        window_table=pools.window_table,
        state_slots=pools.state_slots,
    )
    with torch.inference_mode():
        logits = model.logits(model.forward(batch, pools.caches))
    return float(torch.nn.functional.cross_entropy(logits, tokens[1:])) / math.log(2)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_bf16_predicts_as_well_as_float32(tiny: Model, device: str) -> None:
    """Text may part where two tokens are nearly equal; what the model knows of a text may not."""
    model = open_model(TINY, device=device, dtype=torch.bfloat16)
    assert bits_per_byte(model) == pytest.approx(bits_per_byte(tiny), rel=0.02)
