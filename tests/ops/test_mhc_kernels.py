"""The hyper-connection kernels give what the reference gives: rows, widths, dtypes, strides, rows that are padding."""

import numpy as np
import pytest
import torch

from tests.interpreter import watching
from tests.ops.attention_kernels import interpreted
from tests.ops.builders import NAN, wide
from tests.ops.mhc_kernels import DEVICE, Site, check, made
from tests.ops.test_mhc import mixing
from thalweg.errors import UserError
from thalweg.ops import dispatch, mhc_head, mhc_post, mhc_pre
from thalweg.ops.mhc import choice

pytestmark = pytest.mark.usefixtures("spoiled_mhc")


@pytest.mark.parametrize(
    ("rows", "width", "dtype"),
    [
        (1, 24, torch.bfloat16),
        (2, 1, torch.float32),
        (3, 33, torch.float32),
        (16, 100, torch.bfloat16),
        (17, 64, torch.float32),
        (70, 40, torch.bfloat16),
    ],
)
def test_rows_and_widths(rows: int, width: int, dtype: torch.dtype) -> None:
    check(made(rows, width, dtype))


def test_the_width_of_the_model() -> None:
    """7,168 channels are interpreted in 17 s: the GPU tests have them."""
    check(made(1, 4096), iterations=2, alone=False)


def test_rows_wider_than_what_a_program_holds_are_read_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "WIDTHS", (64, 128))
    for width in (128, 129, 300):
        check(made(3, width))


@pytest.mark.parametrize("programs", [1, 500])
def test_any_number_of_splits(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "PROGRAMS", programs)
    check(made(5, 200), iterations=1)
    check(made(66, 70), iterations=1, alone=False)


def test_the_formulas_written_out() -> None:
    """Against loops, not the reference: streams of unlike sizes, C contracted over its first axis (field case 12)."""
    site = made(4, 24, torch.float32)
    out, u, post, comb = (part.cpu() for part in site.fused())
    for t in range(4):
        c = wide(site.comb[t].cpu())
        x = [wide(site.streams[t, i].cpu()) for i in range(4)]
        y, weight = wide(site.y[t].cpu()), wide(site.post[t].cpu())
        new = np.array([weight[j] * y + sum(c[i, j] * x[i] for i in range(4)) for j in range(4)])
        np.testing.assert_allclose(wide(out[t]), new, rtol=1e-6, atol=1e-5)
        fn, scale, base = (wide(part.cpu()) for part in site.mixer())
        pre, want_post, want_comb = mixing(new, fn, scale, base)
        plain = sum(pre[i] * new[i] for i in range(4))
        want = plain / np.sqrt((plain**2).mean() + 1e-6) * wide(site.norm.cpu())
        np.testing.assert_allclose(wide(u[t]), want, rtol=5e-6, atol=1e-5)
        np.testing.assert_allclose(wide(post[t]), want_post, rtol=1e-5)
        np.testing.assert_allclose(wide(comb[t]), want_comb, rtol=1e-5)


def test_sinkhorn_runs_as_often_as_asked() -> None:
    site = made(6, 24, torch.float32)
    combs = []
    for iterations in (1, 2, 20):
        _, _, comb = mhc_pre(site.streams, *site.mixer(), iterations=iterations, implementation="triton")
        _, _, want = mhc_pre(site.streams, *site.mixer(), iterations=iterations, implementation="reference")
        torch.testing.assert_close(comb, want, rtol=1e-5, atol=1e-6)
        combs.append(comb)
    assert (combs[0] - combs[1]).abs().max() > 1e-3 and (combs[1] - combs[2]).abs().max() > 1e-4
    assert (combs[2].double().sum(1) - 1).abs().max() < 1e-5  # it ends on columns


def test_both_epsilons_count() -> None:
    site = made(3, 24, torch.float32)
    plain = mhc_pre(site.streams, *site.mixer(), implementation="triton")
    for options in ({"norm_eps": 0.5}, {"hc_eps": 0.1}):
        got = mhc_pre(site.streams, *site.mixer(), implementation="triton", **options)
        want = mhc_pre(site.streams, *site.mixer(), implementation="reference", **options)
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
        assert all((got[part] - plain[part]).abs().max() > 1e-3 for part in (0, 2))


