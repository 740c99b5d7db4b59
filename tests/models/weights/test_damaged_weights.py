"""A weight that is no number is found while reading, by name."""

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from thalweg.errors import UserError
from thalweg.models.config import read_config
from thalweg.models.open import TINY
from thalweg.models.weights.checkpoint import load_weights


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_no_number_is_refused_by_name(tmp_path: Path, value: float) -> None:
    """Routing by a NaN bias gives finite logits: nothing later would notice."""
    folder = tmp_path / "tiny"
    shutil.copytree(TINY, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["layers.2.ffn.gate.bias"][3] = value
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"layers\.2\.ffn\.gate\.bias holds numbers that are NaN or infinite"):
        load_weights(folder, read_config(folder))
