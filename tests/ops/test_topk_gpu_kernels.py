"""Exact selection at the sizes it is for, by every implementation a GPU has."""

import pytest
import torch

from tests.ops.index_kernels import DEVICE, E4M3_ON_A_GPU
from thalweg.ops import topk

pytestmark = pytest.mark.gpu


def scores(kind: str, rows: int, width: int) -> torch.Tensor:
    """Scores that are hard to select from, each in its way."""
    g = torch.Generator(DEVICE).manual_seed(rows + width)
    normal = torch.randn(rows, width, generator=g, device=DEVICE)
    if kind == "equal":
        return torch.ones_like(normal)
    if kind == "few values":
        return (normal * 2).round()
    if kind == "negative":
        return -1 - normal.abs()
    if kind == "of all magnitudes":
        return torch.exp(torch.randn(rows, width, generator=g, device=DEVICE) * 20) * normal.sign()
    if kind == "infinite":
        normal[:, ::7], normal[:, 1::5] = float("inf"), float("-inf")
    if kind == "some NaN":
        normal[:, ::97] = float("nan")
    return normal


KINDS = ["normal", "equal", "few values", "negative", "of all magnitudes", "infinite", "some NaN"]
# Rows, width, k: for one block and for several, in one stretch and in several, with few rows and with more than blocks.
SHAPES = [
    (1, 100, 512),
    (3, 600, 512),
    (2, 8193, 512),
    (64, 32_768, 512),
    (1, 262_144, 512),
    (1, 1_048_576, 512),
    (140, 70_000, 2048),
    (1, 1_000_000, 2048),
    (20, 131_072, 1),
    (5, 33_000, 1000),
]


@pytest.mark.parametrize("implementation", E4M3_ON_A_GPU)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "width", "k"), SHAPES)
def test_selection_is_exact_on_a_gpu(rows: int, width: int, k: int, kind: str, implementation: str) -> None:
    given = scores(kind, rows, width)
    lengths = torch.full((rows,), width, dtype=torch.int32, device=DEVICE)
    got = topk(given, lengths, k, deterministic=True, implementation=implementation)
    want = topk(given, lengths, k, deterministic=True, implementation="reference")
    assert torch.equal(got.sort(1).values, want.sort(1).values)


@pytest.mark.parametrize("implementation", E4M3_ON_A_GPU)
def test_rows_of_any_length_are_selected_from_together_on_a_gpu(implementation: str) -> None:
    lengths = [0, 1, 5, 511, 512, 513, 8192, 8193, 30_000, 32_768, -4, 1024, 2048, 4096, 20_000, 16_384]
    given = scores("few values", 16, 32_768)
    on_device = torch.tensor(lengths, device=DEVICE)
    for k in (1, 512, 2048):
        got = topk(given, on_device, k, deterministic=True, implementation=implementation)
        want = topk(given, on_device, k, deterministic=True, implementation="reference")
        assert torch.equal(got.sort(1).values, want.sort(1).values)
