"""The bundled checkpoint on a GPU, by the reference operations: the CPU's text, and bf16 near it."""

import pytest
import torch

from thalweg.engine.generation import Generation
from thalweg.engine.pools import CachePools, CacheSettings
from thalweg.engine.sampler import Sampling
from thalweg.models.interface import Model
from thalweg.models.open import TINY, open_model

PROMPT = [256, *(b"import os\n\n\ndef walk(path):\n    for name in sorted(os.listdir(path)):\n" * 6)]


def greedy(model: Model) -> list[int]:
    pools = CachePools(model, CacheSettings(1024, 1024))
    return list(Generation(model, pools, PROMPT, Sampling(), 60))


@pytest.mark.gpu
def test_float32_text_equals_the_cpus(tiny: Model) -> None:
    assert greedy(open_model(TINY, device="cuda")) == greedy(tiny)


@pytest.mark.gpu
def test_bf16_writes_from_the_same_checkpoint(tiny: Model) -> None:
    """bf16 rounding moves logits: most of the first tokens agree, all need not."""
    model = open_model(TINY, device="cuda", dtype=torch.bfloat16, batch_invariant=False)
    same = [a == b for a, b in zip(greedy(model), greedy(tiny), strict=False)]
    assert sum(same[:20]) >= 10
