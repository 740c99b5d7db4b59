"""Dense latent attention (the MLA family): a tree of new tokens over a paged prefix that is read once for all of them.

s_j = q . k_j x scale over 576 channels, out_h = softmax(s) . v; v is the first 512 channels of k. The same call serves
a decode step (one node), a prefill chunk (a chain) and the verification of a tree of draft tokens. Source: DeepSeek-V2
(arXiv 2405.04434), absorbed form; trees as in SpecInfer (arXiv 2305.09781).
"""

import torch
from torch import Tensor

from thalweg.layouts import exact, mla_bf16, sizes, v32
from thalweg.layouts.registry import layout_of
from thalweg.ops import dispatch
from thalweg.ops.checks import check_same_device, check_tensor, require
from thalweg.ops.mla_verify import reference

dispatch.register("mla_verify", "reference", reference.mla_verify)

_INTEGER = (torch.int32, torch.int64)


def mla_verify(
    q: torch.Tensor,
    cache: torch.Tensor,
    page_table: torch.Tensor,
    prefix_lengths: torch.Tensor,
    parents: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    *,
    scale: float,
    implementation: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every node attends to the prefix of its request, its ancestors and itself; all rows are in the cache already.

    q [B, N, H, 576] bf16, float16 or float32; cache mla_bf16, v32 or exact (width 576), any page size; page_table int [B, W]:
    position p of request b lies in page page_table[b, p // page size]; prefix_lengths int [B]: tokens before the nodes, 0
    allowed, < 0 = empty request; node n of request b is at position prefix_lengths[b] + n, whatever its depth in the tree.
    The tree is given by one of
    - parents int [B, N]: the parent's number, lower than the node's own; -1 = child of the prefix's last token; -2 =
      padding, as is every node below one. A chain (decode, prefill chunk) is arange(N) - 1.
    - mask bool [B, N, N]: mask[b, n, m] = node n sees node m; mask[b, n, n] False = padding, which nobody sees.

    Returns (out [B, N, H, 512] in q's dtype, lse float32 [B, N, H], natural log). Padding nodes and nodes of empty requests
    give out 0 and lse -inf; their slots are not read. A live position past the table or with a page outside the pool raises
    IndexError with THALWEG_CHECK=1 and is not seen otherwise (page -1: not seen). A parent that is none of the above raises
    ValueError with THALWEG_CHECK=1 and makes its node padding otherwise. Raises ValueError for shapes that do not fit.
    """
    check_tensor("q", q, (None, None, None, sizes.MLA_DIM), (torch.bfloat16, torch.float16, torch.float32))
    batch, nodes, heads, width = q.shape
    require(heads >= 1, "q: needs at least one head")
    layout = layout_of(cache)
    require(layout in (mla_bf16, v32, exact), f"cache: got layout {layout.NAME}, needs mla_bf16, v32 or exact")
    stored = getattr(layout, "WIDTH", cache.shape[-1])
    require(stored == width, f"cache: q has width {width}, the {layout.NAME} cache has rows of {stored}")
    check_tensor("page_table", page_table, (batch, None), _INTEGER)
    check_tensor("prefix_lengths", prefix_lengths, (batch,), _INTEGER)
    require((parents is None) != (mask is None), "the tree: needs one of parents and mask")
    if parents is not None:
        check_tensor("parents", parents, (batch, nodes), _INTEGER)
    if mask is not None:
        check_tensor("mask", mask, (batch, nodes, nodes), (torch.bool,))
    check_same_device(
        q=q, cache=cache, page_table=page_table, prefix_lengths=prefix_lengths, parents=parents, mask=mask
    )
    return _mla_verify(q, cache, page_table, prefix_lengths, parents, mask, scale, implementation)


@torch.library.custom_op("thalweg::mla_verify", mutates_args=())
def _mla_verify(
    q: Tensor,
    cache: Tensor,
    page_table: Tensor,
    prefix_lengths: Tensor,
    parents: Tensor | None,
    mask: Tensor | None,
    scale: float,
    implementation: str | None,
) -> tuple[Tensor, Tensor]:
    args = (q, cache, page_table, prefix_lengths, parents, mask, scale)
    return dispatch.run("mla_verify", implementation, q.device, *args)


@_mla_verify.register_fake
def _(q, cache, page_table, prefix_lengths, parents, mask, scale, implementation):
    batch, nodes, heads, _ = q.shape
    lse = q.new_empty((batch, nodes, heads), dtype=torch.float32)
    return q.new_empty((batch, nodes, heads, sizes.LATENT_DIM)), lse
