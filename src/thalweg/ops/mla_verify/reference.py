"""Dense latent attention for a tree in plain PyTorch: request by request, key block by key block, float64 inside.

A block's scores are merged into a running softmax (the largest score, the sum, the weighted values), as a kernel that is
split over KV would: every row of the cache is read and decoded once, for all nodes and heads.
"""

from dataclasses import dataclass

import torch

from thalweg.layouts.registry import layout_of
from thalweg.layouts.sizes import LATENT_DIM
from thalweg.layouts.work import Work, count, is_counting
from thalweg.ops.checks import debug_checks, in_pool, require

# Rows of the cache decoded at once. Counted from position 0, so a node's sums do not depend on its batch.
_BLOCK_KEYS = 1024

# Nodes x heads x keys scored at once, in elements: 8 MiB of float64, and small enough to skip what a chain does not see.
_BLOCK_ELEMENTS = 2**20


def mla_verify(
    q: torch.Tensor,
    cache: torch.Tensor,
    page_table: torch.Tensor,
    prefix_lengths: torch.Tensor,
    parents: torch.Tensor | None,
    mask: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `thalweg.ops.mla_verify`."""
    out = torch.zeros(*q.shape[:3], LATENT_DIM, dtype=q.dtype, device=q.device)
    lse = torch.full(q.shape[:3], float("-inf"), dtype=torch.float32, device=q.device)
    for request, prefix in enumerate(prefix_lengths.tolist()):
        visible = _visible(parents, mask, request)
        nodes = visible.diagonal().nonzero().squeeze(1)
        if prefix < 0 or not nodes.numel():
            continue
        among_nodes = visible[nodes][:, nodes]
        running = _Running.start(q[request, nodes])
        # Columns: the prefix, then the nodes that are no padding. Nothing here is as large as nodes x prefix.
        for column in torch.arange(prefix + nodes.numel(), device=q.device).split(_BLOCK_KEYS):
            node = (column - prefix).clamp(min=0)
            in_prefix = column < prefix
            slots = _slots(cache, page_table[request], torch.where(in_prefix, column, prefix + nodes[node]))
            known = slots >= 0
            seen = (in_prefix | among_nodes[:, node])[:, known]
            if is_counting():
                count(Work(entries_attended=int(seen.sum())))
            running.merge(layout_of(cache).read(cache, slots[known]).double(), seen, scale)
        out[request, nodes], lse[request, nodes] = running.result(q.dtype)
    return out, lse


def _visible(parents: torch.Tensor | None, mask: torch.Tensor | None, request: int) -> torch.Tensor:
    """bool [N, N]: which nodes each node of a request sees, itself included; where it does not see itself it is padding."""
    if mask is not None:
        return mask[request]
    assert parents is not None
    return ancestors(parents[request].long())


def ancestors(parents: torch.Tensor) -> torch.Tensor:
    """parents int64 [N] -> bool [N, N]: [n, m] = m is n or an ancestor of n; an all-False row for padding.

    By doubling: what a node reaches in 2^i steps it reaches in 2^(i-1) steps from where 2^(i-1) steps took it.
    """
    num_nodes = parents.numel()
    node = torch.arange(num_nodes, device=parents.device)
    valid = (parents >= -1) & (parents < node)
    if debug_checks():
        wrong = ~valid & (parents != -2)
        require(not bool(wrong.any()), f"parents: got {parents[wrong].tolist()} at nodes {node[wrong].tolist()}")
    # Row `num_nodes` stands for the prefix: reached from every root, it reaches itself and shows nothing.
    up = torch.cat((torch.where(valid & (parents >= 0), parents, num_nodes), node.new_tensor([num_nodes])))
    real = torch.cat((valid, valid.new_ones(1)))
    reach = torch.eye(num_nodes + 1, dtype=torch.bool, device=parents.device)
    for _ in range(num_nodes.bit_length()):
        reach |= reach[up]
        real &= real[up]
        up = up[up]
    return reach[:num_nodes, :num_nodes] & real[:num_nodes].unsqueeze(1)


def _slots(cache: torch.Tensor, pages: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """int64 slots of `positions`, -1 where the table or the pool has none."""
    page_slots = cache.shape[1]
    column = positions // page_slots
    in_table = in_pool("mla_verify page_table columns", column, torch.ones_like(column, dtype=torch.bool), len(pages))
    page = torch.full_like(positions, -1)
    page[in_table] = pages[column[in_table]].long()
    known = in_pool("mla_verify page_table", page, in_table, cache.shape[0])
    return torch.where(known, page * page_slots + positions % page_slots, -1)


@dataclass
class _Running:
    """A softmax in progress: q float64 [N, H, 576], largest score and sum [N, H], weighted values [N, H, 512]."""

    q: torch.Tensor
    largest: torch.Tensor
    total: torch.Tensor
    values: torch.Tensor

    @staticmethod
    def start(q: torch.Tensor) -> "_Running":
        wide = q.double()
        largest = torch.full(q.shape[:2], float("-inf"), dtype=torch.float64, device=q.device)
        return _Running(wide, largest, torch.zeros_like(largest), torch.zeros_like(wide[..., :LATENT_DIM]))

    def merge(self, keys: torch.Tensor, seen: torch.Tensor, scale: float) -> None:
        """keys float64 [K, 576], seen bool [N, K]."""
        step = max(1, _BLOCK_ELEMENTS // max(1, self.q.shape[1] * keys.shape[0]))
        for start in range(0, self.q.shape[0], step):
            rows = slice(start, start + step)
            if bool(seen[rows].any()):
                self._merge_rows(rows, keys, seen[rows], scale)

    def _merge_rows(self, rows: slice, keys: torch.Tensor, seen: torch.Tensor, scale: float) -> None:
        scores = (self.q[rows] @ keys.T * scale).masked_fill(~seen.unsqueeze(1), float("-inf"))
        largest = torch.maximum(self.largest[rows], scores.amax(dim=-1))
        origin = torch.where(torch.isneginf(largest), 0.0, largest)  # -inf - -inf would be NaN
        weights = torch.exp(scores - origin.unsqueeze(-1))
        decay = torch.exp(self.largest[rows] - origin)
        self.total[rows] = self.total[rows] * decay + weights.sum(dim=-1)
        self.values[rows] = self.values[rows] * decay.unsqueeze(-1) + _weighted_sum(weights, keys, seen)
        self.largest[rows] = largest

    def result(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse float32); 0 and -inf where nothing was seen."""
        empty = self.total == 0
        out = self.values / torch.where(empty, 1.0, self.total).unsqueeze(-1)
        return out.to(dtype), (self.largest + torch.log(self.total)).float()


def _weighted_sum(weights: torch.Tensor, keys: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """weights [N, H, K] times values [K, 512]. A NaN in a node's row reaches nobody who does not see that node."""
    values = keys[:, :LATENT_DIM]
    partly_seen = (~seen.all(dim=0)).nonzero().squeeze(1)
    poisoned = partly_seen[~values[partly_seen].isfinite().all(dim=1)]
    if not poisoned.numel():
        return weights @ values
    # Weight 0 x NaN is NaN: such rows are left out of the product, and added to those who see them.
    product = weights @ values.index_fill(0, poisoned, 0.0)
    for column in poisoned.tolist():
        share = weights[:, :, column].unsqueeze(-1) * values[column]
        product += torch.where(seen[:, column].view(-1, 1, 1), share, 0.0)
    return product
