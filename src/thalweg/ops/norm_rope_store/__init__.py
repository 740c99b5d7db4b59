"""What stands between a projection and a cache or a score: norm, rope, quantisation, paged write.

RoPE turns the LAST 2 x len(inverse_frequencies) channels, interleaved pairs. Source: the DeepSeek-V4 technical report;
byte layouts in `thalweg.layouts`.
"""

import torch
from torch import Tensor

from thalweg.layouts.registry import layout_of
from thalweg.ops import dispatch
from thalweg.ops.checks import FLOATING, check_inverse_frequencies, check_same_device, check_tensor, require
from thalweg.ops.hardware import on_first_call, triton_unproven, triton_unsupported
from thalweg.ops.norm_rope_store import reference

_KERNELS = "thalweg.ops.norm_rope_store.triton"

for _operation, _function in (
    ("norm_rope_store", reference.kv_store),
    ("norm_rope_q", reference.query),
    ("rope_quantise_index_q", reference.index_query),
):
    dispatch.register(
        _operation,
        "triton",
        on_first_call(_KERNELS, _function.__name__),
        triton_unsupported,
        triton_unproven,
        on_first_call(_KERNELS, f"{_function.__name__}_rejects"),
    )
    dispatch.register(_operation, "reference", _function)

_INTEGER = (torch.int32, torch.int64)


def norm_rope_store(
    kv: torch.Tensor,
    norm_weight: torch.Tensor,
    inverse_frequencies: torch.Tensor,
    positions: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    eps: float = 1e-6,
    implementation: str | None = None,
) -> None:
    """RMSNorm and rope of latent rows, quantised by the cache's layout and written to their slots, in place.

    kv [T, d] float32, bf16 or float16; norm_weight [n]: the norm is over the first n channels (V4: all 512; MLA: 512 of 576, the
    rope channels stand outside of it); inverse_frequencies float32; positions int [T]; cache of any layout of row width d;
    slots int [T], -1 = not stored. Raises ValueError for shapes that do not fit.
    """
    check_tensor("kv", kv, (None, None), FLOATING)
    rows, width = kv.shape
    check_tensor("norm_weight", norm_weight, (None,), FLOATING)
    require(norm_weight.numel() <= width, f"norm_weight: got {norm_weight.numel()} channels, kv has {width}")
    check_tensor("positions", positions, (rows,), _INTEGER)
    check_tensor("slots", slots, (rows,), _INTEGER)
    layout = layout_of(cache)
    stored = getattr(layout, "WIDTH", cache.shape[-1])
    if stored != width:
        raise ValueError(f"kv: got rows of width {width}, the {layout.NAME} cache stores {stored}")
    check_inverse_frequencies(inverse_frequencies, width)
    check_same_device(
        kv=kv,
        norm_weight=norm_weight,
        inverse_frequencies=inverse_frequencies,
        positions=positions,
        cache=cache,
        slots=slots,
    )
    _store(kv, norm_weight, inverse_frequencies, positions, cache, slots, eps, implementation)


def norm_rope_q(
    q: torch.Tensor,
    inverse_frequencies: torch.Tensor,
    positions: torch.Tensor,
    *,
    eps: float = 1e-6,
    implementation: str | None = None,
) -> torch.Tensor:
    """Weightless RMSNorm per head and rope: q [T, H, d] float32, bf16 or float16, positions int [T] -> [T, H, d] in q's dtype."""
    check_tensor("q", q, (None, None, None), FLOATING)
    check_tensor("positions", positions, (q.shape[0],), _INTEGER)
    check_inverse_frequencies(inverse_frequencies, q.shape[2])
    check_same_device(q=q, inverse_frequencies=inverse_frequencies, positions=positions)
    return _query(q, inverse_frequencies, positions, eps, implementation)


def rope_quantise_index_q(
    q: torch.Tensor,
    weights: torch.Tensor,
    inverse_frequencies: torch.Tensor,
    positions: torch.Tensor,
    *,
    hadamard: bool,
    quantise: bool,
    implementation: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The indexer's queries: rope, Hadamard rotation (only where the keys have it too), e4m3.

    q [T, Hq, d] float32, bf16 or float16, weights float32 [T, Hq] (already times d^-1/2 Hq^-1/2), positions int [T]. Returns
    (q e4m3 [T, Hq, d], weights x the scale of each row and head), or with quantise=False (the exact layout) (q float32,
    weights unchanged).
    """
    check_tensor("q", q, (None, None, None), FLOATING)
    check_tensor("weights", weights, (q.shape[0], q.shape[1]), (torch.float32,))
    check_tensor("positions", positions, (q.shape[0],), _INTEGER)
    check_inverse_frequencies(inverse_frequencies, q.shape[2])
    check_same_device(q=q, weights=weights, inverse_frequencies=inverse_frequencies, positions=positions)
    return _index_query(q, weights, inverse_frequencies, positions, hadamard, quantise, implementation)


@torch.library.custom_op("thalweg::norm_rope_store", mutates_args=("cache",))
def _store(
    kv: Tensor,
    norm_weight: Tensor,
    inverse_frequencies: Tensor,
    positions: Tensor,
    cache: Tensor,
    slots: Tensor,
    eps: float,
    implementation: str | None,
) -> None:
    args = (kv, norm_weight, inverse_frequencies, positions, cache, slots, eps)
    dispatch.run("norm_rope_store", implementation, kv.device, *args)


@_store.register_fake
def _(kv, norm_weight, inverse_frequencies, positions, cache, slots, eps, implementation):
    return None


@torch.library.custom_op("thalweg::norm_rope_q", mutates_args=())
def _query(q: Tensor, inverse_frequencies: Tensor, positions: Tensor, eps: float, implementation: str | None) -> Tensor:
    return dispatch.run("norm_rope_q", implementation, q.device, q, inverse_frequencies, positions, eps)


@_query.register_fake
def _(q, inverse_frequencies, positions, eps, implementation):
    return torch.empty_like(q)


@torch.library.custom_op("thalweg::rope_quantise_index_q", mutates_args=())
def _index_query(
    q: Tensor,
    weights: Tensor,
    inverse_frequencies: Tensor,
    positions: Tensor,
    hadamard: bool,
    quantise: bool,
    implementation: str | None,
) -> tuple[Tensor, Tensor]:
    args = (q, weights, inverse_frequencies, positions, hadamard, quantise)
    return dispatch.run("rope_quantise_index_q", implementation, q.device, *args)


@_index_query.register_fake
def _(q, weights, inverse_frequencies, positions, hadamard, quantise, implementation):
    dtype = torch.float8_e4m3fn if quantise else torch.float32
    return torch.empty_like(q, dtype=dtype), torch.empty_like(weights)
