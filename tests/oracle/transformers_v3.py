"""Random small DeepSeek-V3 models of the transformers library, and the same checkpoint opened by thalweg."""

from pathlib import Path

import torch
import transformers

from thalweg.models.batch import RowBatch
from thalweg.models.config import MlaConfig, read_config
from thalweg.models.interface import PoolSizes
from thalweg.models.linear import Weights
from thalweg.models.mla.model import MlaModel
from thalweg.models.weights.checkpoint import load_weights


def random_oracle(seed: int, **changes: object) -> transformers.DeepseekV3ForCausalLM:
    """A float32 model that keeps the real latent geometry (512 + 64), with one dense layer and two of experts."""
    torch.manual_seed(seed)
    values: dict[str, object] = {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 48,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 48,
        "qk_rope_head_dim": 64,
        "v_head_dim": 32,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "rms_norm_eps": 1e-5,  # not the default that the latents' norms keep
        "max_position_embeddings": 16384,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    values.update(changes)
    config = transformers.DeepseekV3Config(**values)
    config._attn_implementation = "eager"
    model = transformers.DeepseekV3ForCausalLM(config).float().eval()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        _fill(name, tensor.data)
    return model


def _fill(name: str, tensor: torch.Tensor) -> None:
    """Values large enough that every part matters: initialisation leaves many at zero or one."""
    if "inv_freq" in name:
        return
    if "norm" in name:
        tensor.uniform_(0.5, 1.5)
    elif name.endswith(("e_score_correction_bias", ".bias")):
        tensor.normal_(0, 0.3)
    else:
        tensor.normal_(0, tensor.shape[-1] ** -0.5)


def open_with_thalweg(
    oracle: transformers.DeepseekV3ForCausalLM, folder: Path, *, batch_invariant: bool = True
) -> MlaModel:
    """Saved by transformers, opened through thalweg's own door."""
    oracle.save_pretrained(folder)
    config = read_config(folder)
    assert isinstance(config, MlaConfig)
    return MlaModel(config, Weights(load_weights(folder, config), torch.float32, batch_invariant))


class PagedRun:
    """Several requests over one set of caches, with page ids shuffled so that the table is really used."""

    def __init__(self, model: MlaModel, requests: int, tokens: int, kv_layout: str = "exact") -> None:
        width = -(-tokens // 256)
        self.model = model
        self.caches = model.allocate(PoolSizes(1 + requests * width, 0, 0), kv_layout)
        for cache in self.caches:
            cache.fill_(float("nan"))  # nothing unwritten may be read
        shuffled = torch.randperm(requests * width, generator=torch.Generator().manual_seed(0))
        self.page_table = 1 + shuffled.view(requests, width)
        self.lengths = [0] * requests

    def step(self, chunks: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Feeds each request of `chunks` its next tokens; logits [len(chunk), vocabulary] of every row by request."""
        parts = [(request, tokens, self.lengths[request]) for request, tokens in chunks.items()]
        batch = RowBatch(
            tokens=torch.cat([tokens for _, tokens, _ in parts]),
            positions=torch.cat([torch.arange(start, start + len(tokens)) for _, tokens, start in parts]),
            row_to_request=torch.cat([torch.full((len(tokens),), request) for request, tokens, _ in parts]),
            page_table=self.page_table,
            window_table=torch.full_like(self.page_table, -1),
            state_slots=torch.zeros(len(self.lengths), dtype=torch.int64),
        )
        logits = self.model.logits(self.model.forward(batch, self.caches))
        for request, tokens, _ in parts:
            self.lengths[request] += len(tokens)
        sizes = [len(tokens) for _, tokens, _ in parts]
        return dict(zip(chunks, logits.split(sizes), strict=True))

    def feed(self, request: int, tokens: torch.Tensor, chunk: int) -> torch.Tensor:
        """Logits of every token of one request, fed `chunk` at a time."""
        return torch.cat([self.step({request: part})[request] for part in tokens.split(chunk)])
