"""The MTP head, which transformers lacks, against the naive oracle; from a checkpoint in DeepSeek's own naming."""

from pathlib import Path

import pytest
import torch

from tests.oracle.deepseek_checkpoint import write_checkpoint
from tests.oracle.following import Follower
from tests.oracle.naive_v4 import NaiveV4, Switches
from tests.oracle.transformers_v4 import PagedRun, random_tokens
from thalweg.models.config import DeepseekV4Config
from thalweg.models.deepseek_v4.model import DeepseekV4Model
from thalweg.models.linear import Weights
from thalweg.models.weights.checkpoint import load_weights


class MtpRun(PagedRun):
    def step_with_mtp(self, tokens: torch.Tensor, next_tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        batch = self.next_rows({0: tokens})
        streams = self.model.forward(batch, self.caches)
        return self.model.logits(streams), self.model.mtp_logits(streams, next_tokens, batch, self.caches)

    def prefill_with_mtp(self, tokens: torch.Tensor, chunk: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(logits, MTP logits) of every token but the last, which is only somebody's next token."""
        steps = zip(tokens[:-1].split(chunk), tokens[1:].split(chunk), strict=True)
        logits, mtp_logits = zip(*(self.step_with_mtp(*step) for step in steps), strict=True)
        return torch.cat(logits), torch.cat(mtp_logits)


def open_deepseek(folder: Path, *, hadamard: bool) -> tuple[DeepseekV4Config, DeepseekV4Model, dict[str, torch.Tensor]]:
    """The naive oracle gets the tensors as they were written, thalweg what its loader makes of the files."""
    config, written = write_checkpoint(folder, hadamard=hadamard)
    loaded = load_weights(folder, config, dtype=torch.float64, mtp=True)
    return config, DeepseekV4Model(config, Weights(loaded, torch.float32, batch_invariant=True), mtp=True), written


@pytest.mark.parametrize("hadamard", [False, True])
def test_mtp_equals_the_naive_oracle_in_exact_mode(hadamard: bool, tmp_path: Path) -> None:
    config, model, written = open_deepseek(tmp_path, hadamard=hadamard)
    tokens = random_tokens(200)
    logits, mtp_logits = MtpRun(model, 1, 200, "exact").prefill_with_mtp(tokens, chunk=200)
    naive = NaiveV4(config, written, Switches(hadamard_q=hadamard, hadamard_k=hadamard))
    streams = naive.forward(tokens[:-1])
    assert float((logits - naive.logits(streams)).abs().max()) < 1e-4
    assert float((mtp_logits - naive.mtp_logits(streams, tokens[1:])).abs().max()) < 1e-4


@pytest.mark.parametrize("hadamard", [False, True])
def test_mtp_equals_the_naive_oracle_with_quantised_caches(
    hadamard: bool, tmp_path: Path, choices: list[torch.Tensor]
) -> None:
    config, model, written = open_deepseek(tmp_path, hadamard=hadamard)
    tokens = random_tokens(200)
    run = MtpRun(model, 1, 200, "v4")
    logits, mtp_logits = run.prefill_with_mtp(tokens, chunk=200)
    naive = Follower(config, written, Switches(hadamard_q=hadamard, hadamard_k=hadamard), run, choices)
    streams = naive.forward(tokens[:-1])
    assert float((logits - naive.logits(streams)).abs().max()) < 1e-4
    assert float((mtp_logits - naive.mtp_logits(streams, tokens[1:])).abs().max()) < 1e-4
    naive.assert_right_roundings()


@pytest.mark.parametrize("kv_layout", ["exact", "v4"])
@pytest.mark.parametrize("chunk", [1, 7])
def test_mtp_gives_the_same_bits_in_any_chunks(kv_layout: str, chunk: int, tmp_path: Path) -> None:
    _, model, _ = open_deepseek(tmp_path, hadamard=True)
    tokens = random_tokens(140)
    at_once = MtpRun(model, 1, 140, kv_layout).prefill_with_mtp(tokens, chunk=140)
    in_chunks = MtpRun(model, 1, 140, kv_layout, seed=1).prefill_with_mtp(tokens, chunk)
    assert torch.equal(in_chunks[0], at_once[0]) and torch.equal(in_chunks[1], at_once[1])
