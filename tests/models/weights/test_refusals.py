"""What cannot be loaded is said in one line, before a single weight is read."""

import json
import math
import subprocess
import sys

import pytest
import torch

from tests.models.test_config import FLASH
from tests.models.weights.tiny import V3, V4, random_tensors, raw, stored, write_folder
from thalweg.errors import UserError
from thalweg.models.config import read_config
from thalweg.models.weights import checkpoint, memory
from thalweg.models.weights.checkpoint import load_weights
from thalweg.models.weights.expected import Expected, Kind, expected_tensors
from thalweg.models.weights.headers import read_headers


@pytest.fixture(autouse=True)
def no_weight_may_be_read(monkeypatch):
    def read(*_):
        raise AssertionError("a weight was read")

    monkeypatch.setattr(checkpoint, "_read", read)


def v4_tensors(folder):
    write_folder(folder, V4, {})
    (folder / "model.safetensors").unlink()
    return stored(random_tensors(expected_tensors(read_config(folder))))


def refusal(folder, config=None, **options) -> str:
    with pytest.raises(UserError) as caught:
        load_weights(folder, config or read_config(folder), **options)
    assert "\n" not in str(caught.value) and folder.name in str(caught.value)
    return str(caught.value)


def test_a_folder_that_is_not_there_or_holds_no_weights(tmp_path):
    v4_tensors(tmp_path)
    assert "no *.safetensors" in refusal(tmp_path)
    assert "no such folder" in refusal(tmp_path / "nowhere", read_config(tmp_path))


@pytest.mark.parametrize("kept", [0, 4, 20, -1, -1000])
def test_a_file_shorter_than_its_header_says(tmp_path, kept):
    write_folder(tmp_path, V4, v4_tensors(tmp_path))
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:kept])
    message = refusal(tmp_path)
    assert "truncated" in message and "model.safetensors" in message
    if kept < 0:
        assert f"{len(whole) + kept} bytes, its header says {len(whole)}" in message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer"),
        (b"PK\x03\x04 some archive, not weights at all", "not a safetensors file"),
        ((9).to_bytes(8, "little") + b"not json!", "corrupt safetensors header"),
        ((2).to_bytes(8, "little") + b"[]", "corrupt safetensors header"),
        ((12).to_bytes(8, "little") + b'{"a": "b"}  ', "corrupt safetensors header"),
    ],
)
def test_a_file_that_is_no_safetensors_file(tmp_path, content, message):
    v4_tensors(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(content)
    assert message in refusal(tmp_path)


def test_a_header_whose_offsets_and_shape_disagree(tmp_path):
    entry = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}
    text = json.dumps(entry).encode()
    v4_tensors(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    assert "corrupt safetensors header" in refusal(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(
        len(text).to_bytes(8, "little") + text.replace(b"F32", b"Q32") + bytes(8)
    )
    assert "a is stored as Q32; possible are F64" in refusal(tmp_path)


def test_shards_and_the_index_must_agree(tmp_path):
    tensors = v4_tensors(tmp_path)
    write_folder(tmp_path, V4, tensors, shards=3)
    index = tmp_path / "model.safetensors.index.json"
    whole = json.loads(index.read_text())
    index.write_text(json.dumps({"weight_map": {**whole["weight_map"], "ghost": "model-00001-of-00003.safetensors"}}))
    assert "1 tensors that model.safetensors.index.json lists stand in no shard, for example ghost" in refusal(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "../elsewhere.safetensors"}}))
    assert "weight_map is no table of tensor names and file names" in refusal(tmp_path)
    index.write_text("{}")
    assert "no JSON object with a weight_map" in refusal(tmp_path)
    index.write_text(json.dumps(whole))
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    assert "1 of 3 shards that model.safetensors.index.json lists are absent" in refusal(tmp_path)


def test_the_same_tensor_in_two_files_is_a_tensor_parallel_conversion_not_a_checkpoint(tmp_path):
    write_folder(tmp_path, V4, v4_tensors(tmp_path))
    whole = (tmp_path / "model.safetensors").rename(tmp_path / "model0-mp2.safetensors")
    (tmp_path / "model1-mp2.safetensors").write_bytes(whole.read_bytes())
    assert "stands in model0-mp2.safetensors and in model1-mp2.safetensors" in refusal(tmp_path)


