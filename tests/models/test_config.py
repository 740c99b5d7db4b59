"""Configurations as they stand in released checkpoints, as transformers writes them, and as people break them."""

import json
import subprocess
import sys
from typing import Any

import pytest

from thalweg.errors import UserError
from thalweg.models.config import DeepseekV4Config, MlaConfig, YarnScaling, read_config

YARN = {"type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 65536}
FLASH: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": 129280,
    "hidden_size": 4096,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_lora_rank": 1024,
    "o_groups": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "num_hash_layers": 3,
    "num_nextn_predict_layers": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "hidden_act": "silu",
    "sliding_window": 128,
    "compress_ratios": [0, 0, *([4, 128] * 20), 4, 0],
    "compress_rope_theta": 160000,
    "rope_theta": 10000,
    "rope_scaling": YARN,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-06,
    "rms_norm_eps": 1e-06,
    "max_position_embeddings": 1048576,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "expert_dtype": "fp4",
    "torch_dtype": "bfloat16",
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
}
PRO: dict[str, Any] = {
    **FLASH,
    "hidden_size": 7168,
    "moe_intermediate_size": 3072,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "o_groups": 16,
    "n_routed_experts": 384,
    "routed_scaling_factor": 2.5,
    "index_topk": 1024,
    "compress_ratios": [128, 128, *([4, 128] * 29), 4, 0],
}
# The same model as FLASH, in the words of the file beside DeepSeek's inference code.
FLASH_INFERENCE: dict[str, Any] = {
    "vocab_size": 129280,
    "dim": 4096,
    "moe_inter_dim": 2048,
    "n_layers": 43,
    "n_hash_layers": 3,
    "n_mtp_layers": 1,
    "n_heads": 64,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "n_activated_experts": 6,
    "score_func": "sqrtsoftplus",
    "route_scale": 1.5,
    "swiglu_limit": 10.0,
    "q_lora_rank": 1024,
    "head_dim": 512,
    "rope_head_dim": 64,
    "norm_eps": 1e-06,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "window_size": 128,
    "original_seq_len": 65536,
    "rope_theta": 10000,
    "rope_factor": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-06,
    "dtype": "fp8",
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
    "compress_rope_theta": 160000,
    "compress_ratios": [0, 0, *([4, 128] * 20), 4, 0],
}
V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {"fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]},
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
KIMI_K2: dict[str, Any] = {
    **V3,
    "model_type": "kimi_k2",
    "bos_token_id": 163584,
    "eos_token_id": 163585,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 131072,
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "rope_scaling": {**V3["rope_scaling"], "beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0},
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "topk_group": 1,
    "vocab_size": 163840,
}


def read(tmp_path, values) -> Any:
    (tmp_path / "config.json").write_text(values if isinstance(values, str) else json.dumps(values))
    return read_config(tmp_path)


def without(values, *keys):
    return {key: value for key, value in values.items() if key not in keys}


def test_v4_flash_reads_as_the_design_describes_it(tmp_path):
    config = read(tmp_path, FLASH)
    assert isinstance(config, DeepseekV4Config)
    assert (config.num_layers, config.hidden_size, config.num_heads) == (43, 4096, 64)
    assert [config.compress_ratios.count(ratio) for ratio in (0, 4, 128)] == [2, 21, 20]
    assert config.hash_layers == (True,) * 3 + (False,) * 40 and config.num_hash_layers == 3
    assert (config.nope_head_dim, config.rope_head_dim) == (448, 64)
    assert (config.index_num_heads, config.index_head_dim, config.index_topk) == (64, 128, 512)
    assert config.rope_scaling == YarnScaling(16.0, 65536, 32.0, 1.0)
    assert (config.rope_theta, config.compress_rope_theta) == (1e4, 1.6e5)
    assert (config.bos_token_id, config.eos_token_ids, config.pad_token_id) == (0, (1,), None)
    assert config.quantization is not None
    assert (config.quantization.expert_dtype, config.quantization.weight_block_size) == ("fp4", (128, 128))
    assert config.index_hadamard is True


def test_v4_pro_has_no_layer_that_is_only_a_window(tmp_path):
    config = read(tmp_path, PRO)
    assert [config.compress_ratios.count(ratio) for ratio in (0, 4, 128)] == [0, 30, 31]
    assert (config.o_groups, config.q_lora_rank, config.num_experts, config.index_topk) == (16, 1536, 384, 1024)
    assert config.routed_scaling_factor == 2.5


def test_the_file_beside_deepseeks_inference_code_says_the_same_as_the_release(tmp_path):
    ours, release = read(tmp_path, FLASH_INFERENCE), read(tmp_path, FLASH)
    differing = {name for name in vars(release) if getattr(ours, name) != getattr(release, name)}
    assert differing == {"bos_token_id", "eos_token_ids", "quantization"}  # it names no tokens and no fp8 block
    assert ours.max_position_embeddings == 65536 * 16
    assert ours.quantization.expert_dtype == "fp4"


def test_what_transformers_saves_reads_like_what_it_was_given(tmp_path):
    transformers = pytest.importorskip("transformers")
    for given in (FLASH, PRO, V3):
        config_class = getattr(transformers, given["architectures"][0].replace("ForCausalLM", "Config"))
        config_class(**without(given, "model_type", "quantization_config", "expert_dtype")).save_pretrained(tmp_path)
        saved = json.loads((tmp_path / "config.json").read_text())
        assert "rope_parameters" in saved and "compress_ratios" not in saved
        ours, release = read_config(tmp_path), read(tmp_path, given)
        differing = {name for name in vars(release) if getattr(ours, name) != getattr(release, name)}
        if given is not V3:  # transformers adds attention_factor 1.0: no magnitude scaling, which is V4's rule
            assert ours.rope_scaling.attention_factor == 1.0
            differing.remove("rope_scaling")
        assert differing == {"quantization"}


def test_layers_may_mix_hash_and_scored_experts_in_any_order(tmp_path):
    config = read(tmp_path, {**FLASH, "mlp_layer_types": ["moe", "hash_moe"] + ["moe"] * 41})
    assert config.hash_layers[:3] == (False, True, False)


def test_without_rope_scaling_rope_is_plain(tmp_path):
    assert read(tmp_path, {**FLASH, "rope_scaling": None}).rope_scaling is None
    assert read(tmp_path, {**FLASH, "rope_scaling": {"rope_type": "default"}}).rope_scaling is None


def test_the_hadamard_rotation_is_one_switch_for_queries_and_keys(tmp_path):
    assert read(tmp_path, {**FLASH, "index_hadamard": False}).index_hadamard is False
    for one_sided in ("q", {"q": True, "k": False}, [True, False]):
        with pytest.raises(UserError, match=r"index_hadamard is .*possible is true or false"):
            read(tmp_path, {**FLASH, "index_hadamard": one_sided})
    assert [name for name in DeepseekV4Config.__dataclass_fields__ if "hadamard" in name] == ["index_hadamard"]


def test_deepseek_v3_and_kimi_k2(tmp_path):
    v3 = read(tmp_path, V3)
    assert isinstance(v3, MlaConfig)
    assert (v3.q_lora_rank, v3.kv_lora_rank, v3.qk_head_dim, v3.first_k_dense_replace) == (1536, 512, 192, 3)
    assert v3.rope_magnitude == 1.0
    # mscale = 0.1 ln 40 + 1 = 1.3688879; squared 1.8738542; / sqrt(192)
    assert v3.softmax_scale == pytest.approx(1.8738542 / 13.8564065, rel=1e-6)
    kimi = read(tmp_path, KIMI_K2)
    assert (kimi.num_heads, kimi.n_routed_experts, kimi.n_group, kimi.num_mtp_layers) == (64, 384, 1, 0)
    assert (kimi.rope_theta, kimi.rope_scaling.factor, kimi.rope_scaling.beta_fast) == (50000.0, 32.0, 1.0)
    assert read(tmp_path, {**V3, "q_lora_rank": None}).q_lora_rank is None
    assert read(tmp_path, {**V3, "rope_scaling": None}).softmax_scale == pytest.approx(192**-0.5)


def test_a_vision_language_wrapper_yields_its_language_model(tmp_path):
    wrapper = {"model_type": "kimi_k25", "vision_config": {}, "text_config": KIMI_K2}
    assert read(tmp_path, wrapper) == read(tmp_path, KIMI_K2)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ("{", "not JSON"),
        ("[]", "not a JSON object but list"),
        ({"model_type": "llama"}, "unknown architecture 'llama'; possible are deepseek_v4, deepseek_v3, kimi_k2"),
        ({}, "unknown architecture None"),
        ({**V3, "model_type": "deepseek_v32"}, "deepseek_v32 has operations and the SGLang plug-in here, no embedded"),
        (without(FLASH, "hidden_size", "index_topk"), "missing hidden_size or dim, index_topk"),
        (without(FLASH, "compress_ratios"), "missing compress_ratios or layer_types"),
        (without(FLASH, "num_hash_layers"), "missing num_hash_layers or mlp_layer_types"),
        (without(FLASH, "qk_rope_head_dim"), "missing qk_rope_head_dim or partial_rotary_factor"),
        (without(FLASH, "rope_theta"), "missing rope_theta"),
        (without(V3, "kv_lora_rank"), "missing kv_lora_rank"),
        ({**FLASH, "compress_ratios": [0] * 42}, "compress_ratios has 42 entries for 43 layers"),
        ({**FLASH, "compress_ratios": [0] * 45}, "compress_ratios has 45 entries for 43 layers"),
        ({**FLASH, "compress_ratios": [2] * 43}, "compress_ratios is 2; possible is 0, 4 or 128"),
        ({**FLASH, "compress_ratios": [0] * 43 + [4]}, "0 for the MTP block"),
        ({**FLASH, "layer_types": ["sliding_attention"] * 3}, "layer_types has 3 entries for 43 layers"),
        ({**FLASH, "layer_types": ["full_attention"] * 43}, "layer_types is 'full_attention'"),
        ({**FLASH, "mlp_layer_types": ["moe"]}, "mlp_layer_types has 1 entries for 43 layers"),
        (
            {**FLASH, "layer_types": ["sliding_attention"] * 43, "compress_rates": {"compressed_sparse_attention": 8}},
            "compress_rates is .*possible is 4 for CSA",
        ),
        ({**FLASH, "num_hash_layers": 44}, "num_hash_layers is 44; possible is at most the 43 layers"),
        ({**FLASH, "hidden_size": "4096"}, "hidden_size is '4096'; possible is an integer of at least 1"),
        (
            {**FLASH, "hidden_size": 2**31},
            "hidden_size is 2147483648; possible is an integer of at least 1 and at most",
        ),
        ({**FLASH, "hc_eps": float("inf")}, "hc_eps is inf; possible is a number above 0"),
        ({**FLASH, "hc_eps": 1e-50}, "hc_eps is 1e-50; possible is a number above 0"),
        ({**FLASH, "rope_theta": 1}, "rope_theta is 1.0; possible is a number above 1"),
        (
            {**V3, "rope_scaling": None, "rope_parameters": {"rope_theta": 0.5}},
            "rope_theta is 0.5; possible is a number above 1",
        ),
        ({**FLASH, "layer_types": [[]] * 43}, "layer_types is \\[\\]; possible is sliding_attention"),
        ({**FLASH, "mlp_layer_types": [{}] * 43}, "mlp_layer_types is {}; possible is hash_moe or moe"),
        ({**FLASH, "compress_ratios": [False] * 43}, "compress_ratios is False; possible is 0, 4 or 128"),
        ({**FLASH, "n_routed_experts": 2**30}, "n_routed_experts is 1073741824; possible is at most 24385 in each"),
        (
            {**V3, "num_hidden_layers": 2**30, "first_k_dense_replace": 0},
            "n_routed_experts is 256; possible is at most 0",
        ),
        ({**V3, "n_group": 256}, "n_group is 256; possible is 1, or groups of two experts or more"),
        ({**FLASH, "o_groups": 7}, "o_groups is 7; possible is a divisor of the 64 heads"),
        ({**FLASH, "num_experts_per_tok": 257}, "num_experts_per_tok is 257; possible is at most 256"),
        ({**FLASH, "n_shared_experts": 2}, "n_shared_experts is 2; possible is 1"),
        ({**FLASH, "qk_rope_head_dim": 63}, "qk_rope_head_dim is 63; possible is an even number"),
        ({**FLASH, "index_head_dim": 32}, "index_head_dim is 32; possible is at least the 64 rotary"),
        ({**FLASH, "index_head_dim": 96}, "a power of two, or index_hadamard false"),
        ({**FLASH, "tie_word_embeddings": True}, "tie_word_embeddings is True; possible is false"),
        ({**FLASH, "rope_scaling": {"type": "linear", "factor": 2}}, "type is 'linear'; possible is default or yarn"),
        ({**FLASH, "rope_scaling": {"type": "yarn"}}, "missing factor, original_max_position_embeddings"),
        ({**FLASH, "rope_scaling": {**YARN, "attention_factor": 1.3}}, "attention_factor.*possible is 1.0"),
        ({**V3, "scoring_func": "softmax"}, "scoring_func is 'softmax'; possible is sigmoid"),
        ({**V3, "n_group": 7}, "n_group is 7; possible is a divisor of the 256 experts"),
        ({**V3, "topk_group": 9}, "topk_group is 9; possible is at most the 8 groups"),
        ({"model_type": "kimi_k25"}, "missing text_config"),
        ({"model_type": "kimi_k25", "text_config": {"model_type": "kimi_linear"}}, "text_config is 'kimi_linear'"),
    ],
)
def test_what_cannot_be_read_is_said_in_one_line(tmp_path, values, message):
    with pytest.raises(UserError, match=message) as caught:
        read(tmp_path, values)
    assert "\n" not in str(caught.value) and "config.json" in str(caught.value)


def test_a_missing_folder_or_file_is_named(tmp_path):
    with pytest.raises(UserError, match="nowhere: no such folder"):
        read_config(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"no config\.json"):
        read_config(tmp_path)


def test_reading_a_configuration_loads_no_torch():
    program = "import sys, thalweg.models.config; print(sorted({'torch', 'numpy', 'triton'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "[]\n"
