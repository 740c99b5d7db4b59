"""The model against the project's own naive oracle: quantised caches and Hadamard. First: is that oracle right?"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.oracle import naive_v4
from tests.oracle.following import Follower
from tests.oracle.naive_quant import bf16, e4m3, index_row, power_of_two_scale, v4_row
from tests.oracle.naive_v4 import NaiveV4, Switches
from tests.oracle.transformers_v4 import (
    VARIANTS,
    PagedRun,
    open_with_thalweg,
    random_oracle,
    random_tokens,
    reference,
)
from thalweg.models.config import DeepseekV4Config
from thalweg.models.deepseek_v4.model import DeepseekV4Model
from thalweg.models.weights.checkpoint import load_weights

TOKENS = 300
SMALL = "one layer of each kind, top 16"


def open_variant(
    name: str, folder: Path, *, hadamard: bool
) -> tuple[DeepseekV4Config, DeepseekV4Model, dict[str, torch.Tensor]]:
    ratios, changes = VARIANTS[name]
    return open_oracle(ratios, changes, folder, hadamard=hadamard)


def open_oracle(
    ratios: list[int], changes: dict[str, object], folder: Path, *, hadamard: bool
) -> tuple[DeepseekV4Config, DeepseekV4Model, dict[str, torch.Tensor]]:
    config, model = open_with_thalweg(random_oracle(1, ratios, **changes), folder, hadamard=hadamard)
    return config, model, load_weights(folder, config, dtype=torch.float64)


def row_errors(logits: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    return (logits - expected).norm(dim=1) / expected.norm(dim=1)


# ---- (a) the oracle


@pytest.mark.parametrize("name", VARIANTS)
def test_the_naive_oracle_equals_transformers(name: str, tmp_path: Path) -> None:
    ratios, changes = VARIANTS[name]
    oracle = random_oracle(1, ratios, **changes)
    config, _ = open_with_thalweg(oracle, tmp_path)
    tokens = random_tokens(TOKENS)
    naive = NaiveV4(config, load_weights(tmp_path, config, dtype=torch.float64))
    logits = naive.logits(naive.forward(tokens))
    assert float((logits - reference(oracle, tokens).logits).abs().max()) < 1e-4


def test_the_naive_quantisers_round_as_written_down() -> None:
    values = torch.tensor([0.0, 448.0, 500.0, 17.0, 19.0, -1.0625, 0.0009765625, 0.0029296875], dtype=torch.float64)
    # 17 and 19 lie between 16, 18 and 20: ties to even. 2^-10 is half of the least subnormal 2^-9: to zero; 1.5 times: up.
    expected = torch.tensor([0.0, 448.0, 448.0, 16.0, 20.0, -1.0, 0.0, 0.00390625], dtype=torch.float64)
    assert torch.equal(e4m3(values), expected)
    assert bf16(torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 3.14159265], dtype=torch.float64)).tolist() == [
        1.0,
        1 + 2**-6,
        3.140625,
    ]
    scales = power_of_two_scale(torch.tensor([[448.0], [449.0], [0.0]], dtype=torch.float64))
    assert scales.flatten().tolist() == [1.0, 2.0, 2.0**-22]  # 1e-4 / 448 = 2^-22.1


# ---- (b) quantised caches


@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("name", VARIANTS)
def test_quantised_caches_equal_the_oracle_that_follows_their_codes(
    name: str, hadamard: bool, tmp_path: Path, choices: list[torch.Tensor]
) -> None:
    config, model, weights = open_variant(name, tmp_path, hadamard=hadamard)
    tokens = random_tokens(TOKENS)
    run = PagedRun(model, 1, TOKENS, "v4")
    logits = run.prefill(0, tokens, chunk=TOKENS)
    naive = Follower(config, weights, Switches(hadamard_q=hadamard, hadamard_k=hadamard), run, choices)
    difference = float((logits - naive.logits(naive.forward(tokens))).abs().max())
    print(
        f"{name}, Hadamard {hadamard}: largest logit difference {difference:.1e}; {naive.crossed} of {naive.values} "
        f"cached values have another code, off by {naive.worst_crossing:.1e} at most; {naive.other_choices} rows choose otherwise"
    )
    assert difference < 1e-4
    naive.assert_right_roundings()


def nearest_scale(row: torch.Tensor, rope_dim: int) -> torch.Tensor:
    """The `v4` row with its scales rounded to the nearest power of two instead of up."""
    nope = row[..., :-rope_dim].unflatten(-1, (-1, 64))
    scale = torch.exp2(torch.round(torch.log2(nope.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448)))
    return torch.cat([(e4m3(nope / scale) * scale).flatten(-2), bf16(row[..., -rope_dim:])], dim=-1)


@pytest.mark.parametrize(
    ("name", "replacement"),
    [
        ("bf16", lambda entries: entries),
        ("v4_row", lambda row, rope_dim: v4_row(bf16(row), rope_dim)),
        ("v4_row", nearest_scale),
        ("index_row", lambda row: row if row.dim() == 3 else index_row(row)),
    ],
    ids=["entries not through bf16", "window rows through bf16", "nearest scale", "index queries not quantised"],
)
def test_following_notices_another_quantisation(
    name: str,
    replacement: Callable,
    tmp_path: Path,
    choices: list[torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Following forgives crossed codes, not another rule: each of these puts the counts a hundred times over the usual."""
    config, model, weights = open_oracle([4], {"index_topk": 16}, tmp_path, hadamard=False)
    tokens = random_tokens(TOKENS)
    run = PagedRun(model, 1, TOKENS, "v4")
    run.prefill(0, tokens, chunk=TOKENS)
    monkeypatch.setattr(naive_v4, name, replacement)
    naive = Follower(config, weights, Switches(), run, choices)
    naive.forward(tokens)
    with pytest.raises(AssertionError):
        naive.assert_right_roundings()


