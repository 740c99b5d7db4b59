"""What the tests of kernels that store share. They run on the GPU where there is one, else interpreted on the CPU."""

import torch

from tests.ops.attention_kernels import DEVICE, there_of
from tests.ops.builders import frequencies, randn, seeded
from thalweg.layouts import exact, index_fp8, mla_bf16, v4, v32
from thalweg.layouts.registry import layout_of
from thalweg.ops import norm_rope_q, norm_rope_store, rope_quantise_index_q

LAYOUTS = ["v4", "v32", "index_fp8", "mla_bf16", "exact"]
MODULES = {"v4": v4, "v32": v32, "index_fp8": index_fp8, "mla_bf16": mla_bf16}
CHANNELS = {"v4": 512, "v32": 576, "index_fp8": 128, "mla_bf16": 576, "exact": 576}


def allocate(layout: str, slots: int, page_slots: int = 4, width: int = 576) -> torch.Tensor:
    """A cache of `slots` slots and a page more, its pages further apart than they must be, on DEVICE, filled with 0x11."""
    pages = 1 + -(-slots // page_slots)
    packed = (
        exact.allocate(pages, page_slots, width) if layout == "exact" else MODULES[layout].allocate(pages, page_slots)
    )
    gap = 64
    storage = torch.zeros(pages * (packed.stride(0) + gap), dtype=packed.dtype, device=DEVICE)
    storage.view(torch.uint8).fill_(0x11)
    return storage.as_strided(packed.shape, (packed.stride(0) + gap, *packed.stride()[1:]))


def blocks(cache: torch.Tensor) -> list[torch.Tensor]:
    """The bytes of the slots [slots, bytes], by block; on the CPU."""
    parts = layout_of(cache).blocks(cache)
    return [part.flatten(0, 1).contiguous().view(torch.uint8).cpu() for part in parts]


def stored(layout: str, cache: torch.Tensor, kv: torch.Tensor, implementation: str = "triton") -> list[torch.Tensor]:
    """The bytes of the slots after rows `kv` went to slots 4, 5, ..."""
    cache = cache.clone() if cache.is_contiguous() else there_of(again(cache))
    if layout == "exact" and cache.shape[-1] != kv.shape[1]:
        cache = allocate(layout, 8, width=kv.shape[1])
    weight = randn(seeded(9), kv.shape[1])
    slots = torch.arange(4, 4 + len(kv))
    arguments = (kv, weight, frequencies(), torch.arange(len(kv)) * 777, cache, slots)
    norm_rope_store(*map(there_of, arguments), implementation=implementation)
    return [block[4 : 4 + len(kv)] for block in blocks(cache)]


def again(cache: torch.Tensor) -> torch.Tensor:
    """A copy with the same page stride, bytes between pages included."""
    storage = torch.empty(0, dtype=cache.dtype, device=cache.device).set_(cache.untyped_storage().clone())
    return storage.as_strided(cache.shape, cache.stride(), cache.storage_offset())


def same_bytes(layout: str, got: torch.Tensor, want: torch.Tensor, most: int) -> None:
    """Every byte of two caches alike, gaps included, but for signs of NaN, and up to `most` rope channels of bf16 by one step.

    Cosines of another library may differ in their last bit: by a kernel and a reference on different devices.
    """
    a, b = (torch.tensor([], dtype=torch.uint8, device=t.device).set_(t.untyped_storage()).cpu() for t in (got, want))
    differ = (a != b).nonzero().flatten()
    if layout == "exact":
        x, y = got.cpu(), want.cpu()
        torch.testing.assert_close(x, y, rtol=3e-7, atol=3e-7 * float(y.nan_to_num().abs().max()), equal_nan=True)
        return
    nan = ((a[differ] & 0x7F) == 0x7F) & ((b[differ] & 0x7F) == 0x7F)
    off = differ[~nan]
    assert len(off) <= most, f"{len(off)} bytes differ"
    if len(off) and layout in ("v4", "v32", "mla_bf16"):
        every = torch.arange(got.shape[0] * got.shape[1], device=got.device)
        x, y = (layout_of(each).read(each, every) for each in (got, want))
        latent = {"v4": 448, "v32": 512, "mla_bf16": 0}[layout]
        assert torch.equal(x[:, :latent].nan_to_num(), y[:, :latent].nan_to_num())
        assert ((x - y).abs() <= 2.0**-7 * y.abs() + 1e-6).logical_or(y.isnan()).all()


def check_store(
    layout: str,
    rows: int = 3,
    dtype: torch.dtype = torch.bfloat16,
    page_slots: int = 4,
    normed: int | None = None,
    kv: torch.Tensor | None = None,
    weight: float | torch.Tensor = 1.0,
    pairs: int | None = None,
    slots: torch.Tensor | None = None,
    dtype_of_indices: torch.dtype = torch.int32,
    eps: float = 1e-6,
    seed: int = 0,
) -> None:
    """norm_rope_store by the kernels leaves the bytes of the reference, in slots of no order, some rows without one."""
    g = seeded(seed + rows)
    if kv is None:
        kv = (randn(g, rows, CHANNELS[layout]) * torch.exp(2 * randn(g, rows, 1))).to(dtype)
    rows, channels = kv.shape
    if not isinstance(weight, torch.Tensor):
        weight = randn(g, channels if normed is None else normed) * weight
    cache = allocate(layout, 2 * rows + 2, page_slots, channels)
    if slots is None:
        slots = page_slots + torch.randperm(2 * rows + 1, generator=g)[:rows]
        slots[2::5] = -1
    positions = torch.randint(0, 2**20, (rows,), generator=g)
    f = frequencies(min(32, channels // 2) if pairs is None else pairs)
    arguments = (kv, weight, f, positions.to(dtype_of_indices))
    caches = [again(cache) for _ in range(2)]
    for each, implementation in zip(caches, ("triton", "reference"), strict=True):
        rest = (each, there_of(slots.to(dtype_of_indices)))
        norm_rope_store(*map(there_of, arguments), *rest, eps=eps, implementation=implementation)
    same_bytes(layout, *caches, most=max(2, rows * 64 // 500))


def check_query(rows: int, heads: int, width: int, dtype: torch.dtype, seed: int = 0) -> None:
    """norm_rope_q by the kernel to a rounding and 1e-6 of a head's largest."""
    g = seeded(seed + rows + heads + width)
    q = (randn(g, rows, heads, width) * torch.exp(3 * randn(g, rows, heads, 1))).to(dtype)
    positions = torch.randint(0, 2**20, (rows,), generator=g)
    arguments = [there_of(part) for part in (q, frequencies(min(32, width // 2)), positions)]
    got = norm_rope_q(*arguments, implementation="triton")
    want = norm_rope_q(*arguments, implementation="reference")
    assert got.dtype == want.dtype == dtype
    step = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}[dtype]
    a, b = got.double(), want.double()
    assert ((a - b).abs() <= step * b.abs() + 1e-6 * b.abs().amax(-1, keepdim=True)).all()
    assert dtype == torch.float32 or (a == b).float().mean() > 0.99


def check_index_query(
    rows: int, heads: int, dtype: torch.dtype, hadamard: bool, quantise: bool, width: int = 128, seed: int = 0
) -> None:
    """Codes within one step of e4m3, nearly all the same; weights times scales to 1e-6."""
    g = seeded(seed + rows + heads)
    q, weights = (randn(g, rows, heads, width) * 3).to(dtype), randn(g, rows, heads)
    if rows > 1:
        q[1, 0] = 0.0
    positions = torch.randint(0, 2**20, (rows,), generator=g)
    arguments = [there_of(part) for part in (q, weights, frequencies(), positions)]
    options = {"hadamard": hadamard, "quantise": quantise}
    got, folded = rope_quantise_index_q(*arguments, **options, implementation="triton")
    want, want_folded = rope_quantise_index_q(*arguments, **options, implementation="reference")
    assert got.dtype == want.dtype and got.shape == want.shape
    torch.testing.assert_close(folded, want_folded, rtol=1e-6, atol=0)
    a, b = got.double(), want.double()
    if quantise:
        assert ((a - b).abs() <= torch.maximum(b.abs() / 8, torch.tensor(2.0**-9))).all()
        assert (a == b).float().mean() > 0.999
        if not hadamard:  # channels that do not turn are not computed with
            assert torch.equal(a[..., : width - 64], b[..., : width - 64]) or (folded != want_folded).any()
    else:
        torch.testing.assert_close(a, b, rtol=1e-6, atol=3e-6)
