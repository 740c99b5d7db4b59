"""The tensors of released models, counted: against what was published about the released files."""

import math
from pathlib import Path

import pytest

from tests.models.test_config import FLASH, KIMI_K2, PRO, V3
from thalweg.models.config import parse_config
from thalweg.models.weights.expected import expected_names, expected_tensors


@pytest.mark.parametrize(
    ("values", "mtp", "billions"),
    [
        (FLASH, False, 284.33),  # "284B"
        (PRO, True, 1598.84),  # "1.6T", MTP block included
        (V3, False, 671.03),  # "671B", 11.5B of the MTP block aside
        (KIMI_K2, False, 1026.41),  # "1T"
    ],
    ids=["V4-Flash", "V4-Pro", "V3", "Kimi-K2"],
)
def test_parameters_sum_to_what_was_published(values, mtp, billions):
    tensors = expected_tensors(parse_config(values, Path("config.json")), mtp=mtp)
    assert round(sum(math.prod(tensor.shape) for tensor in tensors.values()) / 1e9, 2) == billions


def test_the_mtp_block_of_v4_flash_has_the_1575_tensors_of_the_released_shard():
    config = parse_config(FLASH, Path("config.json"))
    block = {name: tensor for name, tensor in expected_tensors(config, mtp=True).items() if name.startswith("mtp.0.")}
    kept_whole = ("norm", "hc_", "attn_sink", "gate.")
    quantised = [name for name in block if not any(part in name for part in kept_whole)]
    assert len(block) + len(quantised) == 1575  # each fp8 or fp4 weight has a scale beside it
    shapes = {name: block[f"mtp.0.{name}.weight"].shape for name in ("attn.wq_b", "attn.wo_a", "attn.wo_b", "e_proj")}
    assert shapes == {
        "attn.wq_b": (32768, 1024),
        "attn.wo_a": (8192, 4096),
        "attn.wo_b": (4096, 8192),
        "e_proj": (4096, 4096),
    }


def test_router_biases_stand_where_experts_are_scored_and_tables_where_they_are_hashed():
    names = expected_names(parse_config(PRO, Path("config.json")), mtp=True)
    biased = [name for name in names if name.endswith("ffn.gate.bias")]
    assert biased == [f"layers.{layer}.ffn.gate.bias" for layer in range(3, 61)] + ["mtp.0.ffn.gate.bias"]
    assert [n for n in names if n.endswith("tid2eid")] == [f"layers.{layer}.ffn.gate.tid2eid" for layer in range(3)]
