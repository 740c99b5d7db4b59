"""Dense differentiable attention of DeepSeek-V4: window, compressed entries, sink, and the indexer's distillation.

The window is computed in blocks of `sliding_window` queries against their own and the previous block, the compressed
entries as [time, entries] with masks: nothing of size time x time is made.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
    distil: also compute the indexer's distillation loss.
    """

    selection: Literal["dense", "indexer", "random"] = "indexer"
    quantise_cache: bool = False
    distil: bool = False


@Fusible
def combine_index_heads(products: Tensor, weights: Tensor) -> Tensor:
    """sum_h weights_h relu(products_h): [B, T, H, C], [B, T, H] -> float32 [B, T, C]."""
    return (F.relu(products).float() * weights.unsqueeze(-1)).sum(2)


class Indexer(nn.Module):
    """Scores every compressed entry for every query: [B, T, D], [B, T, q rank] -> float32 [B, T, T // 4]."""

    def __init__(self, c: TinyConfig) -> None:
        super().__init__()
        self.c = c
        self.wq_b = nn.Linear(c.q_lora_rank, c.index_n_heads * c.index_head_dim, bias=False)
        self.weights_proj = nn.Linear(c.hidden_size, c.index_n_heads, bias=False)
        self.compressor = Compressor(c, 4, c.index_head_dim)

    def forward(self, x: Tensor, q_residual: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, time, _ = x.shape
        heads, width = self.c.index_n_heads, self.c.index_head_dim
        keys = self.compressor(x)
        queries = rotate(self.wq_b(q_residual).view(batch, time, heads, width), cos[:, None], sin[:, None])
        products = torch.matmul(queries.reshape(batch, time * heads, width), keys.transpose(1, 2))
        weights = self.weights_proj(x).float() * (heads**-0.5 * width**-0.5)
        return combine_index_heads(products.view(batch, time, heads, -1), weights)


def choose(scores: Tensor, visible: Tensor, count: int) -> Tensor:
    """A mask [B, T, C] of the `count` highest scores among the visible entries (all, where fewer are visible)."""
    scores = scores.detach().masked_fill(~visible, NEGATIVE)
    best = scores.topk(min(count, scores.shape[-1]), dim=-1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True) & visible


def distillation_loss(target: Tensor, scores: Tensor, visible: Tensor) -> Tensor:
    """Mean KL(target || softmax(scores)) in nats over the rows that see at least two entries.

    target: detached attention mass per visible entry [B, T, C], not normalised. scores: [B, T, C]. visible: [T, C].
    """
    target = target / target.sum(-1, keepdim=True).clamp_min(1e-9)
    log_chosen = torch.log_softmax(scores.masked_fill(~visible, NEGATIVE), dim=-1)
    divergence = (target * (target.clamp_min(1e-9).log() - log_chosen)).masked_fill(~visible, 0.0).sum(-1)
    rows = (visible.sum(-1) >= 2).float()
    return (divergence * rows).sum() / (rows.sum() * scores.shape[0]).clamp_min(1.0)


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

    def forward(self, x: Tensor, mode: Mode) -> tuple[Tensor, Tensor]:
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

        loss = x.new_zeros((), dtype=torch.float32)
        if self.ratio == 0:
            out, _ = self._attend(q, kv, None, None, None)
        else:
            entries = self.compressor(x)
            if mode.quantise_cache:
                entries = quantise_like_cache(entries, c.qk_rope_head_dim)
            visible = torch.arange(entries.shape[1], device=x.device) < ((positions + 1) // self.ratio)[:, None]
            chosen, scores = None, None
            if self.ratio == 4 and (mode.distil or mode.selection == "indexer"):
                # The indexer learns by distillation alone: its inputs carry no gradient back into the model.
                scores = self.indexer(x.detach(), q_residual.detach(), cos, sin)
            if self.ratio == 4 and mode.selection != "dense":
                wanted = scores if mode.selection == "indexer" else torch.rand(batch, *visible.shape, device=x.device)
                chosen = choose(wanted, visible, c.index_topk)
            out, target = self._attend(q, kv, entries, visible, chosen, want_target=mode.distil and scores is not None)
            if target is not None:
                loss = distillation_loss(target, scores, visible)
        out = rotate(out, cos[:, None], -sin[:, None])
        groups = out.reshape(batch, time, c.o_groups, -1)
        weights = self.wo_a.weight.view(c.o_groups, c.o_lora_rank, -1)
        low = torch.einsum("btgi,gri->btgr", groups, weights.to(groups.dtype))
        return self.wo_b(low.flatten(2)), loss

    def _attend(
        self,
        q: Tensor,
        kv: Tensor,
        entries: Tensor | None,
        visible: Tensor | None,
        chosen: Tensor | None,
        want_target: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Joint softmax over the window, the compressed entries and the sink.

        q [B, T, H, d], kv [B, T, d], entries [B, C, d], visible [T, C], chosen [B, T, C] or None (all visible).
        Returns the output [B, T, H, d] and, if wanted, the attention mass on each visible entry, summed over heads,
        without gradient and as if nothing had been left out: float32 [B, T, C].
        """
        window = self.c.sliding_window
        batch, time, heads, width = q.shape
        padding = -time % window
        if padding:  # whole blocks; the extra rows are cut off below
            q, kv = F.pad(q, (0, 0, 0, 0, 0, padding)), F.pad(kv, (0, 0, 0, padding))
        padded = time + padding
        blocks = kv.view(batch, padded // window, window, width)
        keys = torch.cat((F.pad(blocks[:, :-1], (0, 0, 0, 0, 1, 0)), blocks), dim=2)
        near = torch.matmul(q.reshape(batch, -1, window * heads, width), keys.transpose(-1, -2))
        near = near.reshape(batch, padded, heads, 2 * window)[:, :time]
        far = None
        if entries is not None:
            far = torch.matmul(q[:, :time].reshape(batch, time * heads, width), entries.transpose(-1, -2))
            far = far.view(batch, time, heads, -1)
        in_window = self._window_mask(padded, q.device)[:time]
        target = None
        if want_target:
            with torch.no_grad():
                target = (
                    joint_softmax(near, far, self.attn_sink, in_window, visible, None, width**-0.5)[1].float().sum(2)
                )
        near, far = joint_softmax(near, far, self.attn_sink, in_window, visible, chosen, width**-0.5)
        near = F.pad(near, (0, 0, 0, 0, 0, padding))
        out = torch.matmul(near.reshape(batch, -1, window * heads, 2 * window), keys)
        out = out.reshape(batch, padded, heads, width)[:, :time]
        if entries is not None:
            out = out + torch.matmul(far.view(batch, time * heads, -1), entries).view(batch, time, heads, width)
        return out, target

    def _window_mask(self, time: int, device: torch.device) -> Tensor:
        """[time, 2 * window]: column c of a row in block b is key (b - 1) * window + c."""
        window = self.c.sliding_window
        row = torch.arange(time, device=device)[:, None]
        key = (row // window - 1) * window + torch.arange(2 * window, device=device)
        return (key >= 0) & (key <= row) & (key > row - window)
