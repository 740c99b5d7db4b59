"""The scripts as a person calls them, on a machine without a GPU."""

import importlib
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from thalweg.kernels.bench import records
from thalweg.kernels.bench.attention import BENCHMARK
from thalweg.kernels.bench.attention.cases import Decode

ROOT = Path(__file__).parents[2]
ATTENTION = "sglang/kernels/ops/attention/"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch):
    """Imports a script of benchmarks/ and gives it with the arguments set."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))

    def load(name: str, *arguments: object):
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
        return importlib.import_module(name)

    return load


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--case", "batch=1,heads=64"), "needs also entries"),
        (("--impl", "thalweg,flashinfer"), "'flashinfer' is unknown; there are: thalweg, flashmla"),
        (("--peers", "nowhere"), "no such folder"),
        ((), "finds no CUDA device"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    arguments, said: str, script, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert script("attention", *arguments).main() == 2
    error = capsys.readouterr().err
    assert error.startswith("attention.py: ")
    assert said in error
    assert error.count("\n") == 1


def test_records_are_summed_up_without_a_gpu(tmp_path: Path, script, capsys) -> None:
    results = [
        {"impl": impl, "op": "sparse_mla", "us": us, "error": 0.001, "variant": "v", "variants": {}}
        | {"checked_rows": 1, "scratch_bytes": 0, "sets": 1}
        for impl, us in (("thalweg", 5.0), ("flashmla", 10.0))
    ]
    stamp = {"run": "a", "gpu": "NVIDIA H200"}
    records.merge(tmp_path / "out.jsonl", BENCHMARK.records_of(Decode(64, 64, 640), results, stamp, None))
    assert script("attention", "--summary", tmp_path / "out.jsonl").main() == 0
    assert "64 heads, against the best peer: geomean 2.000 x" in capsys.readouterr().out


def wheel_of(path: Path, **instead: str) -> Path:
    """A wheel with what is taken of SGLang; `instead` gives the text of a file by its stem."""
    splitk = ATTENTION + "dsv4/triton_sparse_decode/"
    texts = {
        ATTENTION + "flash_mla_sm120_triton.py": "portable = 1\n",
        ATTENTION + "dsv4/kv_layout.py": "class KVLayout: V4 = 'v4'\n",
        ATTENTION + "dsv4/dequant_k_cache.py": (
            "from sglang.kernels.jit.utils import get_jit_cuda_arch, is_hip_runtime\n"
            "from sglang.kernels.ops.attention.dsv4.kv_layout import KVLayout\n"
            "from sglang.kernels.ops.quantization.fp8_kernel import is_fp8_fnuz\n"
            "from sglang.srt.utils import is_gfx95_supported\n"
            "layout, hip = KVLayout.V4, is_hip_runtime() or is_fp8_fnuz()\n"
        ),
        splitk + "__init__.py": (
            "from sglang.kernels.ops.attention.dsv4.triton_sparse_decode.triton_mla_kernels_decode_optimized import forward\n"
        ),
        splitk + "triton_mla_kernels_decode_optimized.py": (
            "from .triton_mla_kernels_decode_fused import on_amd as forward\n"
        ),
        splitk + "triton_mla_kernels_decode_fused.py": (
            "from sglang.srt.utils.common import is_gfx942_supported\non_amd = is_gfx942_supported()\n"
        ),
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in texts.items():
            archive.writestr(name, instead.get(Path(name).stem, text))
    return path


def test_the_kernels_of_sglang_are_taken_without_sglang(
    tmp_path: Path, script, monkeypatch: pytest.MonkeyPatch
) -> None:
    script("peers").take_sglang_attention(wheel_of(tmp_path / "sglang.whl"), tmp_path / "out")
    monkeypatch.syspath_prepend(str(tmp_path / "out"))
    for name in ("sglang_portable", "sglang_kv_layout", "sglang_dequant", "sglang_splitk"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert importlib.import_module("sglang_portable").portable == 1
    assert importlib.import_module("sglang_splitk").forward is False
    module = importlib.import_module("sglang_dequant")
    assert (module.layout, module.hip) == ("v4", False)
    for name in [name for name in sys.modules if name.startswith("sglang_")]:
        del sys.modules[name]  # monkeypatch would bring it back, for the tests that follow


@pytest.mark.parametrize(
    ("stem", "said"),
    [
        ("dequant_k_cache", "its bf16 copy no longer has: from sglang.kernels.jit"),
        ("triton_mla_kernels_decode_fused", r"its split-K kernel \(triton_mla_kernels_decode_fused.py\) no longer has"),
    ],
)
def test_another_version_of_sglang_is_refused_by_name(tmp_path: Path, script, stem: str, said: str) -> None:
    wheel = wheel_of(tmp_path / "sglang.whl", **{stem: "import torch\n"})
    with pytest.raises(SystemExit, match=said):
        script("peers").take_sglang_attention(wheel, tmp_path / "out")


def test_the_peers_of_attention_need_no_compiler(
    tmp_path: Path, script, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = script("peers", "--only", "attention", tmp_path / "out")
    monkeypatch.setenv("PATH", "")
    flashmla = tmp_path / "flashmla.whl"
    with zipfile.ZipFile(flashmla, "w") as archive:
        archive.writestr("flash_mla/__init__.py", "x" * 2**20)
    sglang = wheel_of(tmp_path / "sglang.whl")
    monkeypatch.setattr(module, "download", lambda name, *_: sglang if name.startswith("sglang") else flashmla)
    assert module.main() == 0
    said = capsys.readouterr().out
    assert "flashmla                     1.0 MiB" in said
    assert "deepgemm" not in said
    assert (tmp_path / "out.tar.xz").exists()
