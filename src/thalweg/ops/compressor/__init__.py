"""The compressors of CSA (4:1, overlapping) and HCA (128:1), with norm, rope, Hadamard, quantisation and paged store.

Source: the DeepSeek-V4 technical report, section 2.3. Entry w of c4 pools tokens 4w-4..4w-1 through channels [0, d) and
4w..4w+3 through [d, 2d); entry w of c128 pools its own 128 tokens. RoPE stands at the entry's first token, ratio x w.
"""

import torch
from torch import Tensor

from thalweg.layouts.registry import layout_of
from thalweg.ops import dispatch
from thalweg.ops.checks import FLOATING, check_inverse_frequencies, check_same_device, check_tensor, require
from thalweg.ops.compressor import reference
from thalweg.ops.compressor.plan import CompressPlan, overlap_of
from thalweg.ops.hardware import on_first_call, triton_unproven, triton_unsupported

__all__ = ["CompressPlan", "compress", "overlap_of"]

_KERNELS = "thalweg.ops.compressor.triton"

dispatch.register(
    "compress",
    "triton",
    on_first_call(_KERNELS, "compress"),
    triton_unsupported,
    triton_unproven,
    on_first_call(_KERNELS, "compress_rejects"),
)
dispatch.register("compress", "reference", reference.compress)


def compress(
    kv: torch.Tensor,
    gate: torch.Tensor,
    state: torch.Tensor,
    ape: torch.Tensor,
    plan: CompressPlan,
    norm_weight: torch.Tensor,
    inverse_frequencies: torch.Tensor,
    cache: torch.Tensor,
    *,
    ratio: int,
    hadamard: bool = False,
    eps: float = 1e-6,
    implementation: str | None = None,
) -> None:
    """Pools the rows given into entries, stores those that complete, and carries the open window, all in place.

    kv, gate [T, w] raw projections (w = 2d for ratio 4, d for 128); state float32 [slots, ring, 2, w] (ring 8 or 128; kv and
    gate); ape float32 [ratio, w]; plan as `CompressPlan`; norm_weight [d]; cache of any layout of row width d; hadamard for
    index keys whose queries have it too. Entries are rounded to bf16 before quantisation, except in an exact cache.
    Raises ValueError for shapes that do not fit.
    """
    ring = overlap_of(ratio)
    check_tensor("kv", kv, (None, None), FLOATING)
    rows, width = kv.shape
    check_tensor("gate", gate, (rows, width), FLOATING)
    check_tensor("state", state, (None, ring, 2, width), (torch.float32,))
    check_tensor("ape", ape, (ratio, width), FLOATING)
    plan.check(rows)
    require(ratio != 4 or width % 2 == 0, f"kv: got width {width}, ratio 4 needs two halves of an entry's channels")
    d = width // 2 if ratio == 4 else width
    check_tensor("norm_weight", norm_weight, (d,), FLOATING)
    layout = layout_of(cache)
    stored = getattr(layout, "WIDTH", cache.shape[-1])
    if stored != d:
        raise ValueError(f"kv: got width {width} for entries of {d} channels, the {layout.NAME} cache stores {stored}")
    check_inverse_frequencies(inverse_frequencies, d)
    where = (plan.positions, plan.state_slots, plan.cache_slots)
    tensors = {"kv": kv, "gate": gate, "state": state, "ape": ape, "norm_weight": norm_weight, "cache": cache}
    check_same_device(**tensors, **vars(plan), inverse_frequencies=inverse_frequencies)
    fixed = (norm_weight, inverse_frequencies, cache, ratio, hadamard, eps)
    _compress(kv, gate, state, ape, *where, *fixed, implementation)


@torch.library.custom_op("thalweg::compress", mutates_args=("state", "cache"))
def _compress(
    kv: Tensor,
    gate: Tensor,
    state: Tensor,
    ape: Tensor,
    positions: Tensor,
    state_slots: Tensor,
    cache_slots: Tensor,
    norm_weight: Tensor,
    inverse_frequencies: Tensor,
    cache: Tensor,
    ratio: int,
    hadamard: bool,
    eps: float,
    implementation: str | None,
) -> None:
    plan = CompressPlan(positions, state_slots, cache_slots)
    args = (kv, gate, state, ape, plan, norm_weight, inverse_frequencies, cache, ratio, hadamard, eps)
    dispatch.run("compress", implementation, kv.device, *args)


@_compress.register_fake
def _(
    kv, gate, state, ape, positions, state_slots, cache_slots, norm_weight, inverse_frequencies, cache, ratio, hadamard, eps,
    implementation,
):  # fmt: skip
    return None
