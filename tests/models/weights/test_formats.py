"""Quantised checkpoints through the loader, against values computed element by element in plain Python."""

import math

import pytest
import torch

from tests.models.weights.tiny import V3, V4, random_tensors, raw, stored, write_folder
from thalweg.models.config import read_config
from thalweg.models.weights.checkpoint import load_weights
from thalweg.models.weights.expected import expected_tensors

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def e4m3(byte: int) -> float:
    sign, exponent, mantissa = (-1) ** (byte >> 7), byte >> 3 & 15, byte & 7
    return sign * (mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def random_bytes(generator, *shape, low=0, high=256):
    return torch.randint(low, high, shape, dtype=torch.uint8, generator=generator)


def fp4_value(packed, row, column):
    nibble = int(packed[row, column // 2]) >> (4 if column % 2 else 0) & 15
    return -E2M1[nibble & 7] if nibble & 8 else E2M1[nibble]


def load_with(folder, values, name, replacement):
    """Loads a random checkpoint in which `name` is stored as `replacement` (a table of stored tensors) says."""
    write_folder(folder, values, {})
    config = read_config(folder)
    tensors = stored(random_tensors(expected_tensors(config)))
    del tensors[name]
    write_folder(folder, values, tensors | replacement)
    return load_weights(folder, config)[name]


V4_EXPERT = "layers.1.ffn.experts.3.w2"  # [64, 32]
V3_EXPERT = "model.layers.1.mlp.experts.3.down_proj"  # [64, 32]


@pytest.mark.parametrize("scale_dtype", ["F32", "F8_E8M0"])
@pytest.mark.parametrize(
    ("values", "name", "suffix"),
    [(V4, V4_EXPERT, ".scale"), (V3, V3_EXPERT, ".weight_scale_inv")],
    ids=["deepseek_v4", "deepseek_v3"],
)
def test_fp8_by_blocks(tmp_path, values, name, suffix, scale_dtype):
    values = {**values, "quantization_config": {"quant_method": "fp8", "weight_block_size": [24, 24]}}
    generator = torch.Generator().manual_seed(1)
    codes = random_bytes(generator, 64, 32, high=127) | random_bytes(generator, 64, 32, high=2) << 7
    exponents = random_bytes(generator, 3, 2, low=120, high=134)
    factors = [[2.0 ** (int(exponents[i, j]) - 127) for j in range(2)] for i in range(3)]
    scales = exponents if scale_dtype == "F8_E8M0" else torch.tensor(factors)
    replacement = {
        f"{name}.weight": raw("F8_E4M3", (64, 32), codes),
        f"{name}{suffix}": raw(scale_dtype, (3, 2), scales),
    }
    golden = [[e4m3(int(codes[i, j])) * factors[i // 24][j // 24] for j in range(32)] for i in range(64)]
    assert load_with(tmp_path, values, f"{name}.weight", replacement).tolist() == golden


@pytest.mark.parametrize(
    ("values", "name", "weight", "dtype", "scale", "scale_dtype"),
    [
        (V4, V4_EXPERT, ".weight", "I8", ".scale", "F8_E8M0"),  # DeepSeek-V4's release
        (V4, V4_EXPERT, ".weight", "U8", ".weight_scale", "U8"),
        (V3, V3_EXPERT, ".weight_packed", "U8", ".weight_scale", "U8"),  # compressed-tensors
    ],
)
def test_mxfp4_experts(tmp_path, values, name, weight, dtype, scale, scale_dtype):
    generator = torch.Generator().manual_seed(2)
    packed, exponents = random_bytes(generator, 64, 16), random_bytes(generator, 64, 1, low=110, high=140)
    replacement = {
        name + weight: raw(dtype, (64, 16), packed),
        name + scale: raw(scale_dtype, (64, 1), exponents),
    }
    golden = [[fp4_value(packed, i, j) * 2.0 ** (int(exponents[i, 0]) - 127) for j in range(32)] for i in range(64)]
    assert load_with(tmp_path, values, f"{name}.weight", replacement).tolist() == golden


@pytest.mark.parametrize(
    ("values", "name", "weight", "factor_name", "divide"),
    [
        (V4, V4_EXPERT, ".weight", ".weight_scale_2", False),  # ModelOpt
        (V3, V3_EXPERT, ".weight_packed", ".weight_global_scale", True),  # compressed-tensors
    ],
)
def test_nvfp4_experts(tmp_path, values, name, weight, factor_name, divide):
    generator = torch.Generator().manual_seed(3)
    packed, scales = random_bytes(generator, 64, 16), random_bytes(generator, 64, 2, high=127)
    factor = 640.0 if divide else 0.0015625
    replacement = {
        name + weight: raw("U8", (64, 16), packed),
        f"{name}.weight_scale": raw("F8_E4M3", (64, 2), scales),
        name + factor_name: raw("F32", (1,), torch.tensor([factor])),
        f"{name}.input_scale": raw("F32", (1,), torch.tensor([7.0])),  # of activations: no part of the weight
    }
    applied = 1 / factor if divide else factor
    loaded = load_with(tmp_path, values, f"{name}.weight", replacement)
    for i, j in [(0, 0), (0, 1), (0, 15), (0, 16), (31, 7), (63, 31)]:
        golden = fp4_value(packed, i, j) * e4m3(int(scales[i, j // 16])) * applied
        assert math.isclose(loaded[i, j].item(), golden, rel_tol=1e-6, abs_tol=0), (i, j)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_matrices_come_in_the_requested_dtype_and_the_sensitive_rest_in_float32(tmp_path, dtype):
    write_folder(tmp_path, V4, {})
    config = read_config(tmp_path)
    tensors = {
        name: tensor.bfloat16() if tensor.is_floating_point() else tensor.to(torch.int32)
        for name, tensor in random_tensors(expected_tensors(config, mtp=True)).items()
    }
    write_folder(tmp_path, V4, stored(tensors))
    loaded = load_weights(tmp_path, config, dtype=dtype, mtp=True)
    by_dtype = {
        wanted: {name for name in loaded if loaded[name].dtype == wanted} for wanted in (torch.float32, torch.int64)
    }
    assert by_dtype[torch.int64] == {"layers.0.ffn.gate.tid2eid"}
    fixed = {
        n for n in loaded if "norm" in n or ".hc_" in n or n.startswith("hc_") or n.endswith(("sink", "ape", "bias"))
    }
    if dtype != torch.float32:
        assert by_dtype[torch.float32] == fixed
    assert all(loaded[name].dtype == dtype for name in set(loaded) - fixed - by_dtype[torch.int64])
    assert all(torch.equal(loaded[name].double(), tensors[name].double()) for name in loaded)
