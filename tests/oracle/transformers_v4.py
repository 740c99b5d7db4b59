"""Random small DeepSeek-V4 models of the transformers library, and the same checkpoint opened by thalweg."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from thalweg.models.batch import RowBatch
from thalweg.models.config import DeepseekV4Config, read_config
from thalweg.models.deepseek_v4.caches import LayerCaches
from thalweg.models.deepseek_v4.model import DeepseekV4Model
from thalweg.models.interface import PoolSizes
from thalweg.models.linear import Weights
from thalweg.models.weights.checkpoint import load_weights

VOCABULARY = 96
RATIOS = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}


def yarn(factor: float, original: int) -> dict[str, Any]:
    """`rope_parameters` that stretch the compressed layers' frequencies and leave the window layers plain."""
    common = {"partial_rotary_factor": 0.125}
    stretched = {
        "rope_type": "yarn",
        "rope_theta": 160000.0,
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "attention_factor": 1.0,
    }
    return {"main": {"rope_type": "default", "rope_theta": 10000.0} | common, "compress": stretched | common}


# name -> (layers' ratios, what differs from the small model of `random_oracle`)
VARIANTS: dict[str, tuple[list[int], dict[str, Any]]] = {
    "one layer of each kind, top 16": ([0, 4, 128, 4], {"index_topk": 16}),
    "Flash's order, top 64, three hash layers, YaRN": (
        [0, 0, 4, 128, 4],
        {
            "index_topk": 64,
            "mlp_layer_types": ["hash_moe"] * 3 + ["moe"] * 2,
            "rope_parameters": yarn(16.0, 65536),
        },
    ),
    "Pro's order, no hash layer, 8 heads in 4 groups": (
        [128, 4, 128, 4],
        {
            "index_topk": 16,
            "mlp_layer_types": ["moe"] * 4,
            "num_attention_heads": 8,
            "o_groups": 4,
            "routed_scaling_factor": 2.5,
        },
    ),
    "CSA first, 3 heads in one group, 32 index heads, YaRN in mid-range": (
        [4, 0, 4],
        {
            "index_topk": 16,
            "index_n_heads": 32,
            "num_attention_heads": 3,
            "o_groups": 1,
            "rope_parameters": yarn(4.0, 256),
            "num_experts_per_tok": 1,
            "swiglu_limit": 0.5,
        },
    ),
}


def random_oracle(seed: int, ratios: list[int], **changes: object) -> transformers.DeepseekV4ForCausalLM:
    """A float32 model that keeps the real head geometry (latent 512, rope 64, index 128 with 16 heads) and is small else."""
    torch.manual_seed(seed)
    values: dict[str, object] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": len(ratios),
        "num_attention_heads": 4,
        "head_dim": 512,
        "q_lora_rank": 48,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "layer_types": [RATIOS[ratio] for ratio in ratios],
        "mlp_layer_types": ["hash_moe"] + ["moe"] * (len(ratios) - 1),
        "o_groups": 2,
        "o_lora_rank": 32,
        "index_n_heads": 16,
        "index_head_dim": 128,
        "index_topk": 512,
        "num_nextn_predict_layers": 0,
        "max_position_embeddings": 1048576,
    }
    values.update(changes)
    config = transformers.DeepseekV4Config(**values)
    config._attn_implementation = "eager"
    model = transformers.DeepseekV4ForCausalLM(config).float().eval()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        _fill(name, tensor.data, config)
    return model


def _fill(name: str, tensor: torch.Tensor, config: transformers.DeepseekV4Config) -> None:
    """Values large enough that every part matters: initialisation leaves many at zero or one."""
    if name.endswith("tid2eid"):
        rows = [torch.randperm(config.n_routed_experts)[: tensor.shape[1]] for _ in range(tensor.shape[0])]
        tensor.copy_(torch.stack(rows))
    elif "inv_freq" in name:
        return
    elif "norm" in name:
        tensor.uniform_(0.5, 1.5)
    elif name.endswith(("sinks", "e_score_correction_bias", "base", "hc_base", "position_bias")):
        tensor.normal_(0, 0.5)
    elif name.endswith(("hc.scale", "hc_scale")):
        tensor.uniform_(0.5, 1.5)
    elif tensor.is_floating_point():
        tensor.normal_(0, tensor.shape[-1] ** -0.5)


