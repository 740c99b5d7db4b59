"""Files of a training run: the model as a checkpoint, and the state from which training goes on."""

import json
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tools.tiny.dense_model import DenseModel
from tools.tiny.make_tokenizer import TOKENIZER_PATH
from tools.tiny.optimiser import Optimiser
from tools.tiny.tiny_config import TinyConfig

SHARD_BYTES = 15 * 2**20
# Few and small, and added to sums of large terms: these stay float32. Everything else is stored as bfloat16.
FLOAT32_ENDINGS = (".attn_sink", "_base", "_scale", "gate.bias")


def checkpoint_tensors(model: DenseModel) -> dict[str, Tensor]:
    """The state dict as it is stored: bfloat16 but for FLOAT32_ENDINGS and the integer hash tables."""
    out = {}
    for name, tensor in model.state_dict().items():
        keep = not tensor.is_floating_point() or name.endswith(FLOAT32_ENDINGS)
        out[name] = (tensor if keep else tensor.to(torch.bfloat16)).contiguous().cpu()
    return out


def save_model(model: DenseModel, config: dict, folder: Path) -> None:
    """Writes model.safetensors, config.json and tokenizer.json."""
    folder.mkdir(parents=True, exist_ok=True)
    write(checkpoint_tensors(model), folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    shutil.copyfile(TOKENIZER_PATH, folder / "tokenizer.json")


def load_model(folder: Path, device: torch.device) -> DenseModel:
    """The model of a folder that `save_model` wrote, weights widened to float32."""
    model = DenseModel(TinyConfig.from_file(folder / "config.json"))
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model.float().to(device).eval()


def write(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Writes a file whole or not at all: an interrupted run leaves the previous one."""
    partial = path.with_suffix(".partial")
    save_file(tensors, partial, metadata=metadata)
    partial.rename(path)


def save_state(model: DenseModel, optimiser: Optimiser, progress: dict, folder: Path) -> None:
    """Writes float32 weights, moments and progress as state-N.safetensors of at most SHARD_BYTES each."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    tensors |= optimiser.state()
    shards: list[dict[str, Tensor]] = [{}]
    used = 0
    for name, tensor in tensors.items():
        tensor = tensor.detach().contiguous().cpu()
        size = tensor.numel() * tensor.element_size() + 256  # with its line in the header
        if used + size > SHARD_BYTES:
            shards.append({})
            used = 0
        shards[-1][name] = tensor
        used += size
    for number, shard in enumerate(shards):
        write(shard, folder / f"state-{number}.safetensors", {"progress": json.dumps(progress)})


def load_state(model: DenseModel, optimiser: Optimiser, folder: Path) -> dict:
    """Fills model and optimiser from the shards and returns the progress.

    Raises:
        FileNotFoundError: no shards there. ValueError: shards of different steps.
    """
    paths = sorted(folder.glob("state-*.safetensors"))
    if not paths:
        raise FileNotFoundError(f"no state-*.safetensors in {folder}: give --resume the folder of a saved run")
    tensors: dict[str, Tensor] = {}
    progress = set()
    for path in paths:
        with safe_open(path, framework="pt") as shard:
            progress.add(shard.metadata()["progress"])
        tensors |= load_file(path)
    if len(progress) != 1:
        raise ValueError(f"the shards in {folder} are of different steps: {sorted(progress)}")
    prefix = "model."
    model.load_state_dict({n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)})
    optimiser.load_state(tensors)
    return json.loads(progress.pop())
