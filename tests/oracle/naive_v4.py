"""DeepSeek-V4 as a page of mathematics: one dense, unpaged float64 pass over a whole sequence, for tests only.

Written from the design's formulas, apart from src/thalweg's operations, and for what transformers lacks: the values of
quantised caches, the Hadamard rotation of the indexer, MTP. Weights come by canonical (DeepSeek's) names; T tokens, D
hidden size, n streams, H heads, d = head_dim. Checked against transformers where both exist.
"""

import math
from dataclasses import dataclass, field

import torch

from tests.oracle.naive_quant import bf16, hadamard, index_row, v4_row
from thalweg.models.config import DeepseekV4Config


@dataclass(frozen=True)
class Switches:
    """quantised: values pass through the `v4` and `index_fp8` formats. Only a test of misuse rotates one side alone."""

    quantised: bool = False
    hadamard_q: bool = False
    hadamard_k: bool = False


@dataclass
class NaiveV4:
    config: DeepseekV4Config
    weights: dict[str, torch.Tensor]
    """by canonical name; floating ones are held in float64"""
    switches: Switches = Switches()
    selected: dict[str, list[list[int]]] = field(default_factory=dict)
    """after a pass: CSA layer's prefix -> per token, the entries that its indexer chose, best first"""

    def __post_init__(self) -> None:
        self.weights = {name: t.double() if t.is_floating_point() else t for name, t in self.weights.items()}

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The residual streams [T, n, D] after the last layer, of tokens int64 [T]."""
        streams = self.weights["embed.weight"][tokens].unsqueeze(1).expand(-1, self.config.hc_mult, -1)
        for layer, ratio in enumerate(self.config.compress_ratios):
            streams = self.block(streams, tokens, f"layers.{layer}.", ratio)
        return streams

    def logits(self, streams: torch.Tensor) -> torch.Tensor:
        """[T, vocabulary]"""
        return self.norm(self.hc_head(streams, ""), "norm.weight") @ self.weights["head.weight"].T

    def mtp_logits(self, streams: torch.Tensor, next_tokens: torch.Tensor, depth: int = 0) -> torch.Tensor:
        """[T, vocabulary]: row t, at position t, from the streams of token t and the token after it."""
        prefix = f"mtp.{depth}."
        token = self.norm(self.weights["embed.weight"][next_tokens], f"{prefix}enorm.weight")
        before = self.norm(streams, f"{prefix}hnorm.weight")
        streams = self.linear(token, f"{prefix}e_proj").unsqueeze(1) + self.linear(before, f"{prefix}h_proj")
        streams = self.block(streams, next_tokens, prefix, ratio=0)
        return self.norm(self.hc_head(streams, prefix), f"{prefix}norm.weight") @ self.weights["head.weight"].T

    # ---- small pieces

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ self.weights[f"{name}.weight"].T

    def rms(self, x: torch.Tensor) -> torch.Tensor:
        return x / torch.sqrt(x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return self.rms(x) * self.weights[name]

    def rope(self, x: torch.Tensor, positions: torch.Tensor, compressed: bool, sign: int = 1) -> torch.Tensor:
        """Rotates the last rope_head_dim of x [T, ..., d] by sign * position: pair i holds elements 2i and 2i + 1."""
        # Frequencies and angles are float32 numbers by convention; everything else here is float64.
        angles = positions.float().unsqueeze(-1) * self.inverse_frequencies(compressed).float()
        angles = angles.view(len(positions), *[1] * (x.dim() - 2), -1)
        cos, sin = angles.cos().double(), sign * angles.sin().double()
        keep, turn = x[..., : -self.config.rope_head_dim], x[..., -self.config.rope_head_dim :]
        even, odd = turn[..., 0::2], turn[..., 1::2]
        turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)
        return torch.cat([keep, turned], dim=-1)

    def inverse_frequencies(self, compressed: bool) -> torch.Tensor:
        """Plain on window and MTP layers; another base, and YaRN where configured, on compressed layers."""
        dim, yarn = self.config.rope_head_dim, self.config.rope_scaling
        base = self.config.compress_rope_theta if compressed else self.config.rope_theta
        pair = torch.arange(dim // 2, dtype=torch.float64)
        plain = base ** (-2 * pair / dim)
        if not compressed or yarn is None:
            return plain

        def pair_that_turns(times: float) -> float:
            """The (fractional) pair that makes so many turns within the original context."""
            return dim * math.log(yarn.original_max_position_embeddings / (2 * math.pi * times)) / (2 * math.log(base))

        low = max(math.floor(pair_that_turns(yarn.beta_fast)), 0)
        high = min(math.ceil(pair_that_turns(yarn.beta_slow)), dim - 1)
        stretched = ((pair - low) / max(high - low, 0.001)).clamp(0, 1)
        return plain * (1 - stretched) + plain / yarn.factor * stretched

    def cached(self, rows: torch.Tensor, part: str) -> torch.Tensor:
        """What a reader gets back of `rows`: part names a layer's `window`, `compressed` entries or `index_keys`."""
        if not self.switches.quantised:
            return rows
        if part.endswith("window"):
            return v4_row(rows, self.config.rope_head_dim)
        # All that a compressor makes is rounded to bf16 before its amax is taken.
        return index_row(bf16(rows)) if part.endswith("index_keys") else v4_row(bf16(rows), self.config.rope_head_dim)

    # ---- hyper-connections

    def hc_mix(self, streams: torch.Tensor, name: str) -> torch.Tensor:
        flat = streams.flatten(1)
        return self.rms(flat) @ self.weights[f"{name}_fn"].T

    def hc_pre(self, streams: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The block's input [T, D], post [T, n] and the doubly stochastic C [T, n, n]."""
        n, eps = self.config.hc_mult, self.config.hc_eps
        m, (s0, s1, s2) = self.hc_mix(streams, name), self.weights[f"{name}_scale"]
        base = self.weights[f"{name}_base"]
        pre = torch.sigmoid(s0 * m[:, :n] + base[:n]) + eps
        post = 2 * torch.sigmoid(s1 * m[:, n : 2 * n] + base[n : 2 * n])
        c = torch.softmax((s2 * m[:, 2 * n :] + base[2 * n :]).view(-1, n, n), dim=2) + eps
        c = c / (c.sum(1, keepdim=True) + eps)
        for _ in range(self.config.hc_sinkhorn_iters - 1):
            c = c / (c.sum(2, keepdim=True) + eps)
            c = c / (c.sum(1, keepdim=True) + eps)
        return torch.einsum("ti,tid->td", pre, streams), post, c

    def hc_post(self, y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        """X'_j = post_j y + sum_i C_ij X_i"""
        return torch.einsum("tj,td->tjd", post, y) + torch.einsum("tij,tid->tjd", c, streams)

    def hc_head(self, streams: torch.Tensor, prefix: str) -> torch.Tensor:
        name = f"{prefix}hc_head"
        mix = self.hc_mix(streams, name) * self.weights[f"{name}_scale"] + self.weights[f"{name}_base"]
        return torch.einsum("ti,tid->td", torch.sigmoid(mix) + self.config.hc_eps, streams)

    def block(self, streams: torch.Tensor, tokens: torch.Tensor, prefix: str, ratio: int) -> torch.Tensor:
        x, post, c = self.hc_pre(streams, f"{prefix}hc_attn")
        y = self.attention(self.norm(x, f"{prefix}attn_norm.weight"), f"{prefix}attn.", ratio)
        streams = self.hc_post(y, streams, post, c)
        x, post, c = self.hc_pre(streams, f"{prefix}hc_ffn")
        y = self.moe(self.norm(x, f"{prefix}ffn_norm.weight"), tokens, f"{prefix}ffn.")
        return self.hc_post(y, streams, post, c)

    # ---- attention

    def attention(self, x: torch.Tensor, prefix: str, ratio: int) -> torch.Tensor:
        config = self.config
        length, head_dim, compressed = len(x), config.head_dim, ratio > 0
        positions = torch.arange(length)
        q_residual = self.norm(self.linear(x, f"{prefix}wq_a"), f"{prefix}q_norm.weight")
        q = self.rms(self.linear(q_residual, f"{prefix}wq_b").view(length, -1, head_dim))
        q = self.rope(q, positions, compressed)
        window = self.rope(self.norm(self.linear(x, f"{prefix}wkv"), f"{prefix}kv_norm.weight"), positions, compressed)
        window = self.cached(window, f"{prefix}window")
        entries = window[:0]
        if compressed:
            entries = self.cached(self.compress(x, f"{prefix}compressor.", ratio, head_dim), f"{prefix}compressed")
        if ratio == 4:
            chosen = self.choose(self.index_scores(x, q_residual, f"{prefix}indexer."))
            self.selected[prefix] = chosen
        elif ratio == 128:
            chosen = [list(range((t + 1) // 128)) for t in range(length)]
        else:
            chosen = [[] for _ in range(length)]
        sink = self.weights[f"{prefix}attn_sink"]
        heads = []
        for t in range(length):
            rows = torch.cat([window[max(0, t + 1 - config.sliding_window) : t + 1], entries[chosen[t]]])
            scores = q[t] @ rows.T / math.sqrt(head_dim)
            shares = torch.softmax(torch.cat([scores, sink.unsqueeze(1)], dim=1), dim=1)[:, :-1]
            heads.append(shares @ rows)
        out = self.rope(torch.stack(heads), positions, compressed, sign=-1)
        grouped = out.view(length, config.o_groups, -1)
        wo_a = self.weights[f"{prefix}wo_a.weight"].view(config.o_groups, config.o_lora_rank, -1)
        return self.linear(torch.einsum("tgi,gri->tgr", grouped, wo_a).flatten(1), f"{prefix}wo_b")

    def compress(self, x: torch.Tensor, prefix: str, ratio: int, head_dim: int) -> torch.Tensor:
        """Entries [T // ratio, head_dim], normalised and rotated, not yet quantised."""
        kv = self.linear(x, f"{prefix}wkv")
        z = self.linear(x, f"{prefix}wgate") + self.weights[f"{prefix}ape"][torch.arange(len(x)) % ratio]
        pooled = []
        for w in range(len(x) // ratio):
            own = slice(ratio * w, ratio * (w + 1))
            values, logits = kv[own], z[own]
            if ratio == 4:  # the second half of the channels is for the own window, the first for the next entry
                values, logits = values[:, head_dim:], logits[:, head_dim:]
                if w > 0:
                    before = slice(ratio * (w - 1), ratio * w)
                    values = torch.cat([kv[before, :head_dim], values])
                    logits = torch.cat([z[before, :head_dim], logits])
            pooled.append((torch.softmax(logits, dim=0) * values).sum(0))
        entries = torch.stack(pooled) if pooled else kv.new_zeros(0, head_dim)
        return self.rope(self.norm(entries, f"{prefix}norm.weight"), ratio * torch.arange(len(entries)), True)

    def index_scores(self, x: torch.Tensor, q_residual: torch.Tensor, prefix: str) -> torch.Tensor:
        """[T, T // 4], of visible and invisible entries alike."""
        config, switches = self.config, self.switches
        q = self.linear(q_residual, f"{prefix}wq_b").view(len(x), config.index_num_heads, config.index_head_dim)
        q = self.rope(q, torch.arange(len(x)), True)
        keys = self.compress(x, f"{prefix}compressor.", 4, config.index_head_dim)
        q = hadamard(q) if switches.hadamard_q else q
        keys = hadamard(keys) if switches.hadamard_k else keys
        q = index_row(q) if switches.quantised else q
        keys = self.cached(keys, f"{prefix}index_keys")
        omega = self.linear(x, f"{prefix}weights_proj") * config.index_head_dim**-0.5 * config.index_num_heads**-0.5
        return torch.einsum("th,thw->tw", omega, torch.relu(torch.einsum("thd,wd->thw", q, keys)))

    def choose(self, scores: torch.Tensor) -> list[list[int]]:
        """Per token, the highest of the visible entries, the lower index first among equals."""
        ranked = [torch.sort(row[: (t + 1) // 4], descending=True, stable=True).indices for t, row in enumerate(scores)]
        return [order[: self.config.index_topk].tolist() for order in ranked]

    # ---- experts

    def moe(self, x: torch.Tensor, tokens: torch.Tensor, prefix: str) -> torch.Tensor:
        p = torch.sqrt(torch.nn.functional.softplus(self.linear(x, f"{prefix}gate")))
        table = self.weights.get(f"{prefix}gate.tid2eid")
        rows = []
        for t in range(len(x)):
            if table is not None:
                experts = table[tokens[t]]
            else:
                experts = torch.topk(
                    p[t] + self.weights[f"{prefix}gate.bias"], self.config.num_experts_per_token
                ).indices
            share = p[t, experts] / p[t, experts].sum() * self.config.routed_scaling_factor
            routed = [
                w * self.swiglu(x[t], f"{prefix}experts.{e}") for w, e in zip(share, experts.tolist(), strict=True)
            ]
            rows.append(sum(routed) + self.swiglu(x[t], f"{prefix}shared_experts"))
        return torch.stack(rows)

    def swiglu(self, x: torch.Tensor, name: str) -> torch.Tensor:
        gate, up, limit = self.linear(x, f"{name}.w1"), self.linear(x, f"{name}.w3"), self.config.swiglu_limit
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return self.linear(torch.nn.functional.silu(gate) * up, f"{name}.w2")
