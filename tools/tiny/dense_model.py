"""DeepSeek-V4 as a dense differentiable model, for training the tiny checkpoint.

Parameter names are DeepSeek's own, so `state_dict()` is a checkpoint. Mathematics: the project's design notes of the
DeepSeek-V4 technical report. Plain RoPE only; the paged model of the package is the one that serves.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.tiny.dense_attention import Attention, Marks, Mode
from tools.tiny.dense_parts import Fusible, RMSNorm, hyper_head, hyper_post, hyper_pre, without_autocast
from tools.tiny.tiny_config import TinyConfig


@Fusible
def weighted_swiglu(gate: Tensor, up: Tensor, weights: Tensor, limit: float) -> Tensor:
    """silu(gate) * up with both clipped, times each expert's weight: [N, E * inner] twice, weights [N, E]."""
    inner = F.silu(gate.float().clamp(max=limit)) * up.float().clamp(-limit, limit)
    return (inner.unflatten(-1, (weights.shape[-1], -1)) * weights.unsqueeze(-1)).flatten(-2).to(gate.dtype)


class Expert(nn.Module):
    """The three matrices of one SwiGLU expert."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(hidden, inner, bias=False)
        self.w2 = nn.Linear(inner, hidden, bias=False)
        self.w3 = nn.Linear(hidden, inner, bias=False)


class Gate(nn.Module):
    """Router scores; which experts run comes from the scores plus a bias, or from the token id (hash layers)."""

    def __init__(self, c: TinyConfig, hashed: bool) -> None:
        super().__init__()
        self.c, self.hashed = c, hashed
        self.weight = nn.Parameter(torch.empty(c.n_routed_experts, c.hidden_size))
        if hashed:
            table = torch.zeros(c.vocab_size, c.num_experts_per_tok, dtype=torch.int32)
            self.register_buffer("tid2eid", table)
        else:
            # Moved by the trainer towards an even load, never by a gradient.
            self.register_buffer("bias", torch.zeros(c.n_routed_experts))

    def forward(self, x: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Weights float32 [B, T, E], zero for experts that do not run, and the share of choices per expert [E]."""
        c = self.c
        with without_autocast(x):
            scores = torch.sqrt(F.softplus(F.linear(x.float(), self.weight.float())))
            if self.hashed:
                experts = self.tid2eid[tokens].long()
            else:
                experts = (scores.detach() + self.bias).topk(c.num_experts_per_tok, dim=-1).indices
            chosen = torch.zeros_like(scores).scatter_(-1, experts, 1.0)
            weights = scores * chosen
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * c.routed_scaling_factor
            return weights, chosen.mean((0, 1)) / c.num_experts_per_tok


