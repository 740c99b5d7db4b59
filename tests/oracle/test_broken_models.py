"""Negative controls: a model broken on purpose, in ways that have happened, fails the comparison with transformers by far."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from tests.oracle.transformers_v4 import (
    PagedRun,
    open_with_thalweg,
    random_oracle,
    random_tokens,
    reference,
    yarn,
)
from thalweg.models.config import DeepseekV4Config
from thalweg.models.deepseek_v4 import attention, block
from thalweg.models.deepseek_v4.model import DeepseekV4Model
from thalweg.models.deepseek_v4.step import Step
from thalweg.models.linear import Weights
from thalweg.models.weights.checkpoint import load_weights
from thalweg.ops.compressor import reference as compressor

TOKENS = 200
FAR = 1e-2  # a hundred times what the comparison allows


@dataclass(frozen=True)
class Case:
    config: DeepseekV4Config
    weights: dict[str, torch.Tensor]
    tokens: torch.Tensor
    expected: torch.Tensor

    def model(self, **changes: object) -> DeepseekV4Model:
        weights = Weights(dict(self.weights), torch.float32, batch_invariant=True)
        return DeepseekV4Model(replace(self.config, **changes), weights)

    def difference(self, model: DeepseekV4Model) -> float:
        logits = PagedRun(model, 1, TOKENS, "exact").prefill(0, self.tokens, chunk=TOKENS)
        return float((logits - self.expected).abs().max())


@pytest.fixture(scope="module")
def case() -> Iterator[Case]:
    oracle = random_oracle(1, [0, 4, 128], index_topk=16, rope_parameters=yarn(16.0, 4096))
    tokens = random_tokens(TOKENS)
    with TemporaryDirectory() as folder:
        config, _ = open_with_thalweg(oracle, Path(folder))
        weights = load_weights(folder, config, dtype=torch.float64)
    yield Case(config, weights, tokens, reference(oracle, tokens).logits)


def test_the_unbroken_model_passes(case: Case) -> None:
    assert case.difference(case.model()) < 1e-4


def test_streams_mixed_along_the_other_axis(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    def transposed(real: Callable) -> Callable:
        return lambda y, streams, post, comb, *rest, **named: real(y, streams, post, comb.mT, *rest, **named)

    monkeypatch.setattr(block, "mhc_post", transposed(block.mhc_post))
    monkeypatch.setattr(block, "mhc_post_pre_norm", transposed(block.mhc_post_pre_norm))
    assert case.difference(case.model()) > FAR


def test_compressed_entries_rotated_one_position_further(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    real = compressor.rotate
    monkeypatch.setattr(compressor, "rotate", lambda x, positions, frequencies: real(x, positions + 1, frequencies))
    assert case.difference(case.model()) > FAR


def test_compressed_entries_visible_one_token_late(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    late = property(lambda step: step.batch.positions // 4)
    monkeypatch.setattr(Step, "c4_lengths", late)
    assert case.difference(case.model()) > FAR


def test_values_not_turned_back(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    real = attention.sparse_mla
    monkeypatch.setattr(attention, "sparse_mla", lambda *args, rotate_back, **named: real(*args, **named))
    assert case.difference(case.model()) > FAR


def test_no_attention_sink(case: Case) -> None:
    model = case.model()
    for layer in model.blocks:
        layer.attention.sink = torch.full_like(layer.attention.sink, float("-inf"))
    assert case.difference(model) > FAR


@pytest.mark.parametrize(
    "changes",
    [{"sliding_window": 127}, {"index_topk": 15}, {"rope_scaling": None}, {"rope_theta": 160000.0}],
    ids=lambda changes: next(iter(changes)),
)
def test_another_configuration(changes: dict[str, object], case: Case) -> None:
    assert case.difference(case.model(**changes)) > FAR


def test_hadamard_on_the_keys_alone(case: Case) -> None:
    """Case 13. No configuration does it: the switch is forced apart here."""
    model = case.model(index_hadamard=True)
    assert case.difference(model) < 1e-4  # both sides: the exact scores stay
    for layer in model.blocks:
        if layer.attention.indexer is not None:
            layer.attention.indexer.hadamard = False
    assert case.difference(model) > FAR
