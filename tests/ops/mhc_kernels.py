"""What the tests of the hyper-connection kernels share. They run on the GPU where there is one, else interpreted on the CPU."""

from dataclasses import dataclass

import torch

from tests.ops.builders import randn, seeded
from thalweg.ops import mhc_head, mhc_post, mhc_post_pre_norm, mhc_pre

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass
class Site:
    """Arguments of the four operations, on DEVICE."""

    y: torch.Tensor
    streams: torch.Tensor
    post: torch.Tensor
    comb: torch.Tensor
    fn: torch.Tensor
    scale: torch.Tensor
    base: torch.Tensor
    norm: torch.Tensor

    def mixer(self, head: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return (self.fn[:4], self.scale[:1], self.base[:4]) if head else (self.fn, self.scale, self.base)

    def rows(self, some: slice) -> "Site":
        """Only these rows."""
        return Site(
            self.y[some],
            self.streams[some],
            self.post[some],
            self.comb[some],
            self.fn,
            self.scale,
            self.base,
            self.norm,
        )

    def fused(self, **options) -> tuple[torch.Tensor, ...]:
        """(X', u', post', comb')."""
        return mhc_post_pre_norm(
            self.y, self.streams, self.post, self.comb, *self.mixer(), self.norm, implementation="triton", **options
        )


def made(rows: int, width: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Site:
    """Streams of unlike sizes, logits of a standard deviation of a few, a comb that is not symmetric."""
    g = seeded(seed + rows + width)
    streams = randn(g, rows, 4, width) * torch.tensor([1.0, -2.0, 4.0, 0.5]).view(1, 4, 1)
    fn = randn(g, 24, 4 * width) * (4 * width) ** -0.5
    comb = torch.rand(rows, 4, 4, generator=g)
    parts = (randn(g, rows, width).to(dtype), streams.to(dtype), randn(g, rows, 4), comb, fn)
    return Site(
        *(part.to(DEVICE) for part in parts),
        torch.tensor([0.7, 1.3, 2.0], device=DEVICE),
        randn(g, 24).to(DEVICE),
        randn(g, width).to(DEVICE),
    )


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    """Same dtype and shape; |got - want| <= tolerance x |want|, or of the row's largest where sums cancel, and one rounding."""
    assert got.dtype == want.dtype and got.shape == want.shape
    assert torch.equal(got.isnan(), want.isnan())
    if got.numel() == 0:
        return
    a, b = got.double().nan_to_num(), want.double().nan_to_num()
    rounding = 2.0**-7 if got.dtype == torch.bfloat16 else 2.0**-23
    largest = b.abs().flatten(1).amax(1).view(-1, *[1] * (b.dim() - 1))
    assert ((a - b).abs() <= rounding * b.abs() + tolerance * largest).all()


def check(site: Site, tolerance: float = 5e-6, iterations: int = 3, alone: bool = True) -> None:
    """All four operations (the fused one without `alone`) as the reference has them; what follows from X' on the kernels' own X'.

    Few iterations: interpreted, one of them costs a program 20 ms.
    """
    out, u, post, comb = site.fused(iterations=iterations)
    reference = {"implementation": "reference"}
    often = {"iterations": iterations}
    close(out, mhc_post(site.y, site.streams, site.post, site.comb, **reference), tolerance)
    want_u, want_post, want_comb = mhc_pre(out, *site.mixer(), **often, **reference)
    nothing = torch.zeros_like(site.post), torch.eye(4, device=DEVICE).expand(len(out), 4, 4)
    normed = mhc_post_pre_norm(torch.zeros_like(site.y), out, *nothing, *site.mixer(), site.norm, **often, **reference)[
        1
    ]
    close(u, normed, tolerance)
    close(post, want_post, tolerance)
    close(comb, want_comb, tolerance)
    if not alone:
        return
    # Kernels of their own: a GPU's compiler may join other multiplications and additions in them.
    close(mhc_post(site.y, site.streams, site.post, site.comb, implementation="triton"), out, tolerance)
    parts = mhc_pre(out, *site.mixer(), **often, implementation="triton")
    for got, want in zip(parts, (want_u, want_post, want_comb), strict=True):
        close(got, want, tolerance)
    close(parts[1], post, tolerance)
    close(parts[2], comb, tolerance)
    head = mhc_head(out, *site.mixer(head=True), implementation="triton")
    close(head, mhc_head(out, *site.mixer(head=True), **reference), tolerance)
