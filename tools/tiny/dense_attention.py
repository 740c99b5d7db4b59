"""Dense differentiable attention of DeepSeek-V4: window, compressed entries, sink, and the indexer's distillation.

The window is computed in blocks of `sliding_window` queries against their own and the previous block, the compressed
entries as [time, entries] with masks: nothing of size time x time is made. Mode.block_rows bounds the rest for long texts.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tools.tiny.dense_parts import (
    NEGATIVE,
    Compressor,
    Fusible,
    RMSNorm,
    normalise_and_rotate,
    quantise_like_cache,
    rotary_tables,
    rotate,
)
from tools.tiny.tiny_config import TinyConfig


@dataclass(frozen=True)
class Mode:
    """How a forward pass reads the compressed entries of CSA layers.

    selection: "dense" attends to all visible entries, "indexer" to the index_topk with the highest index scores,
        "random" to as many chosen at random. quantise_cache: latent rows as the fp8 cache gives them back.
    distil: also compute the indexer's distillation loss. coarse: HCA layers attend to their entries, not to the window
        alone. block_rows: query rows whose products with entries exist at one time, a multiple of the window (0: all);
        the backward pass computes them again.
    """

    selection: Literal["dense", "indexer", "random"] = "indexer"
    quantise_cache: bool = False
    distil: bool = False
    coarse: bool = True
    block_rows: int = 0


@dataclass(frozen=True)
class Marks:
    """Rows of a batch that training treats apart, bool [B, T] each.

    answers: rows that predict what only a far entry tells; the indexer's loss on them counts as ANSWER_KL_WEIGHT times that on
    all rows. no_coarse: rows that see no HCA entry, so that CSA layers must find what they need.
    """

    answers: Tensor
    no_coarse: Tensor


ANSWER_KL_WEIGHT = 1.0


@Fusible
def combine_index_heads(products: Tensor, weights: Tensor) -> Tensor:
    """sum_h weights_h relu(products_h): [B, T, H, C], [B, T, H] -> float32 [B, T, C]."""
    return (F.relu(products).float() * weights.unsqueeze(-1)).sum(2)


class Indexer(nn.Module):
    """Scores every compressed entry for every query."""

    def __init__(self, c: TinyConfig) -> None:
        super().__init__()
        self.c = c
        self.wq_b = nn.Linear(c.q_lora_rank, c.index_n_heads * c.index_head_dim, bias=False)
        self.weights_proj = nn.Linear(c.hidden_size, c.index_n_heads, bias=False)
        self.compressor = Compressor(c, 4, c.index_head_dim)

    def forward(self, x: Tensor, q_residual: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, T, h, d], their weights float32 [B, T, h] and keys [B, T // 4, d] of x [B, T, D], [B, T, q rank]."""
        heads, width = self.c.index_n_heads, self.c.index_head_dim
        queries = self.wq_b(q_residual).view(*x.shape[:2], heads, width)
        weights = self.weights_proj(x).float() * (heads**-0.5 * width**-0.5)
        return rotate(queries, cos[:, None], sin[:, None]), weights, self.compressor(x)


