"""A checkpoint folder as a model that runs: the architecture comes from config.json, the weights under canonical names."""

from pathlib import Path

import torch

from thalweg.models.config import DeepseekV4Config, MlaConfig, read_config
from thalweg.models.deepseek_v4.model import DeepseekV4Model
from thalweg.models.interface import Model
from thalweg.models.linear import Weights
from thalweg.models.mla.model import MlaModel
from thalweg.models.weights.checkpoint import load_weights

TINY = Path(__file__).parent / "checkpoints" / "thalweg-tiny"
"""The bundled DeepSeek-V4 checkpoint."""


def open_model(
    path: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    batch_invariant: bool | None = None,
) -> Model:
    """The model of the checkpoint folder `path` on `device`, activations in `dtype` (float32 or bfloat16).

    batch_invariant: products accumulate in float64 (see `thalweg.models.linear`), weights then take 8 bytes each; None: in
    float32 on the CPU, not elsewhere. Raises
    UserError, one line, for a checkpoint that is missing, damaged, of another architecture or larger than memory.
    """
    if batch_invariant is None:
        batch_invariant = torch.device(device).type == "cpu" and dtype == torch.float32
    config = read_config(path)
    tensors = load_weights(path, config, dtype=torch.float64 if batch_invariant else dtype, device=device)
    weights = Weights(tensors, dtype, batch_invariant)
    if isinstance(config, MlaConfig):
        return MlaModel(config, weights)
    assert isinstance(config, DeepseekV4Config)
    return DeepseekV4Model(config, weights)
