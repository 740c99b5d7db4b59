"""One random model in every naming in circulation loads as the same tensors. The renaming is transformers' own."""

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.models.weights.tiny import V3, V4, random_tensors, stored, write_folder
from thalweg.models.config import read_config
from thalweg.models.weights.checkpoint import load_weights
from thalweg.models.weights.expected import expected_tensors
from thalweg.models.weights.headers import read_headers
from thalweg.models.weights.names import has_mtp

transformers = pytest.importorskip("transformers")


def canonical_checkpoint(folder: Path, values) -> dict[str, torch.Tensor]:
    """The checkpoint in canonical names, two shards, its MTP block included; returns the tensors without MTP."""
    write_folder(folder, values, {})
    config = read_config(folder)
    tensors = random_tensors(expected_tensors(config, mtp=True))
    write_folder(folder, values, stored(tensors), shards=2)
    (folder / "model.safetensors").unlink()
    return {name: tensors[name] for name in expected_tensors(config)}


def through_transformers(canonical: Path, modules: Path, saved: Path) -> None:
    """`canonical` as transformers holds it in modules, and as its save_pretrained writes it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(canonical, dtype=torch.float32)
    model.save_pretrained(saved)
    model.config.save_pretrained(modules)
    state = copy.deepcopy({name: tensor.contiguous() for name, tensor in model.state_dict().items()})
    save_file(state, modules / "model.safetensors")


@pytest.mark.parametrize(
    ("values", "in_modules", "in_saved"),
    [
        (
            V4,
            "model.layers.1.self_attn.compressor.indexer.scorer.weights_proj.weight",
            "model.layers.1.attn.norm.weight",
        ),
        (V3, "model.layers.1.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.3.up_proj.weight"),
        ({**V3, "q_lora_rank": None}, "model.layers.1.self_attn.q_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        (
            {**V3, "attention_bias": True},
            "model.layers.1.self_attn.o_proj.bias",
            "model.layers.1.self_attn.o_proj.bias",
        ),
    ],
    ids=["deepseek_v4", "deepseek_v3", "deepseek_v3 without q_lora_rank", "deepseek_v3 with biases"],
)
def test_three_namings_load_as_the_same_tensors(tmp_path, values, in_modules, in_saved):
    folders = [tmp_path / name for name in ("canonical", "modules", "saved")]
    tensors = canonical_checkpoint(folders[0], values)
    through_transformers(*folders)
    assert in_modules in read_headers(folders[1]) and in_saved in read_headers(folders[2])
    for folder in folders:
        loaded = load_weights(folder, read_config(folder))
        assert list(loaded) == list(tensors)
        for name, tensor in tensors.items():
            assert torch.equal(loaded[name], tensor), f"{folder.name}: {name}"


def test_the_mtp_block_loads_on_request_and_only_where_it_is_stored(tmp_path):
    canonical_checkpoint(tmp_path, V4)
    config = read_config(tmp_path)
    loaded = load_weights(tmp_path, config, mtp=True)
    assert loaded["mtp.0.e_proj.weight"].shape == (64, 64) and loaded["mtp.0.hc_head_fn"].shape == (4, 256)
    assert "mtp.0.ffn.gate.bias" in loaded and "mtp.0.attn.compressor.ape" not in loaded
    assert not any(name.startswith("mtp.") for name in load_weights(tmp_path, config))
    assert has_mtp(read_headers(tmp_path))


def test_copies_of_embedding_and_head_in_the_mtp_block_are_skipped(tmp_path):
    write_folder(tmp_path, V4, {})
    config = read_config(tmp_path)
    tensors = random_tensors(expected_tensors(config, mtp=True))
    copies = {name: torch.zeros(48, 64) for name in ("mtp.0.emb.tok_emb.weight", "mtp.0.head.weight")}
    write_folder(tmp_path, V4, stored(tensors | copies))
    assert set(load_weights(tmp_path, config, mtp=True)) == set(tensors)


def test_v3_keeps_its_mtp_block_in_a_layer_past_the_last_which_is_skipped(tmp_path):
    write_folder(tmp_path, V3, {})
    config = read_config(tmp_path)
    tensors = random_tensors(expected_tensors(config))
    names = (
        "eh_proj.weight",
        "enorm.weight",
        "hnorm.weight",
        "shared_head.head.weight",
        "mlp.experts.0.up_proj.weight",
    )
    mtp = {f"model.layers.2.{name}": torch.zeros(2, 2) for name in names}
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    write_folder(tmp_path, V3, stored(tensors | mtp | old))
    assert set(load_weights(tmp_path, config)) == set(tensors)


def test_the_language_model_of_a_vision_language_file_loads_alone(tmp_path):
    values = {"model_type": "kimi_k25", "text_config": V3}
    write_folder(tmp_path, values, {})
    config = read_config(tmp_path)
    tensors = random_tensors(expected_tensors(config))
    wrapped = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    write_folder(tmp_path, values, stored(wrapped | {"vision_tower.patch_embed.proj.weight": torch.zeros(2, 2)}))
    loaded = load_weights(tmp_path, config)
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)