def open_with_thalweg(
    oracle: transformers.DeepseekV4ForCausalLM, folder: Path, *, hadamard: bool = False
) -> tuple[DeepseekV4Config, DeepseekV4Model]:
    """Saved by transformers, opened through thalweg's own door."""
    oracle.config.index_hadamard = hadamard  # transformers has no Hadamard rotation
    oracle.save_pretrained(folder)
    config = read_config(folder)
    assert isinstance(config, DeepseekV4Config)
    tensors = load_weights(folder, config, dtype=torch.float64)
    return config, DeepseekV4Model(config, Weights(tensors, torch.float32, batch_invariant=True))


def random_tokens(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Reference:
    """What transformers computes of one sequence: logits [T, vocabulary], and the indexer's scores [T, entries] by layer."""

    logits: torch.Tensor
    index_scores: dict[int, torch.Tensor]

    def near_ties(self, topk: int, below: float) -> list[tuple[int, int, float]]:
        """(layer, row, difference) where the last score to be chosen and the first not to be differ by less than `below`."""
        found = []
        for layer, scores in self.index_scores.items():
            for row in range(4 * topk + 3, len(scores)):  # the first that sees more than topk
                best = scores[row, : (row + 1) // 4].topk(topk + 1).values
                difference = float(best[-2] - best[-1])
                if difference < below:
                    found.append((layer, row, difference))
        return found


def reference(oracle: transformers.DeepseekV4ForCausalLM, tokens: torch.Tensor) -> Reference:
    scores: dict[int, torch.Tensor] = {}
    hooks = [
        layer.self_attn.compressor.indexer.scorer.register_forward_hook(
            lambda module, inputs, output, number=number: scores.__setitem__(number, output[0])
        )
        for number, layer in enumerate(oracle.model.layers)
        if oracle.config.layer_types[number] == RATIOS[4]
    ]
    with torch.no_grad():
        logits = oracle(tokens.unsqueeze(0)).logits[0]
    for hook in hooks:
        hook.remove()
    return Reference(logits, scores)


class PagedRun:
    """Several requests over one set of caches, with page ids shuffled so that the tables are really used."""

    def __init__(self, model: DeepseekV4Model, requests: int, tokens: int, kv_layout: str, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        width = -(-tokens // 256)
        pool = PoolSizes(pages=1 + requests * width, window_pages=1 + requests * width, state_slots=1 + requests)
        self.model = model
        self.caches: list[LayerCaches] = model.allocate(pool, kv_layout)
        for layer in self.caches:
            _poison(layer)
        shuffled = [1 + torch.randperm(requests * width, generator=generator).view(requests, width) for _ in range(2)]
        self.page_table, self.window_table = shuffled
        self.state_slots = 1 + torch.randperm(requests, generator=generator)
        self.lengths = [0] * requests

    def step(self, chunks: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Feeds each request of `chunks` its next tokens; logits [len(chunk), vocabulary] of every row by request."""
        batch = self.next_rows(chunks)
        logits = self.model.logits(self.model.forward(batch, self.caches))
        return dict(zip(chunks, logits.split([len(tokens) for tokens in chunks.values()]), strict=True))

    def next_rows(self, chunks: dict[int, torch.Tensor]) -> RowBatch:
        """The rows of one step, counted as fed."""
        parts = [(request, tokens, self.lengths[request]) for request, tokens in chunks.items()]
        for request, tokens, _ in parts:
            self.lengths[request] += len(tokens)
        return RowBatch(
            tokens=torch.cat([tokens for _, tokens, _ in parts]),
            positions=torch.cat([torch.arange(start, start + len(tokens)) for _, tokens, start in parts]),
            row_to_request=torch.cat([torch.full((len(tokens),), request) for request, tokens, _ in parts]),
            page_table=self.page_table,
            window_table=self.window_table,
            state_slots=self.state_slots,
        )

    def prefill(self, request: int, tokens: torch.Tensor, chunk: int) -> torch.Tensor:
        """Logits of every token of one request, fed `chunk` at a time."""
        return torch.cat([self.step({request: part})[request] for part in tokens.split(chunk)])


def _poison(layer: LayerCaches) -> None:
    """Nothing unwritten may be read: NaN everywhere (0xFF is the NaN code of e4m3, ue8m0, bf16 and float32)."""
    for tensor in (layer.window, layer.compressed, layer.index_keys):
        if tensor is not None:
            tensor.view(torch.uint8).fill_(0xFF)
    for state in (layer.compressed_state, layer.index_state):
        if state is not None:
            state.fill_(float("nan"))