def test_missing_unknown_and_doubled_tensors_are_listed(tmp_path):
    tensors = v4_tensors(tmp_path)
    lost = [name for name in tensors if name.startswith("layers.2.ffn.experts.1.")]
    write_folder(tmp_path, V4, {name: tensor for name, tensor in tensors.items() if name not in lost})
    assert f"3 of {len(tensors)} tensors are missing, for example layers.2.ffn.experts.1.w1.weight" in refusal(tmp_path)
    write_folder(tmp_path, V4, tensors | {f"layers.{i}.engram.weight": raw("F32", (1,), bytes(4)) for i in range(5)})
    message = refusal(tmp_path)
    assert "5 tensors do not belong to this config.json, for example layers.0.engram.weight, layers.1" in message
    assert "layers.3.engram" not in message
    write_folder(tmp_path, V4, tensors | {"lm_head.weight": tensors["head.weight"]})
    assert "head.weight is stored twice, once as lm_head.weight" in refusal(tmp_path)


def test_layers_that_the_configuration_does_not_have_are_unknown(tmp_path):
    tensors = v4_tensors(tmp_path)
    write_folder(tmp_path, {**V4, "num_hidden_layers": 3, "compress_ratios": [0, 4, 128]}, tensors)
    assert "do not belong to this config.json, for example layers.3." in refusal(tmp_path)


def test_mtp_must_be_in_the_configuration_and_in_the_file(tmp_path):
    tensors = v4_tensors(tmp_path)
    write_folder(tmp_path, V4, tensors)
    assert "tensors are missing, for example mtp.0." in refusal(tmp_path, mtp=True)
    write_folder(tmp_path, {**V4, "num_nextn_predict_layers": 0}, tensors)
    assert "no MTP block" in refusal(tmp_path, mtp=True)
    write_folder(tmp_path, V3, {})
    assert "no MTP block" in refusal(tmp_path, mtp=True)


@pytest.mark.parametrize(
    ("name", "replacement", "message"),
    [
        ("attn.wkv", {".weight": ("F32", (64, 32))}, "is [64, 32]; config.json asks for [32, 64]"),
        (
            "attn.wkv",
            {".weight": ("F8_E4M3", (32, 64))},
            "stored as F8_E4M3 with no scales; possible are F32, F16, BF16",
        ),
        (
            "attn.wkv",
            {".weight": ("F8_E4M3", (32, 64)), ".scale": ("F32", (1, 2))},
            "wkv.scale is F32 [1, 2]; its weight asks for F32 or BF16 or F8_E8M0 [1, 1]",
        ),
        (
            "attn.wkv",
            {".weight_packed": ("I32", (32, 8)), ".weight_scale": ("BF16", (32, 2))},
            "stored as I32 with scales",
        ),
        (
            "attn.wkv",
            {".weight": ("I8", (32, 64)), ".scale": ("F8_E8M0", (32, 2))},
            "is [32, 128]; config.json asks for",
        ),
        (
            "attn.wkv",
            {".weight": ("I8", (32, 32)), ".scale": ("F8_E8M0", (32, 4))},
            "its weight asks for F8_E8M0 or U8 [32, 2]",
        ),
        ("attn.wkv", {".weight": ("U8", (32, 32)), ".scale": ("F8_E4M3", (32, 4))}, "NVFP4 scale without one float32"),
        ("attn.wkv", {".scale": ("F32", (1, 1))}, "1 of 379 tensors are missing, for example layers.1.attn.wkv.weight"),
        ("attn_norm", {".weight": ("F32", (63,))}, "is [63]; config.json asks for [64]"),
        ("attn_norm", {".weight": ("I8", (64,))}, "stored as I8 with no scales"),
    ],
)
def test_shapes_and_formats_that_do_not_fit(tmp_path, name, replacement, message):
    tensors = v4_tensors(tmp_path)
    del tensors[f"layers.1.{name}.weight"]
    size = {"F32": 4, "I32": 4, "BF16": 2}
    for suffix, (dtype, shape) in replacement.items():
        count = torch.Size(shape).numel() * size.get(dtype, 1)
        tensors[f"layers.1.{name}{suffix}"] = raw(dtype, shape, bytes(count))
    write_folder(tmp_path, V4, tensors)
    assert message.replace("379", str(len(expected_tensors(read_config(tmp_path))))) in refusal(tmp_path)


