"""The bundled checkpoint: what it is, that transformers opens it too, and that what it learned reaches the paged model."""

import lzma
import math

import pytest
import torch
import transformers

from tests.heldout import BOS, GENCOL, PTY, TITUS, token_ids
from tests.oracle.transformers_v4 import PagedRun, reference
from tests.random_entries import random_entries
from thalweg.models.config import DeepseekV4Config, read_config
from thalweg.models.deepseek_v4 import indexer
from thalweg.models.deepseek_v4.model import DeepseekV4Model
from thalweg.models.open import TINY, open_model


@pytest.fixture(scope="module")
def tiny() -> DeepseekV4Model:
    model = open_model(TINY)
    assert isinstance(model, DeepseekV4Model)
    return model


def test_it_takes_at_most_14_megabytes() -> None:
    assert sum(file.stat().st_size for file in TINY.iterdir()) <= 14_000_000


def test_it_has_the_real_head_geometry_and_every_kind_of_layer() -> None:
    config = read_config(TINY)
    assert isinstance(config, DeepseekV4Config)
    assert (config.head_dim, config.rope_head_dim, config.index_head_dim) == (512, 64, 128)
    assert config.index_num_heads >= 16
    assert config.index_topk == 64
    assert config.sliding_window == 128
    assert set(config.compress_ratios) == {0, 4, 128}
    assert set(config.hash_layers) == {True, False}
    assert config.hc_mult == 4
    assert config.num_mtp_layers == 1
    assert config.num_shared_experts == 1 and config.num_experts_per_token < config.num_experts
    assert config.max_position_embeddings == 1048576


def test_transformers_opens_it_and_computes_the_same_logits(tiny: DeepseekV4Model) -> None:
    """Over exact caches; the Hadamard rotation, which transformers lacks, changes nothing before quantisation."""
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        TINY, dtype=torch.float32, output_loading_info=True
    )
    assert isinstance(theirs, transformers.DeepseekV4ForCausalLM)
    assert not report["missing_keys"] and not report["mismatched_keys"]
    ids = token_ids([GENCOL[:700]])
    expected = reference(theirs.eval(), ids)
    assert expected.near_ties(tiny.config.index_topk, below=1e-6) == []
    with torch.inference_mode():
        logits = PagedRun(tiny, 1, len(ids), "exact").prefill(0, ids, chunk=64)
    assert tiny.config.index_hadamard
    assert float((logits - expected.logits).abs().max()) < 1e-4


@torch.inference_mode()
def bits(model: DeepseekV4Model, documents: list[bytes]) -> list[float]:
    """Bits that each document takes, its end included, when the model reads all in a row over `v4` caches."""
    ids = torch.cat((token_ids(documents), torch.tensor([BOS])))
    logits = PagedRun(model, 1, len(ids), "v4").prefill(0, ids[:-1], chunk=256)
    tokens = torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none") / math.log(2)
    return [float(part.sum()) for part in tokens.split([len(document) + 1 for document in documents])]


@pytest.fixture(scope="module")
def by_indexer(tiny: DeepseekV4Model) -> list[float]:
    return bits(tiny, [TITUS, GENCOL, PTY])


def test_it_compresses_text_it_has_not_seen_far_better_than_xz(by_indexer: list[float]) -> None:
    text = TITUS + GENCOL + PTY
    xz = 8 * len(lzma.compress(text, format=lzma.FORMAT_XZ, preset=9))
    print(f"{len(text):,} bytes: {sum(by_indexer) / len(text):.4f} bits per byte, xz -9 {xz / len(text):.4f}")
    assert sum(by_indexer) < 0.7 * xz
    # xz knows nothing before the first byte, which is hard on a text this short: hence a bound of the model's own (1.115).
    assert sum(by_indexer) / len(text) < 1.15


def test_random_entries_in_place_of_the_indexers_choice_are_measurably_worse(
    tiny: DeepseekV4Model, by_indexer: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = [TITUS, GENCOL]
    monkeypatch.setattr(indexer, "index_topk", random_entries(seed=0))
    blind = [size / len(document) for size, document in zip(bits(tiny, documents), documents, strict=True)]
    chosen = [size / len(document) for size, document in zip(by_indexer, documents, strict=False)]
    print(f"bits per byte, indexer {chosen[0]:.3f} and {chosen[1]:.3f}, random {blind[0]:.3f} and {blind[1]:.3f}")
    assert blind[0] > chosen[0] + 0.05 and blind[1] > chosen[1] + 0.15