class MoE(nn.Module):
    """All experts as one wide SwiGLU whose inner channels carry the router's weights: few experts, dense is fast."""

    def __init__(self, c: TinyConfig, hashed: bool) -> None:
        super().__init__()
        self.c = c
        self.gate = Gate(c, hashed)
        self.experts = nn.ModuleList(Expert(c.hidden_size, c.moe_intermediate_size) for _ in range(c.n_routed_experts))
        self.shared_experts = Expert(c.hidden_size, c.moe_intermediate_size)

    def forward(self, x: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Output [B, T, D] for x [B, T, D] and the share of choices per expert [E]."""
        limit = self.c.swiglu_limit
        weights, load = self.gate(x, tokens)
        experts = [*self.experts, self.shared_experts]
        gate = F.linear(x, torch.cat([e.w1.weight for e in experts]))
        up = F.linear(x, torch.cat([e.w3.weight for e in experts]))
        weights = F.pad(weights, (0, 1), value=1.0)
        inner = weighted_swiglu(gate.flatten(0, 1), up.flatten(0, 1), weights.flatten(0, 1), limit)
        return F.linear(inner.view(gate.shape), torch.cat([e.w2.weight for e in experts], dim=1)), load


class Block(nn.Module):
    """Attention and MoE, each between hyper-connections over the residual streams [B, T, n, D]."""

    def __init__(self, c: TinyConfig, compress_ratio: int, hashed: bool) -> None:
        super().__init__()
        self.c = c
        self.attn = Attention(c, compress_ratio)
        self.ffn = MoE(c, hashed)
        self.attn_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.ffn_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        rows = (2 + c.hc_mult) * c.hc_mult
        for site in ("attn", "ffn"):
            self.register_parameter(f"hc_{site}_fn", nn.Parameter(torch.empty(rows, c.hc_mult * c.hidden_size)))
            self.register_parameter(f"hc_{site}_base", nn.Parameter(torch.zeros(rows)))
            self.register_parameter(f"hc_{site}_scale", nn.Parameter(torch.ones(3)))

    def forward(
        self, streams: Tensor, tokens: Tensor, mode: Mode, marks: Marks | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """New streams, the indexer's loss, the share of choices per expert [E]."""
        c = self.c
        x, post, mix = hyper_pre(streams, self.hc_attn_fn, self.hc_attn_base, self.hc_attn_scale, c)
        y, index_loss = self.attn(self.attn_norm(x), mode, marks)
        streams = hyper_post(y, streams, post, mix)
        x, post, mix = hyper_pre(streams, self.hc_ffn_fn, self.hc_ffn_base, self.hc_ffn_scale, c)
        y, load = self.ffn(self.ffn_norm(x), tokens)
        return hyper_post(y, streams, post, mix), index_loss, load


class MTPBlock(Block):
    """One window-only block that, from the main model's streams and the next token, predicts the token after it."""

    def __init__(self, c: TinyConfig) -> None:
        super().__init__(c, compress_ratio=0, hashed=False)
        self.e_proj = nn.Linear(c.hidden_size, c.hidden_size, bias=False)
        self.h_proj = nn.Linear(c.hidden_size, c.hidden_size, bias=False)
        self.enorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.hnorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        add_hyper_head(self, c)

    def merge(self, streams: Tensor, next_embedding: Tensor) -> Tensor:
        """e_proj(RMS(embed(next))) + h_proj(RMS(X)), for each stream."""
        return (self.e_proj(self.enorm(next_embedding)).unsqueeze(2) + self.h_proj(self.hnorm(streams))).float()


def add_hyper_head(module: nn.Module, c: TinyConfig) -> None:
    """Registers hc_head_fn [n, n * D], hc_head_base [n] and hc_head_scale [1]."""
    module.hc_head_fn = nn.Parameter(torch.empty(c.hc_mult, c.hc_mult * c.hidden_size))
    module.hc_head_base = nn.Parameter(torch.zeros(c.hc_mult))
    module.hc_head_scale = nn.Parameter(torch.ones(1))


@dataclass(frozen=True)
class Output:
    """logits [B, T, V] for the next token; mtp_logits [B, T, V] for the one after it (None without next tokens);
    index_loss: summed distillation loss of the CSA layers; expert_loads: by scored layer's name, share per expert."""

    logits: Tensor
    mtp_logits: Tensor | None
    index_loss: Tensor
    expert_loads: dict[str, Tensor]


class DenseModel(nn.Module):
    """The whole model: tokens [B, T] -> Output."""

    def __init__(self, c: TinyConfig) -> None:
        super().__init__()
        self.c = c
        self.embed = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(
            Block(c, ratio, hashed=index < c.num_hash_layers) for index, ratio in enumerate(c.compress_ratios)
        )
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        add_hyper_head(self, c)
        self.mtp = nn.ModuleList(MTPBlock(c) for _ in range(c.num_nextn_predict_layers))

    def forward(
        self, tokens: Tensor, mode: Mode, next_tokens: Tensor | None = None, marks: Marks | None = None
    ) -> Output:
        """next_tokens [B, T], the tokens one place later, makes the MTP layer run as well."""
        streams = self.embed(tokens).float().unsqueeze(2).expand(-1, -1, self.c.hc_mult, -1).contiguous()
        index_loss = streams.new_zeros(())
        loads = {}
        for number, layer in enumerate(self.layers):
            streams, loss, load = layer(streams, tokens, mode, marks)
            index_loss = index_loss + loss
            if not layer.ffn.gate.hashed:
                loads[f"layers.{number}"] = load
        logits = self._logits(streams, self, self.norm)
        mtp_logits = None
        if next_tokens is not None and len(self.mtp):
            block = self.mtp[0]
            merged = block.merge(streams, self.embed(next_tokens))
            merged, _, loads["mtp.0"] = block(merged, next_tokens, mode)
            mtp_logits = self._logits(merged, block, block.norm)
        return Output(logits, mtp_logits, index_loss, loads)

    def _logits(self, streams: Tensor, owner: nn.Module, norm: RMSNorm) -> Tensor:
        return self.head(norm(hyper_head(streams, owner.hc_head_fn, owner.hc_head_base, owner.hc_head_scale, self.c)))