def test_memory_is_the_tensors_in_their_dtypes_and_three_float32_copies_of_the_largest():
    tensors = {"a": Expected((2, 3)), "b": Expected((4,), Kind.FLOAT32), "c": Expected((5,), Kind.INTEGER)}
    # a 6 elements, b 4 x 4 bytes, c 5 x 8 bytes; 3 x 4 x 6 bytes of work space
    assert memory.bytes_needed(tensors, torch.float32) == 24 + 16 + 40 + 72
    assert memory.bytes_needed(tensors, torch.bfloat16) == 12 + 16 + 40 + 72
    assert memory.bytes_needed(tensors, torch.float64) == 48 + 16 + 40 + 72


def test_a_model_that_memory_cannot_hold_is_refused_before_reading(tmp_path, monkeypatch):
    write_folder(tmp_path, V4, v4_tensors(tmp_path))
    expected = expected_tensors(read_config(tmp_path))
    monkeypatch.setattr(memory, "available_bytes", lambda device: memory.bytes_needed(expected, torch.bfloat16))
    assert "GiB available; free memory, load it as bfloat16 (--dtype bfloat16) or take a smaller checkpoint" in refusal(
        tmp_path
    )
    with pytest.raises(AssertionError, match="a weight was read"):
        load_weights(tmp_path, read_config(tmp_path), dtype=torch.bfloat16)


def test_deepseek_v4_flash_has_284_billion_parameters_and_does_not_fit_here(tmp_path, monkeypatch):
    write_folder(tmp_path, FLASH, {})
    tensors = expected_tensors(read_config(tmp_path))
    parameters = sum(math.prod(tensor.shape) for tensor in tensors.values())
    assert 283.5e9 < parameters < 284.5e9  # as its report states it
    monkeypatch.setattr(memory, "available_bytes", lambda device: 24 << 30)
    with pytest.raises(UserError, match=r"model needs 10\d\d\.\d\d GiB as float32, machine has 24\.00 GiB available"):
        memory.check_memory(tmp_path, tensors, torch.float32, torch.device("cpu"))


def test_a_gpu_is_asked_for_its_own_free_memory(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (123, 456))
    assert memory.available_bytes(torch.device("cuda")) == 123
    assert 0 < memory.available_bytes(torch.device("cpu")) < 1 << 50


def test_the_limit_of_a_container_counts(tmp_path, monkeypatch):
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("700000\n")
    (tmp_path / "memory.stat").write_text("anon 400000\ninactive_file 200000\n")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    assert memory.available_bytes(torch.device("cpu")) == 500000
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.available_bytes(torch.device("cpu")) > 1000000


def test_weights_load_as_float32_float64_or_bfloat16(tmp_path):
    write_folder(tmp_path, V4, {})
    with pytest.raises(UserError, match=r"torch\.int8: possible are torch\.float32, torch\.float64, torch\.bfloat16"):
        load_weights(tmp_path, read_config(tmp_path), dtype=torch.int8)


def test_headers_and_names_need_no_torch(tmp_path):
    write_folder(tmp_path, V4, v4_tensors(tmp_path))
    assert read_headers(tmp_path)["embed.weight"].nbytes == 48 * 64 * 4
    program = (
        "import sys, thalweg.models.weights.names as names, thalweg.models.weights.headers as headers\n"
        f"print(len(headers.read_headers({str(tmp_path)!r})), sorted({{'torch', 'numpy'}} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.split(maxsplit=1) == [str(len(read_headers(tmp_path))), "[]\n"]
