"""Hyper-connections against the formulas of the design, written out in float64 with loops."""

import numpy as np
import pytest
import torch

from tests.ops.builders import NAN, randn, seeded, wide
from thalweg.ops import mhc_head, mhc_post, mhc_post_pre_norm, mhc_pre

D = 24
EPS = 1e-6


def weights(seed: int, d: int = D) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = seeded(seed)
    return randn(g, 24, 4 * d) * 0.2, torch.tensor([0.7, 1.3, 2.0]), randn(g, 24)


def mixing(x: np.ndarray, fn: np.ndarray, scale: np.ndarray, base: np.ndarray) -> tuple:
    """(pre [4], post [4], C [4, 4]) of one token, x [4, D]."""
    flat = x.reshape(-1)
    m = fn @ flat / np.sqrt((flat**2).mean() + EPS)
    sigmoid = [1 / (1 + np.exp(-(scale[i // 4] * m[i] + base[i]))) for i in range(8)]
    pre = np.array(sigmoid[:4]) + EPS
    post = 2 * np.array(sigmoid[4:])
    c = np.zeros((4, 4))
    for i in range(4):
        row = np.exp(scale[2] * m[8 + 4 * i : 12 + 4 * i] + base[8 + 4 * i : 12 + 4 * i])
        c[i] = row / row.sum() + EPS
    c /= c.sum(axis=0, keepdims=True) + EPS
    for _ in range(19):
        c /= c.sum(axis=1, keepdims=True) + EPS
        c /= c.sum(axis=0, keepdims=True) + EPS
    return pre, post, c


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pre_equals_the_formulas(dtype: torch.dtype) -> None:
    x = randn(seeded(1), 5, 4, D).to(dtype)
    fn, scale, base = weights(2)
    u, post, comb = mhc_pre(x, fn, scale, base)
    assert (u.dtype, post.dtype, comb.dtype) == (dtype, torch.float32, torch.float32)
    for t in range(5):
        want_pre, want_post, want_comb = mixing(wide(x[t]), wide(fn), wide(scale), wide(base))
        want_u = sum(want_pre[i] * wide(x[t, i]) for i in range(4))
        np.testing.assert_allclose(wide(u[t]), want_u, rtol=2e-7 if dtype == torch.float32 else 2**-8, atol=1e-7)
        np.testing.assert_allclose(wide(post[t]), want_post, rtol=2e-7)
        np.testing.assert_allclose(wide(comb[t]), want_comb, rtol=2e-7)


def test_sinkhorn_ends_on_columns_after_the_iterations_asked_for() -> None:
    fn, scale, base = weights(3)
    x = randn(seeded(4), 6, 4, D) * 30
    _, _, comb = mhc_pre(x, fn * 20, scale, base)
    columns, rows = comb.double().sum(dim=1), comb.double().sum(dim=2)
    assert (columns - 1).abs().max() < 2e-6 < (rows - 1).abs().max()
    _, _, once = mhc_pre(x, fn * 20, scale, base, iterations=1)
    assert not torch.equal(once, comb)


def test_post_mixes_four_different_streams_over_the_first_axis_of_comb() -> None:
    """Field case 12: C contracted on its other axis, about 80% off, unseen with streams that are alike.

    y = 0, 20 iterations ending on columns: X'_j = sum_i C_ij X_i.
    """
    x = randn(seeded(5), 3, 4, D) * torch.tensor([1.0, -2.0, 4.0, 0.5]).view(1, 4, 1)
    fn, scale, base = weights(6)
    base = base * 4
    _, post, comb = mhc_pre(x, fn, scale, base)
    out = mhc_post(torch.zeros(3, D), x, post, comb)
    for t in range(3):
        _, _, c = mixing(wide(x[t]), wide(fn), wide(scale), wide(base))
        right = np.array([sum(c[i, j] * wide(x[t, i]) for i in range(4)) for j in range(4)])
        wrong = np.array([sum(c[j, i] * wide(x[t, i]) for i in range(4)) for j in range(4)])
        np.testing.assert_allclose(wide(out[t]), right, rtol=1e-5, atol=1e-6)
        assert np.linalg.norm(wrong - right) > 0.3 * np.linalg.norm(right)


def test_post_gives_four_identical_streams_back() -> None:
    """Field case 12: identical streams c with logits of std >= 5 give c to 2e-6; the wrong axis gives 0.92 c to 1.08 c."""
    c = randn(seeded(7), 8, 1, D)
    x = c.expand(8, 4, D).contiguous()
    fn, _, base = weights(8)
    logits = base.clone()
    logits[8:] = randn(seeded(9), 16) * 6
    _, post, comb = mhc_pre(x, fn * 0.01, torch.ones(3), logits)
    out = mhc_post(torch.zeros(8, D), x, post, comb)
    assert ((out - x).abs() / x.abs()).max() < 2e-6
    wrong = torch.einsum("tji,tid->tjd", comb, x)
    assert ((wrong - x).abs() / x.abs()).max() > 0.01


def test_post_adds_the_output_of_the_block_by_its_weights() -> None:
    g = seeded(10)
    y, x, post, comb = randn(g, 2, D), randn(g, 2, 4, D), randn(g, 2, 4), randn(g, 2, 4, 4)
    out = wide(mhc_post(y, x, post, comb))
    for t in range(2):
        for j in range(4):
            want = float(post[t, j]) * wide(y[t]) + sum(float(comb[t, i, j]) * wide(x[t, i]) for i in range(4))
            np.testing.assert_allclose(out[t, j], want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fused_operation_equals_its_three_parts(dtype: torch.dtype) -> None:
    g = seeded(11)
    y, x = randn(g, 4, D).to(dtype), randn(g, 4, 4, D).to(dtype)
    post, comb, norm_weight = randn(g, 4, 4), randn(g, 4, 4, 4), randn(g, D)
    fn, scale, base = weights(12)
    streams, u, next_post, next_comb = mhc_post_pre_norm(y, x, post, comb, fn, scale, base, norm_weight)
    assert torch.equal(streams, mhc_post(y, x, post, comb))
    for t in range(4):
        pre, want_post, want_comb = mixing(wide(streams[t]), wide(fn), wide(scale), wide(base))
        plain = sum(pre[i] * wide(streams[t, i]) for i in range(4))
        want = plain / np.sqrt((plain**2).mean() + EPS) * wide(norm_weight)
        step = 2e-6 if dtype == torch.float32 else 2**-8
        np.testing.assert_allclose(wide(u[t]), want, rtol=step, atol=step * 1e-2)
        np.testing.assert_allclose(wide(next_post[t]), want_post, rtol=1e-6)
        np.testing.assert_allclose(wide(next_comb[t]), want_comb, rtol=1e-6)


def test_the_head_is_pre_alone_with_its_own_weights() -> None:
    g = seeded(13)
    x, fn, scale, base = randn(g, 3, 4, D), randn(g, 4, 4 * D), torch.tensor([1.5]), randn(g, 4)
    out = mhc_head(x, fn, scale, base)
    for t in range(3):
        flat = wide(x[t]).reshape(-1)
        m = wide(fn) @ flat / np.sqrt((flat**2).mean() + EPS)
        pre = 1 / (1 + np.exp(-(1.5 * m + wide(base)))) + EPS
        np.testing.assert_allclose(wide(out[t]), sum(pre[i] * wide(x[t, i]) for i in range(4)), rtol=1e-6, atol=1e-6)


def test_no_rows_give_empty_results() -> None:
    """Field case 12: T = 0 returns empty."""
    fn, scale, base = weights(14)
    x = torch.empty(0, 4, D)
    u, post, comb = mhc_pre(x, fn, scale, base)
    assert (u.shape, post.shape, comb.shape) == ((0, D), (0, 4), (0, 4, 4))
    assert mhc_post(torch.empty(0, D), x, post, comb).shape == (0, 4, D)
    fused = mhc_post_pre_norm(torch.empty(0, D), x, post, comb, fn, scale, base, torch.ones(D))
    assert [part.shape[0] for part in fused] == [0, 0, 0, 0]
    assert mhc_head(x, fn[:4], scale[:1], base[:4]).shape == (0, D)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_alone_equals_the_row_in_a_batch_of_64_with_nan_around_it(dtype: torch.dtype) -> None:
    """Field case 12 and rule 4: the bits of a row depend on no other row."""
    d = 512
    g = seeded(15)
    x, y = randn(g, 64, 4, d).to(dtype), randn(g, 64, d).to(dtype)
    fn, scale, base = weights(16, d)
    norm_weight = randn(g, d)
    x[::2], y[::2] = NAN, NAN

    def everything(rows: slice) -> list[torch.Tensor]:
        u, post, comb = mhc_pre(x[rows], fn, scale, base)
        fused = mhc_post_pre_norm(y[rows], x[rows], post, comb, fn, scale, base, norm_weight)
        return [
            u,
            post,
            comb,
            *fused,
            mhc_post(y[rows], x[rows], post, comb),
            mhc_head(x[rows], fn[:4], scale[:1], base[:4]),
        ]

    batch = everything(slice(None))
    for row in (1, 31, 63):
        for alone, together in zip(everything(slice(row, row + 1)), batch, strict=True):
            assert torch.equal(alone[0], together[row]) and not alone.isnan().any()
