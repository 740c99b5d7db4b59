"""The DeepSeek-V4 model over paged caches against transformers' DeepseekV4ForCausalLM, float32, random small models.

Every run starts from poisoned caches with shuffled pages. Rows where transformers' own index scores leave the choice
to rounding (last chosen and first not chosen less than 1e-6 apart) are listed and not compared.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from tests.oracle.transformers_v4 import (
    VARIANTS,
    PagedRun,
    Reference,
    open_with_thalweg,
    random_oracle,
    random_tokens,
    reference,
)
from thalweg.models.deepseek_v4.model import DeepseekV4Model

LENGTHS = (1, 3, 4, 5, 127, 128, 129, 255, 256, 257, 511, 512, 513, 2049)
TOLERANCE = 1e-4
NEAR_TIE = 1e-6
LONG = "one layer of each kind, top 16"


@dataclass(frozen=True)
class Case:
    model: DeepseekV4Model
    tokens: torch.Tensor
    reference: Reference
    comparable: torch.Tensor
    """bool [T]: rows whose choice of entries does not hang on rounding"""

    def difference(self, logits: torch.Tensor) -> float:
        """The largest, over the comparable rows of `logits` [t, vocabulary] of the first t tokens."""
        rows = (logits - self.reference.logits[: len(logits)]).abs().amax(dim=1)
        return float(rows[self.comparable[: len(logits)]].max())


@cache
def case(name: str) -> Case:
    ratios, changes = VARIANTS[name]
    oracle = random_oracle(seed=1, ratios=ratios, **changes)
    tokens = random_tokens(max(LENGTHS) if name == LONG else 600)
    expected = reference(oracle, tokens)
    with TemporaryDirectory() as folder:
        config, model = open_with_thalweg(oracle, Path(folder))
    ties = expected.near_ties(config.index_topk, NEAR_TIE)
    print(f"{name}: {len(ties)} of {len(tokens)} rows not compared; (layer, row, difference): {ties}")
    comparable = torch.ones(len(tokens), dtype=torch.bool)
    comparable[[row for _, row, _ in ties]] = False
    return Case(model, tokens, expected, comparable)


def test_near_ties_are_found() -> None:
    scores = (0.01 * (16 - torch.arange(20.0))).expand(80, 20).clone()  # entries 0 to 15 are chosen, 16 is not
    scores[66, 16] = scores[66, 15]  # not visible to row 66: it sees 16 entries
    scores[67, 16] = scores[67, 15]
    scores[78, 16] = scores[78, 15] - 2e-6
    scores[79, 16] = scores[79, 15] - 5e-7
    ties = Reference(torch.empty(0), {6: scores}).near_ties(topk=16, below=NEAR_TIE)
    assert [(layer, row) for layer, row, _ in ties] == [(6, 67), (6, 79)]


@pytest.mark.parametrize("name", VARIANTS)
def test_near_ties_are_few_and_selection_bites(name: str) -> None:
    this = case(name)
    assert int((~this.comparable).sum()) <= len(this.tokens) // 100
    assert (len(this.tokens) + 1) // 4 > 2 * this.model.config.index_topk  # most rows drop entries


@pytest.mark.parametrize("length", LENGTHS)
def test_a_prompt_read_at_once(length: int) -> None:
    this = case(LONG)
    logits = PagedRun(this.model, 1, length, "exact").prefill(0, this.tokens[:length], chunk=length)
    assert this.difference(logits) < TOLERANCE


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_a_prompt_read_in_chunks(chunk: int) -> None:
    """Chunks of one are token-by-token decoding (769 of them). Rows are causal: 2,049 contain every shorter prompt."""
    this = case(LONG)
    tokens = this.tokens[:769] if chunk == 1 else this.tokens
    logits = PagedRun(this.model, 1, len(tokens), "exact").prefill(0, tokens, chunk)
    assert this.difference(logits) < TOLERANCE


@pytest.mark.parametrize("prompt", [3, 127, 253, 509])
def test_decoding_after_a_prefill(prompt: int) -> None:
    this = case(LONG)
    run = PagedRun(this.model, 1, prompt + 9, "exact")
    before = run.prefill(0, this.tokens[:prompt], chunk=prompt)
    after = run.prefill(0, this.tokens[prompt : prompt + 9], chunk=1)
    assert this.difference(torch.cat((before, after))) < TOLERANCE


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != LONG])
def test_other_configurations_at_once_and_in_chunks(name: str) -> None:
    this = case(name)
    at_once = PagedRun(this.model, 1, 600, "exact").prefill(0, this.tokens, chunk=600)
    assert this.difference(at_once) < TOLERANCE
    in_chunks = PagedRun(this.model, 1, 600, "exact", seed=1).prefill(0, this.tokens, chunk=37)
    assert this.difference(in_chunks) < TOLERANCE


@pytest.mark.parametrize("kv_layout", ["exact", "v4"])
def test_a_batch_of_mixed_lengths_equals_each_request_alone(kv_layout: str) -> None:
    """Bit for bit: prefill chunks and decode rows of four requests in one step, against each request read at once."""
    model = case(LONG).model
    prompts = {request: random_tokens(length, seed=request) for request, length in enumerate((270, 131, 66, 5))}
    together = PagedRun(model, len(prompts), 270, kv_layout)
    logits: dict[int, list[torch.Tensor]] = {request: [] for request in prompts}
    sizes = {0: [64, 1, 1, 130, 1, 7, 66], 1: [1, 1, 127, 1, 1], 2: [33, 1, 1, 1, 30], 3: [1, 1, 1, 1, 1]}
    chunks = {request: list(tokens.split(sizes[request])) for request, tokens in prompts.items()}
    for number in range(max(map(len, chunks.values()))):
        # Not in the same order every time, and not everybody in every step.
        present = [request for request in prompts if number < len(chunks[request])]
        ordered = present[number % len(present) :] + present[: number % len(present)]
        step = together.step({request: chunks[request][number] for request in ordered})
        for request, rows in step.items():
            logits[request].append(rows)
    for request, tokens in prompts.items():
        alone = PagedRun(model, 1, len(tokens), kv_layout, seed=1).prefill(0, tokens, chunk=len(tokens))
        assert torch.equal(torch.cat(logits[request]), alone), f"request {request}"


@pytest.mark.parametrize(
    ("topk", "chosen", "of", "median", "overall"),
    [(512, 3, 3, 0.08, 0.10), (16, 3, 3, 0.09, 0.12), (16, 3, 8, 0.10, 0.25)],
    ids=["nothing can flip", "selection can flip", "selection and routing can flip"],
)
def test_quantised_caches_stay_at_fp8_level(
    topk: int, chosen: int, of: int, median: float, overall: float, tmp_path: Path
) -> None:
    """The `v4` and `index_fp8` caches against transformers' exact ones: what quantisation costs, stated.

    An e4m3 value has 3 mantissa bits: rounding moves it by 2.6% of itself (root mean square). Keys and values of four
    layers are rounded so, and random weights do not average it out: a row's logits move by about 7% of their norm (median).
    Where the indexer drops entries, fp8 scores also choose others near the threshold; where 3 of 8 experts are routed, some
    rows change an expert: that moves few rows, but far. Whether these errors are the RIGHT ones is shown in test_naive_v4.py,
    where the same quantisation stands on both sides.
    """
    ratios, changes = VARIANTS[LONG]
    changes = changes | {"index_topk": topk, "num_experts_per_tok": chosen, "n_routed_experts": of}
    oracle = random_oracle(1, ratios, **changes)
    _, model = open_with_thalweg(oracle, tmp_path)
    tokens = random_tokens(400)
    exact = reference(oracle, tokens).logits
    logits = PagedRun(model, 1, len(tokens), "v4").prefill(0, tokens, chunk=len(tokens))
    rows = (logits - exact).norm(dim=1) / exact.norm(dim=1)
    total = float((logits - exact).norm() / exact.norm())
    print(
        f"top {topk}, {chosen} of {of} experts: relative error of a row, median {rows.median():.4f}, "
        f"95% {rows.quantile(0.95):.4f}, largest {rows.max():.4f}; overall {total:.4f}"
    )
    assert 0.01 < float(rows.median()) < median
    assert total < overall