def index_scores(queries: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """float32 [B, R, C] for queries [B, R, h, d], weights [B, R, h] and keys [B, C, d]."""
    products = torch.matmul(queries.flatten(1, 2), keys.transpose(1, 2))
    return combine_index_heads(products.unflatten(1, queries.shape[1:3]), weights)


def choose(scores: Tensor, visible: Tensor, count: int) -> Tensor:
    """A mask [B, T, C] of the `count` highest scores among the visible entries (all, where fewer are visible)."""
    scores = scores.detach().masked_fill(~visible, NEGATIVE)
    best = scores.topk(min(count, scores.shape[-1]), dim=-1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True) & visible


def divergences(target: Tensor, scores: Tensor, visible: Tensor) -> Tensor:
    """KL(target || softmax(scores)) of every row in nats, 0 where it sees fewer than two entries: float32 [B, R].

    target: detached attention mass per visible entry [B, R, C], not normalised. scores: [B, R, C]. visible: [R, C].
    """
    target = target / target.sum(-1, keepdim=True).clamp_min(1e-9)
    log_chosen = torch.log_softmax(scores.masked_fill(~visible, NEGATIVE), dim=-1)
    divergence = (target * (target.clamp_min(1e-9).log() - log_chosen)).masked_fill(~visible, 0.0).sum(-1)
    return divergence * (visible.sum(-1) >= 2)


def mean_over(rows: Tensor, values: Tensor) -> Tensor:
    """Mean of values [B, T] over the rows [B, T] that are True; 0 where none is."""
    return (values * rows).sum() / rows.sum().clamp_min(1)


@Fusible
def joint_softmax(
    near: Tensor,
    far: Tensor | None,
    sink: Tensor,
    in_window: Tensor,
    visible: Tensor | None,
    chosen: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor | None]:
    """One softmax over window products [B, T, H, W], products with entries [B, T, H, C] and the sink [H].

    Masks (True = attended): in_window [T, W], visible [T, C], chosen [B, T, C] or None. Computed in float32;
    returns the probabilities of both parts in the products' dtype; the sink's share is left out.
    """
    dtype = near.dtype
    near = (near.float() * scale).masked_fill(~in_window[:, None], float("-inf"))
    top = torch.maximum(near.amax(-1, keepdim=True), sink.float()[:, None])
    if far is not None:
        far = (far.float() * scale).masked_fill(~visible[:, None], float("-inf"))
        if chosen is not None:
            far = far.masked_fill(~chosen.unsqueeze(2), float("-inf"))
        if far.shape[-1]:
            top = torch.maximum(top, far.amax(-1, keepdim=True))
    top = top.detach()
    near = torch.exp(near - top)
    total = near.sum(-1, keepdim=True) + torch.exp(sink.float()[:, None] - top)
    if far is None:
        return (near / total).to(dtype), None
    far = torch.exp(far - top)
    total = total + far.sum(-1, keepdim=True)
    return (near / total).to(dtype), (far / total).to(dtype)


class Attention(nn.Module):
    """One attention block; compress_ratio 0 (window only), 4 (CSA) or 128 (HCA)."""

    def __init__(self, c: TinyConfig, compress_ratio: int) -> None:
        super().__init__()
        self.c, self.ratio = c, compress_ratio
        heads_width = c.num_attention_heads * c.head_dim
        self.wq_a = nn.Linear(c.hidden_size, c.q_lora_rank, bias=False)
        self.q_norm = RMSNorm(c.q_lora_rank, c.rms_norm_eps)
        self.wq_b = nn.Linear(c.q_lora_rank, heads_width, bias=False)
        self.wkv = nn.Linear(c.hidden_size, c.head_dim, bias=False)
        self.kv_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
        self.wo_a = nn.Linear(heads_width // c.o_groups, c.o_groups * c.o_lora_rank, bias=False)
        self.wo_b = nn.Linear(c.o_groups * c.o_lora_rank, c.hidden_size, bias=False)
        self.attn_sink = nn.Parameter(torch.zeros(c.num_attention_heads))
        if compress_ratio:
            self.compressor = Compressor(c, compress_ratio, c.head_dim)
        if compress_ratio == 4:
            self.indexer = Indexer(c)

    def forward(self, x: Tensor, mode: Mode, marks: Marks | None = None) -> tuple[Tensor, Tensor]:
        """Output [B, T, D] for x [B, T, D], and the indexer's distillation loss (0 where there is none)."""
        c = self.c
        batch, time, _ = x.shape
        positions = torch.arange(time, device=x.device)
        theta = c.compress_rope_theta if self.ratio else c.rope_theta
        cos, sin = rotary_tables(positions, theta, c.qk_rope_head_dim)
        q_residual = self.q_norm(self.wq_a(x))
        q = self.wq_b(q_residual).view(batch, time, c.num_attention_heads, c.head_dim)
        q = normalise_and_rotate(q, cos[:, None], sin[:, None], c.rms_norm_eps)
        kv = rotate(self.kv_norm(self.wkv(x)), cos, sin)
        if mode.quantise_cache:
            kv = quantise_like_cache(kv, c.qk_rope_head_dim)
        entries, index = None, None
        if self.ratio == 4 or (self.ratio and mode.coarse):
            entries = self.compressor(x)
            if mode.quantise_cache:
                entries = quantise_like_cache(entries, c.qk_rope_head_dim)
        if self.ratio == 4 and (mode.distil or mode.selection == "indexer"):
            # The indexer learns by distillation alone: its inputs carry no gradient back into the model.
            index = self.indexer(x.detach(), q_residual.detach(), cos, sin)
        hidden = marks.no_coarse if marks is not None and self.ratio == 128 and entries is not None else None
        out, divergence = self._in_blocks(q, kv, entries, index, hidden, mode)
        loss = x.new_zeros((), dtype=torch.float32)
        if divergence is not None:
            sees_two = ((positions + 1) // self.ratio >= 2).expand(batch, time)
            loss = mean_over(sees_two, divergence)
            if marks is not None:
                loss = loss + ANSWER_KL_WEIGHT * mean_over(marks.answers & sees_two, divergence)
        out = rotate(out, cos[:, None], -sin[:, None])
        groups = out.reshape(batch, time, c.o_groups, -1)
        weights = self.wo_a.weight.view(c.o_groups, c.o_lora_rank, -1)
        low = torch.einsum("btgi,gri->btgr", groups, weights.to(groups.dtype))
        return self.wo_b(low.flatten(2)), loss

    def _in_blocks(
        self,
        q: Tensor,
        kv: Tensor,
        entries: Tensor | None,
        index: tuple[Tensor, Tensor, Tensor] | None,
        hidden: Tensor | None,
        mode: Mode,
    ) -> tuple[Tensor, Tensor | None]:
        """What `_rows` gives for all rows, computed mode.block_rows at a time."""
        window, time = self.c.sliding_window, q.shape[1]
        size = mode.block_rows or time
        padding = -time % window
        # Whole windows of keys, and one of zeros in front that no row attends to.
        kv = F.pad(kv, (0, 0, window, padding))
        outputs, losses = [], []
        for start in range(0, time, size):
            rows = slice(start, min(start + size, time))
            near = kv[:, start : start + window + -(-(rows.stop - start) // window) * window]
            queries = (index[0][:, rows], index[1][:, rows], index[2]) if index is not None else None
            arguments = (
                start,
                q[:, rows],
                near,
                entries,
                queries,
                hidden[:, rows] if hidden is not None else None,
                mode,
            )
            if size < time and torch.is_grad_enabled():
                out, loss = checkpoint(self._rows, *arguments, use_reentrant=False, preserve_rng_state=False)
            else:
                out, loss = self._rows(*arguments)
            outputs.append(out)
            losses.append(loss)
        divergence = torch.cat(losses, dim=1) if losses[0] is not None else None
        return torch.cat(outputs, dim=1), divergence

    def _rows(
        self,
        start: int,
        q: Tensor,
        kv: Tensor,
        entries: Tensor | None,
        index: tuple[Tensor, Tensor, Tensor] | None,
        hidden: Tensor | None,
        mode: Mode,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of the rows from `start` on, q [B, R, H, d]: output [B, R, H, d] and divergences [B, R] or None.

        kv [B, window + R in whole windows, d]: their own keys and the window before. entries [B, C, d] of the whole text.
        index: queries and weights of the rows, keys of the whole text. hidden [B, R]: rows that attend to no entry.
        """
        visible, chosen, scores = None, None, None
        if entries is not None:
            positions = start + torch.arange(q.shape[1], device=q.device)
            visible = torch.arange(entries.shape[1], device=q.device) < ((positions + 1) // self.ratio)[:, None]
            if hidden is not None:
                chosen = ~hidden.unsqueeze(-1)
            if index is not None:
                scores = index_scores(*index)
            if self.ratio == 4 and mode.selection != "dense":
                shape = (q.shape[0], *visible.shape)
                wanted = scores if mode.selection == "indexer" else torch.rand(shape, device=q.device)
                chosen = choose(wanted, visible, self.c.index_topk)
        distil = mode.distil and scores is not None
        out, target = self._attend(start, q, kv, entries, visible, chosen, want_target=distil)
        return out, divergences(target, scores, visible) if distil else None

    def _attend(
        self,
        start: int,
        q: Tensor,
        kv: Tensor,
        entries: Tensor | None,
        visible: Tensor | None,
        chosen: Tensor | None,
        want_target: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Joint softmax over the window, the compressed entries and the sink, for `_rows`.

        visible [R, C], chosen [B, R, C or 1] or None (all visible). Returns the output [B, R, H, d] and, if wanted, the
        attention mass on each visible entry, summed over heads, without gradient and as if nothing had been left out:
        float32 [B, R, C].
        """
        window = self.c.sliding_window
        batch, rows, heads, width = q.shape
        padding = -rows % window
        padded = rows + padding
        blocks = kv.unflatten(1, (-1, window))
        keys = torch.cat((blocks[:, :-1], blocks[:, 1:]), dim=2)
        near = torch.matmul(F.pad(q, (0, 0, 0, 0, 0, padding)).reshape(batch, -1, window * heads, width), keys.mT)
        near = near.reshape(batch, padded, heads, 2 * window)[:, :rows]
        far = None
        if entries is not None:
            far = torch.matmul(q.reshape(batch, rows * heads, width), entries.mT).view(batch, rows, heads, -1)
        in_window = self._window_mask(start, rows, q.device)
        target = None
        if want_target:
            with torch.no_grad():
                target = (
                    joint_softmax(near, far, self.attn_sink, in_window, visible, None, width**-0.5)[1].float().sum(2)
                )
        near, far = joint_softmax(near, far, self.attn_sink, in_window, visible, chosen, width**-0.5)
        near = F.pad(near, (0, 0, 0, 0, 0, padding))
        out = torch.matmul(near.reshape(batch, -1, window * heads, 2 * window), keys)
        out = out.reshape(batch, padded, heads, width)[:, :rows]
        if entries is not None:
            out = out + torch.matmul(far.view(batch, rows * heads, -1), entries).view(batch, rows, heads, width)
        return out, target

    def _window_mask(self, start: int, rows: int, device: torch.device) -> Tensor:
        """[rows, 2 * window]: column c of row r of the text, in block b = r // window, is key (b - 1) * window + c."""
        window = self.c.sliding_window
        row = start + torch.arange(rows, device=device)[:, None]
        key = (row // window - 1) * window + torch.arange(2 * window, device=device)
        return (key >= 0) & (key <= row) & (key > row - window)
