"""The dense training model computes what transformers' DeepseekV4ForCausalLM computes, in float32."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tools.tiny.dense_attention import Mode
from tools.tiny.dense_model import DenseModel
from tools.tiny.initialise import initialise
from tools.tiny.tiny_config import CONFIG_PATH, TinyConfig


def small_config(**changes) -> dict:
    values = json.loads(CONFIG_PATH.read_text())
    values.update(hidden_size=64, q_lora_rank=32, o_lora_rank=16, moe_intermediate_size=32, vocab_size=97)
    values.update(bos_token_id=0, eos_token_id=1, pad_token_id=2, num_attention_heads=4, index_topk=16)
    values.update(changes)
    return values


def random_model(values: dict, seed: int) -> DenseModel:
    """Weights far from their starting values, so that no term of the mathematics is hidden by a zero or a one."""
    model = DenseModel(TinyConfig.from_dict(values)).eval()
    initialise(model, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("norm.weight", "_base", "_scale", "attn_sink", "ape")):
                parameter.add_(0.5 * torch.randn(parameter.shape, generator=generator))
            if name.endswith("_fn"):
                parameter.mul_(4.0)
        for name, buffer in model.named_buffers():
            if name.endswith("gate.bias"):
                buffer.add_(0.1 * torch.randn(buffer.shape, generator=generator))
    return model


def transformers_model(model: DenseModel, values: dict, folder: Path) -> torch.nn.Module:
    transformers = pytest.importorskip("transformers")
    (folder / "config.json").write_text(json.dumps(values))
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, folder / "model.safetensors")
    loaded, report = transformers.DeepseekV4ForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"] and not report["mismatched_keys"]
    return loaded.eval()


@pytest.mark.parametrize("tokens", [1, 3, 127, 129, 300])
def test_logits_equal_transformers_with_selection_active(tmp_path, tokens):
    values = small_config()
    model = random_model(values, seed=tokens)
    oracle = transformers_model(model, values, tmp_path)
    ids = torch.randint(0, 97, (2, tokens), generator=torch.Generator().manual_seed(tokens))
    with torch.no_grad():
        ours = model(ids, Mode("indexer")).logits
        theirs = oracle(ids).logits
    assert (ours - theirs).abs().max() < 1e-4
    if tokens == 300:  # 75 entries, 16 kept: dropping the selection must show
        with torch.no_grad():
            dense = model(ids, Mode("dense")).logits
        assert (dense - theirs).abs().max() > 1e-3