def test_views_with_gaps_between_rows_and_streams() -> None:
    packed = made(5, 48)
    wide_rows = torch.full((5, 7, 160), NAN, dtype=torch.bfloat16, device=DEVICE)
    wide_rows[:, 1:5, 16:64] = packed.streams
    outputs = torch.full((5, 96), NAN, dtype=torch.bfloat16, device=DEVICE)
    outputs[:, 32:80] = packed.y
    weights = torch.full((24, 256), NAN, device=DEVICE)
    weights[:, 32:224] = packed.fn
    loose = Site(
        outputs[:, 32:80],
        wide_rows[:, 1:5, 16:64],
        packed.post.t().contiguous().t(),
        packed.comb.transpose(1, 2).contiguous().transpose(1, 2),
        weights[:, 32:224],
        packed.scale,
        packed.base,
        packed.norm.repeat_interleave(2)[::2],
    )
    for got, want in zip(loose.fused(iterations=2), packed.fused(iterations=2), strict=True):
        assert torch.equal(got, want)
    check(loose)
    check(Site(**{**vars(packed), "streams": packed.streams.transpose(1, 2).contiguous().transpose(1, 2)}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_of_padding_change_no_other_row(dtype: torch.dtype) -> None:
    """Rule 4: NaN and infinity in a row stay there."""
    site = made(20, 64, dtype)
    want = site.fused(iterations=2)
    site.streams[1::2], site.y[1::2] = NAN, torch.inf
    site.post[1::2], site.comb[1::2] = NAN, NAN
    for got, before in zip(site.fused(iterations=2), want, strict=True):
        assert torch.equal(got[::2], before[::2]) and got[1::2].isnan().flatten(1).all(1).all()


def test_weights_of_a_norm_in_bf16_are_read_as_they_are() -> None:
    site = made(3, 64)
    site.norm = site.norm.bfloat16()
    check(site)


def test_no_rows_give_empty_results() -> None:
    """Field case 12: T = 0 returns empty."""
    out, u, post, comb = made(0, 24).fused()
    assert (out.shape, u.shape, post.shape, comb.shape) == ((0, 4, 24), (0, 24), (0, 4), (0, 4, 4))
    check(made(0, 24))


@interpreted
def test_two_launches_and_nothing_outside_of_the_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    from thalweg.ops.variants import KernelVariant

    launches: list[str] = []
    launch = KernelVariant.launch
    monkeypatch.setattr(
        KernelVariant, "launch", lambda self, *args: (launches.append(self.name), launch(self, *args))[1]
    )
    site = made(17, 70)
    with watching() as accesses:
        results = site.fused(iterations=2)
    assert len(launches) == 2
    assert all(accesses.stored_twice(part) == 0 for part in results)
    site.norm = site.norm.double()
    with pytest.raises(ValueError, match="norm_weight"):
        site.fused()


def test_what_is_not_for_the_kernels_is_refused_with_the_reason() -> None:
    site = made(2, 16, torch.float32)
    with pytest.raises(UserError, match=r"streams of torch.float64, they read bfloat16 and float32"):
        mhc_head(site.streams.double(), *site.mixer(head=True), implementation="triton")
    with pytest.raises(UserError, match=r"y of torch.bfloat16 with streams of torch.float32"):
        mhc_post(site.y.bfloat16(), site.streams, site.post, site.comb, implementation="triton")
    two = torch.zeros(2, 2, 16, device=DEVICE)
    mixer = torch.zeros(8, 32, device=DEVICE), torch.zeros(3, device=DEVICE), torch.zeros(8, device=DEVICE)
    with pytest.raises(UserError, match="2 streams, they have 4"):
        mhc_pre(two, *mixer, implementation="triton")
    site.norm = site.norm.half()
    with pytest.raises(UserError, match=r"norm_weight of torch.float16"):
        site.fused()


def test_they_are_preferred_on_a_gpu_and_avoided_where_they_are_interpreted() -> None:
    for name in ("mhc_pre", "mhc_post", "mhc_post_pre_norm", "mhc_head"):
        chosen, _ = dispatch.resolve(name, DEVICE)
        assert chosen.name == ("triton" if DEVICE.type == "cuda" else "reference")