@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_one_quantised_layer_equals_the_oracle_alone(
    ratio: int, hadamard: bool, tmp_path: Path, choices: list[torch.Tensor]
) -> None:
    """In one layer nothing blows rounding up: float32 level, but for rows that a crossed key makes choose otherwise."""
    config, model, weights = open_oracle([ratio], {"index_topk": 16}, tmp_path, hadamard=hadamard)
    tokens = random_tokens(TOKENS)
    logits = PagedRun(model, 1, TOKENS, "v4").prefill(0, tokens, chunk=TOKENS)
    naive = NaiveV4(config, weights, Switches(True, hadamard, hadamard))
    errors = row_errors(logits, naive.logits(naive.forward(tokens)))
    otherwise = torch.zeros(TOKENS, dtype=torch.bool)
    for theirs, mine in zip(choices, naive.selected.values(), strict=True):
        otherwise |= torch.tensor([set(theirs[t].tolist()) - {-1} != set(mine[t]) for t in range(TOKENS)])
    print(
        f"ratio {ratio}, Hadamard {hadamard}: median {errors.median():.1e}, largest {errors[~otherwise].max():.1e}; "
        f"{int(otherwise.sum())} rows choose otherwise"
    )
    assert float(errors.median()) < 1e-5
    assert float(errors[~otherwise].max()) < 1e-3  # 6e-5 seen: a crossed code that few others dilute
    assert int(otherwise.sum()) <= TOKENS // 50


@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("name", VARIANTS)
def test_quantised_layers_stay_near_the_oracle_alone(name: str, hadamard: bool, tmp_path: Path) -> None:
    """Over several layers crossed codes multiply: far below what quantisation itself costs (7%), far above float32.

    A crossed code can also change an expert or an entry: that row then differs by as much as any other model would.
    """
    config, model, weights = open_variant(name, tmp_path, hadamard=hadamard)
    tokens = random_tokens(TOKENS)
    logits = PagedRun(model, 1, TOKENS, "v4").prefill(0, tokens, chunk=TOKENS)
    naive = NaiveV4(config, weights, Switches(True, hadamard, hadamard))
    expected = naive.logits(naive.forward(tokens))
    errors, overall = row_errors(logits, expected), float((logits - expected).norm() / expected.norm())
    print(
        f"{name}, Hadamard {hadamard}: relative error of a row, median {errors.median():.1e}, "
        f"90% {errors.quantile(0.9):.1e}, largest {errors.max():.1e}; overall {overall:.1e}"
    )
    assert float(errors.median()) < 1e-2
    assert overall < 0.06


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_quantised_caches_give_the_same_bits_in_any_chunks(chunk: int, tmp_path: Path) -> None:
    _, model, _ = open_variant(SMALL, tmp_path, hadamard=True)
    tokens = random_tokens(160)
    at_once = PagedRun(model, 1, 160, "v4").prefill(0, tokens, chunk=160)
    assert torch.equal(PagedRun(model, 1, 160, "v4", seed=1).prefill(0, tokens, chunk), at_once)


# ---- Hadamard


def test_hadamard_on_both_sides_changes_nothing_and_on_one_side_finds_nothing(tmp_path: Path) -> None:
    """Why the configuration has one switch for both sides: the rotation keeps q.k only where q and k have it."""
    config, _, weights = open_variant(SMALL, tmp_path, hadamard=False)
    tokens, layer, topk = random_tokens(TOKENS), "layers.1.attn.", config.index_topk

    def chosen(on_q: bool, on_k: bool) -> list[list[int]]:
        naive = NaiveV4(config, weights, Switches(hadamard_q=on_q, hadamard_k=on_k))
        naive.forward(tokens)
        return naive.selected[layer][4 * topk + 3 :]  # rows that see more entries than are chosen

    plain = chosen(False, False)
    assert chosen(True, True) == plain
    chance = sum(topk / ((row + 4 * topk + 4) // 4) for row in range(len(plain))) / len(plain)
    for on_q, on_k in ((True, False), (False, True)):
        one_sided = chosen(on_q, on_k)
        needles = [best[0] in found for best, found in zip(plain, one_sided, strict=True)]
        print(
            f"q {on_q}, k {on_k}: best entry among the chosen in {sum(needles) / len(needles):.2f}, chance {chance:.2f}"
        )
        assert sum(needles) / len(needles) < chance + 0.1
