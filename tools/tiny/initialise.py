"""Starting weights of the tiny model."""

import math

import torch
from torch import Tensor

from tools.tiny.dense_model import DenseModel

STREAM_IDENTITY = 4.0  # diagonal of the residual mixing logits: each stream starts by mostly keeping its own content


def hash_table(vocab_size: int, experts: int, per_token: int, seed: int = 7) -> Tensor:
    """A fixed assignment of distinct experts to every token id, int32 [vocab_size, per_token], evenly spread."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(experts, generator=generator)[:per_token] for _ in range(vocab_size)]
    return torch.stack(rows).to(torch.int32)


def initialise(model: DenseModel, seed: int) -> None:
    """Fills every parameter and the hash tables in place, the same way for the same seed."""
    c = model.c
    generator = torch.Generator().manual_seed(seed)

    def normal(parameter: Tensor, std: float) -> None:
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            leaf = name.rsplit(".", 2)[-2] if name.endswith(".weight") else name.rsplit(".", 1)[-1]
            if leaf == "embed":
                normal(parameter, 0.7)
            elif leaf == "head":
                normal(parameter, 0.5 / math.sqrt(c.hidden_size))
            elif leaf in ("wo_b", "w2"):  # what is added to the residual starts small
                normal(parameter, 0.4 / math.sqrt(parameter.shape[1]))
            elif leaf.startswith("hc_") and leaf.endswith("_fn"):
                normal(parameter, 0.2 / math.sqrt(parameter.shape[1]))
            elif leaf.startswith("hc_") and leaf.endswith("_base"):
                start_hyper_base(parameter, c.hc_mult, generator)
            elif parameter.dim() == 2 and leaf != "ape":
                normal(parameter, 1.0 / math.sqrt(parameter.shape[1]))
            elif leaf == "ape":
                normal(parameter, 0.02)
        for name, buffer in model.named_buffers():
            if name.endswith("tid2eid"):
                buffer.copy_(hash_table(c.vocab_size, c.n_routed_experts, c.num_experts_per_tok))


def start_hyper_base(base: Tensor, streams: int, generator: torch.Generator) -> None:
    """Different write weights per stream, so that the streams part; a mixing matrix near the identity."""
    base.copy_(0.5 * torch.randn(base.shape, generator=generator))
    if base.numel() > streams:
        mixing = STREAM_IDENTITY * torch.eye(streams).flatten()
        base[2 * streams :].copy_(mixing)
