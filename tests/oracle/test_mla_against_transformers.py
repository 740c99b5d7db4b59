"""The MLA model against transformers' DeepseekV3ForCausalLM, float32, on random small models."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from tests.oracle.transformers_v3 import PagedRun, open_with_thalweg, random_oracle
from thalweg.models.mla.experts import Experts
from thalweg.models.mla.model import MlaModel

LENGTHS = (1, 3, 4, 5, 127, 128, 129, 255, 256, 257, 511, 512, 513)
TOLERANCE = 1e-4


def yarn(factor: int, mscale: float, mscale_all_dim: float, **more: float) -> dict[str, object]:
    original = 128  # most of the tested positions lie beyond it
    scaling = {"factor": factor, "mscale": mscale, "mscale_all_dim": mscale_all_dim, **more}
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "original_max_position_embeddings": original, **scaling}
    return {"rope_parameters": rope, "max_position_embeddings": factor * original}


CONFIGS: dict[str, dict[str, object]] = {
    # DeepSeek-V3: ranked queries, groups, YaRN with equal magnitudes.
    "v3": yarn(40, 1.0, 1.0, beta_fast=32, beta_slow=1),
    # Kimi K2: one group, both betas 1, real head sizes.
    "kimi": {
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.827,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        **yarn(32, 1.0, 1.0, beta_fast=1, beta_slow=1),
    },
    # No query rank, plain rope, weights of the chosen experts not normalised, two shared experts.
    "plain": {"q_lora_rank": None, "norm_topk_prob": False, "n_shared_experts": 2, "first_k_dense_replace": 0},
    # What the released files leave alone: rotary halves, biases, magnitude other than 1.
    "odd": {"rope_interleave": False, "attention_bias": True, **yarn(8, 1.0, 0.6)},
}


@dataclass(frozen=True)
class Case:
    model: MlaModel
    tokens: torch.Tensor
    expected: torch.Tensor
    """transformers' logits of every token, [T, vocabulary]"""
    inverse_frequencies: torch.Tensor
    """transformers' own, [rope / 2]"""


@cache
def case(name: str, length: int = 514, batch_invariant: bool = True) -> Case:
    oracle = random_oracle(seed=1, **CONFIGS[name])
    tokens = torch.randint(0, 96, (length,), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        expected = oracle(tokens.unsqueeze(0)).logits[0]
    with TemporaryDirectory() as folder:
        model = open_with_thalweg(oracle, Path(folder), batch_invariant=batch_invariant)
    assert expected.std() > 0.5  # an error of 1e-4 means something
    return Case(model, tokens, expected, oracle.model.rotary_emb.inv_freq)


def difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    return (got - expected).abs().max().item()


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("length", LENGTHS)
def test_a_prompt_read_at_once_and_one_token_more(name: str, length: int) -> None:
    this = case(name)
    run = PagedRun(this.model, 1, 514)
    prompt = run.feed(0, this.tokens[:length], chunk=length)
    following = run.feed(0, this.tokens[length : length + 1], chunk=1)
    assert difference(torch.cat((prompt, following)), this.expected[: length + 1]) < TOLERANCE


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_a_prompt_read_in_chunks_or_decoded_token_by_token(name: str, chunk: int) -> None:
    """Chunks of 1 are decode steps; all logits of the run are compared, so every length is."""
    this = case(name)
    got = PagedRun(this.model, 1, 514).feed(0, this.tokens, chunk)
    assert difference(got, this.expected) < TOLERANCE


def test_a_prompt_of_2049_tokens() -> None:
    this = case("v3", length=2049)
    got = PagedRun(this.model, 1, 2049).feed(0, this.tokens, chunk=1024)
    assert difference(got, this.expected) < TOLERANCE


def test_a_batch_of_mixed_lengths_equals_each_alone() -> None:
    """Prefill chunks, decode steps and a request that has not begun, in one step and then in another order."""
    this = case("v3")
    prompts = {request: this.tokens.roll(request)[:length] for request, length in enumerate((3, 256, 129, 513))}
    alone = {r: PagedRun(this.model, 1, 514).feed(0, tokens, 512) for r, tokens in prompts.items()}
    run = PagedRun(this.model, 4, 514)
    got = [
        run.step({r: prompts[r][:start] for r, start in ((2, 128), (0, 2), (1, 100))}),
        run.step({3: prompts[3][:512], 0: prompts[0][2:], 2: prompts[2][128:], 1: prompts[1][100:]}),
        run.step({3: prompts[3][512:]}),
    ]
    for request, expected in alone.items():
        rows = torch.cat([step[request] for step in got if request in step])
        # The same float32 values, but for sums that float64 leaves within 1e-15 of a rounding boundary.
        assert (rows == expected).all(dim=1).float().mean() > 0.98
        assert difference(rows, expected) < 1e-5


def test_without_batch_invariance_the_difference_stays_that_of_float32() -> None:
    this = case("v3", batch_invariant=False)
    got = PagedRun(this.model, 1, 514).feed(0, this.tokens, 64)
    assert difference(got, this.expected) < TOLERANCE


@pytest.mark.parametrize("name", CONFIGS)
def test_the_error_of_the_bf16_cache_is_stated(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """bf16 keeps 8 bits of a latent. A row whose router chooses other experts because of it is off by as much as a logit."""
    this = case(name)
    routed: list[torch.Tensor] = []
    route = Experts.route

    def recorded(self: Experts, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        chosen, weights = route(self, x)
        routed.append(chosen.sort(dim=1).values)
        return chosen, weights

    monkeypatch.setattr(Experts, "route", recorded)
    exact, rounded = (
        PagedRun(this.model, 1, 514, layout).feed(0, this.tokens, 514) for layout in ("exact", "mla_bf16")
    )
    half = len(routed) // 2
    alike = (torch.cat(routed[:half], dim=1) == torch.cat(routed[half:], dim=1)).all(dim=1)
    error = (rounded - this.expected).abs().amax(dim=1)
    rerouted = int((~alike).sum())
    with capsys.disabled():
        print(
            f"\nmla_bf16, {name}: a row's largest logit error {error[alike].median():.1e} in the median, "
            f"{error[alike].max():.1e} at most; {rerouted} of {len(error)} rows chose other experts, off by {error.max():.1e}"
        )
    assert difference(exact, this.expected) < TOLERANCE
    assert 1e-3 < error[alike].median() < 0.05 and error[alike].max() < 0.3
    assert rerouted < 0.03 * len(error)


@pytest.mark.parametrize("name", CONFIGS)
def test_rope_frequencies_are_those_of_transformers_to_the_bit(name: str) -> None:
    """One ulp of a frequency is an angle of 1e-4 at position 2000."""
    this = case(name)
    assert torch.equal(this.model.blocks[0].attention.inverse_frequencies, this.inverse_frequencies)
