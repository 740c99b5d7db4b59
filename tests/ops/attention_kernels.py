"""What the tests of the attention kernels share. They run on the GPU where there is one, else interpreted on the CPU."""

from dataclasses import dataclass

import pytest
import torch

from tests.ops.attention_inputs import filled
from tests.ops.builders import randn, seeded
from thalweg.ops import sparse_mla

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SCALE = 512**-0.5
interpreted = pytest.mark.skipif(DEVICE.type == "cuda", reason="accesses are seen where kernels are interpreted")


@dataclass
class Inputs:
    """Arguments of sparse_mla."""

    q: torch.Tensor
    cache: torch.Tensor
    indices: torch.Tensor
    lengths: torch.Tensor | None = None
    sink: torch.Tensor | None = None
    extra: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None = None
    rotate_back: tuple[torch.Tensor, torch.Tensor] | None = None

    def run(self, implementation: str, **options: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse), computed on DEVICE, on the CPU."""
        out, lse = self.on_device(implementation, **options)
        return out.cpu(), lse.cpu()

    def on_device(self, implementation: str, **options: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse) on DEVICE."""
        there = [there_of(each) for each in (self.q, self.cache, self.indices, self.lengths, self.sink)]
        extra = None if self.extra is None else tuple(there_of(each) for each in self.extra)
        back = None if self.rotate_back is None else tuple(there_of(each) for each in self.rotate_back)
        return sparse_mla(*there, extra, scale=SCALE, rotate_back=back, implementation=implementation, **options)

    def part(self, rows: slice) -> "Inputs":
        """Only these rows."""
        extra = self.extra and (
            self.extra[0],
            self.extra[1][rows],
            None if self.extra[2] is None else self.extra[2][rows],
        )
        lengths = None if self.lengths is None else self.lengths[rows]
        back = self.rotate_back and (self.rotate_back[0][rows], self.rotate_back[1])
        return Inputs(self.q[rows], self.cache, self.indices[rows], lengths, self.sink, extra, back)


def there_of(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The tensor on DEVICE; a cache keeps its page stride."""
    if tensor is None or tensor.device.type == DEVICE.type:
        return tensor
    storage = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage()).to(DEVICE)
    return storage.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def made(
    layout: str,
    rows: int,
    heads: int,
    width: int,
    extra_width: int = 0,
    page_slots: int = 64,
    extra_page_slots: int = 16,
    sink: bool = True,
    seed: int = 0,
) -> Inputs:
    """Random queries and lists over caches of about 250 rows, whose page 0 holds NaN; channels of about 1."""
    g = seeded(seed)
    cache, known = filled(g, layout, 1 + max(2, 128 // page_slots), page_slots)
    q = randn(g, rows, heads, 512 if layout in ("v4", "exact") else 576).bfloat16()
    extra = None
    if extra_width:
        other, extra_known = filled(g, layout, 1 + max(2, 128 // extra_page_slots), extra_page_slots)
        extra = (other, listed(g, extra_known, rows, extra_width), None)
    return Inputs(q, cache, listed(g, known, rows, width), None, randn(g, heads) if sink else None, extra)


def back_from(*positions: int, dtype: torch.dtype = torch.int64) -> tuple[torch.Tensor, torch.Tensor]:
    """`rotate_back` for rows at these positions, by the frequencies of the model's compressed layers (base 1.6e5)."""
    return torch.tensor(positions, dtype=dtype), 1.6e5 ** -(torch.arange(32) / 32)


def listed(generator: torch.Generator, known: dict, rows: int, width: int) -> torch.Tensor:
    """int32 [rows, width] of slots that hold something, some twice."""
    slots = torch.tensor(sorted(known))
    return slots[torch.randint(len(slots), (rows, width), generator=generator)].int()


def check(inputs: Inputs, **options: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernels' result as the reference's, which it returns."""
    got, want = inputs.run("triton", **options), inputs.run("reference")
    agrees(got, want)
    return got


def agrees(got: tuple[torch.Tensor, torch.Tensor], want: tuple[torch.Tensor, torch.Tensor]) -> None:
    """The contract's bar: out to 1e-3 (of channels of about 1, times what weights rounded to bf16 make of them) or 2.01/128,
    cosine distance below 5e-6, lse to 8/65536; NaN, and rows of nothing, in the same places.
    """
    (out, lse), (want_out, want_lse) = got, want
    assert out.dtype == want_out.dtype and lse.dtype == torch.float32
    assert torch.equal(out.isnan(), want_out.isnan())
    assert torch.equal(lse.isfinite(), want_lse.isfinite()) and torch.equal(lse.isnan(), want_lse.isnan())
    assert torch.equal(lse == -torch.inf, want_lse == -torch.inf)
    empty = want_lse == -torch.inf
    assert (out[empty] == 0).all()
    difference = (lse - want_lse).where(want_lse.isfinite(), 0).abs()
    assert (difference <= 8 / 65536 * want_lse.abs().where(want_lse.isfinite(), 0).clamp(min=1)).all()
    a, b = out.double().nan_to_num(), want_out.double().nan_to_num()
    largest = b.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    error = (a - b).abs()
    assert ((error <= 2.01 / 128 * b.abs()) | (error <= torch.maximum(torch.full_like(b, 1e-3), 4e-3 * largest))).all()
    norms = (a * a).sum() + (b * b).sum()
    if norms > 0:
        assert 1 - 2 * (a * b).sum() / norms < 5e-6
