"""Assembles the peers of the GPU benchmarks into a folder, and into one archive to carry to a machine without a network.

    python benchmarks/peers.py .peers                                  # of the index benchmark: .peers/ and .peers.tar.xz
    python benchmarks/peers.py --only attention .peers-attention       # of the attention benchmark

Both are kept out of git. For x86-64, Python 3.12, CUDA 13.0 and Hopper (sm_90a). The index peers need nvcc 13.0 here: what would
take minutes of compiling over there is compiled now. On the GPU machine unpack, put the folder on PYTHONPATH, set CUDA_HOME and
put the folder that holds libnvrtc.so.13 on LD_LIBRARY_PATH (`--peers DIR` of a benchmark does the three itself).
"""

import argparse
import importlib.util
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

PYTHON = "3.12"
PLATFORMS = ("2_34", "2_28", "2_27", "2_24", "2_17", "2_5")
# What each peer needs beside the packages of a machine with torch; the wheel's parts that are never read stay behind.
INDEX_WHEELS = {
    "apache-tvm-ffi==0.1.11": (),
    "torch-c-dlpack-ext==0.1.5": (),
    "sgl-deep-gemm==0.1.3": ("deep_gemm/legacy/",),
    "z3-solver==4.15.4.0": ("z3/include/", "z3_solver-4.15.4.0.data/", "z3/lib/libz3.so.4.15"),
    "tilelang==0.1.11": ("tilelang/3rdparty/composable_kernel/", "tilelang/3rdparty/tvm/src/"),
    "flashinfer-python==0.6.14": ("flashinfer/data/", "flashinfer/__init__.py", "build_backend.py", "build_utils.py"),
}
ATTENTION_WHEELS = {"sgl-flash-mla==1.0.0": ()}
SGLANG = "sglang==0.5.23"  # a wheel for Python 3.11: only sources are taken from it
CURAND = "nvidia-curand==10.4.5.25"  # headers that FlashInfer's top-k includes
FLASHINFER = "flashinfer-python==0.6.14"
# The flags of FlashInfer's own build of its top-k module for sm_90a (flashinfer/jit/core.py, cpp_ext.py).
FLASHINFER_FLAGS = [
    *("-std=c++17", "-use_fast_math", "-Xfatbin=-compress-all", "-DNDEBUG", "-O3", "--expt-relaxed-constexpr"),
    *("-static-global-template-stub=false", "-DFLASHINFER_ENABLE_F16", "-DFLASHINFER_ENABLE_BF16"),
    *("-DFLASHINFER_ENABLE_FP8_E4M3", "-DFLASHINFER_ENABLE_FP8_E5M2", "-DFLASHINFER_ENABLE_FP8_E8M0"),
    *("-DFLASHINFER_ENABLE_FP4_E2M1", "-lineinfo"),
]
PARTS = {  # what the table of sizes lists: peer -> top-level names of the folder
    "tvm-ffi (for the index)": ("tvm_ffi", "torch_c_dlpack_ext"),
    "deepgemm": ("deep_gemm",),
    "tilelang": ("tilelang", "z3", "sglang_tilelang.py"),
    "sglang-topk": ("sglang_topk",),
    "flashinfer": ("flashinfer",),
    "flashmla": ("flash_mla", "sglang_dequant.py", "sglang_kv_layout.py"),
    "sglang-splitk": ("sglang_splitk",),
    "sglang-portable": ("sglang_portable.py",),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the peers go; beside it FOLDER.tar.xz")
    parser.add_argument("--only", choices=("index", "attention"), default="index", help="whose peers (default: index)")
    options = parser.parse_args()
    folder = options.folder.resolve()
    if options.only == "index" and shutil.which("nvcc") is None:
        print("peers.py: no nvcc on PATH; assemble on a machine with the CUDA 13.0 toolkit", file=sys.stderr)
        return 2
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        assemble = assemble_index if options.only == "index" else assemble_attention
        assemble(folder, Path(temporary))
    archive = pack(folder)
    for peer, names in PARTS.items():
        size = sum(file.stat().st_size for name in names for file in files(folder / name))
        if size:
            print(f"{peer:24} {size / 2**20:7.1f} MiB")
    print(f"{archive.name:24} {archive.stat().st_size / 2**20:7.1f} MiB")
    return 0


def assemble_index(folder: Path, wheels: Path) -> None:
    for requirement, left_out in INDEX_WHEELS.items():
        unpack(download(requirement, wheels), folder, left_out)
    (folder / "z3/lib/libz3.so.4.15").unlink(missing_ok=True)
    (folder / "z3/lib/libz3.so.4.15").symlink_to("libz3.so")
    take_sglang(download(SGLANG, wheels, "3.11"), folder)
    build_sglang(folder)
    build_flashinfer(folder, wheels)


def assemble_attention(folder: Path, wheels: Path) -> None:
    for requirement, left_out in ATTENTION_WHEELS.items():
        unpack(download(requirement, wheels), folder, left_out)
    take_sglang_attention(download(SGLANG, wheels, "3.11"), folder)


def download(requirement: str, wheels: Path, python: str = PYTHON) -> Path:
    """The wheel of `requirement` in a folder of its own."""
    target = wheels / requirement.replace("==", "-")
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "-d",
        str(target),
    ]
    command += ["--python-version", python, "--implementation", "cp"]
    for abi in (f"cp{python.replace('.', '')}", "abi3", "none"):
        command += ["--abi", abi]
    for platform in (*(f"manylinux_{version}" for version in PLATFORMS), "manylinux2014", "manylinux1"):
        command += ["--platform", f"{platform}_x86_64"]
    subprocess.run([*command, requirement], check=True)
    return next(target.glob("*.whl"))


def unpack(wheel: Path, folder: Path, left_out: tuple[str, ...] = ()) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if not name.startswith(left_out)])


def take_sglang(wheel: Path, folder: Path) -> None:
    """The sources of its top-k kernels, and its TileLang indexer as one module without the rest of SGLang."""
    base, topk = "sglang/kernels/jit/", folder / "sglang_topk"
    wanted = ("include/sgl_kernel/", "csrc/deepseek_v4/topk_v", "csrc/occupancy/")
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            inside = name.removeprefix(base)
            if inside != name and inside.startswith(wanted) and not name.endswith("/"):
                (topk / inside).parent.mkdir(parents=True, exist_ok=True)
                (topk / inside).write_bytes(archive.read(name))
        tilelang = archive.read("sglang/kernels/ops/attention/dsa/tilelang_kernel.py").decode()
    shutil.copy(Path(__file__).parent / "carried/sglang_topk.py", topk / "__init__.py")
    instead = {
        "from sglang.kernels.ops.quantization.fp8_kernel import is_fp8_fnuz\n": "is_fp8_fnuz = lambda: False\n",
        "from sglang.srt.utils import is_gfx95_supported, is_hip\n": "is_gfx95_supported = is_hip = lambda: False\n",
    }
    (folder / "sglang_tilelang.py").write_text(without_sglang(tilelang, instead, "its TileLang indexer"))


def take_sglang_attention(wheel: Path, folder: Path) -> None:
    """Its Triton kernels of attention over index lists, and the one that makes a prefill's bf16 copy, without SGLang."""
    base = "sglang/kernels/ops/attention/"
    splitk = base + "dsv4/triton_sparse_decode/"
    (folder / "sglang_splitk").mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(wheel) as archive:
        (folder / "sglang_portable.py").write_bytes(archive.read(base + "flash_mla_sm120_triton.py"))
        (folder / "sglang_kv_layout.py").write_bytes(archive.read(base + "dsv4/kv_layout.py"))
        for name, instead in {
            "__init__.py": {splitk.rstrip("/").replace("/", "."): "sglang_splitk"},
            "triton_mla_kernels_decode_optimized.py": {},
            "triton_mla_kernels_decode_fused.py": {
                "from sglang.srt.utils.common import is_gfx942_supported\n": "is_gfx942_supported = lambda: False\n"
            },
        }.items():
            text = without_sglang(archive.read(splitk + name).decode(), instead, f"its split-K kernel ({name})")
            (folder / "sglang_splitk" / name).write_text(text)
        instead = {
            "from sglang.kernels.jit.utils import get_jit_cuda_arch, is_hip_runtime\n": "is_hip_runtime = lambda: False\n",
            "from sglang.kernels.ops.attention.dsv4.kv_layout import": "from sglang_kv_layout import",
            "from sglang.kernels.ops.quantization.fp8_kernel import is_fp8_fnuz\n": "is_fp8_fnuz = lambda: False\n",
            "from sglang.srt.utils import is_gfx95_supported\n": "",
        }
        text = without_sglang(archive.read(base + "dsv4/dequant_k_cache.py").decode(), instead, "its bf16 copy")
        (folder / "sglang_dequant.py").write_text(text)


def without_sglang(text: str, instead: Mapping[str, str], what: str) -> str:
    """`text` with each of `instead` replaced. SystemExit where one is not there: another version."""
    for old, new in instead.items():
        if old not in text:
            raise SystemExit(f"peers.py: {SGLANG} changed, {what} no longer has: {old.strip()}")
        text = text.replace(old, new)
    return text


def build_sglang(folder: Path) -> None:
    spec = importlib.util.spec_from_file_location("sglang_topk", folder / "sglang_topk/__init__.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in ("probe", "topk_v1", *(f"topk_v2_{eight}_{sixteen}" for eight, sixteen in module.LIKELY_CLUSTERS)):
        module.build(name)


def build_flashinfer(folder: Path, wheels: Path) -> None:
    """Its top-k module where FlashInfer looks for ahead-of-time builds: its own build takes minutes."""
    library = folder / "flashinfer/data/aot/topk/topk.so"
    # The package's own __init__ imports every kernel family and what they need; top-k needs none of it.
    (folder / "flashinfer/__init__.py").write_text("from .version import __version__ as __version__\n")
    if library.exists():
        return
    library.parent.mkdir(parents=True, exist_ok=True)
    sources = wheels / "sources"
    unpack(wheels_of(FLASHINFER, wheels), sources)
    unpack(download(CURAND, wheels), sources)
    data, tvm_ffi = sources / "flashinfer/data", folder / "tvm_ffi"
    command = ["nvcc", "-shared", "-Xcompiler", "-fPIC", "-gencode=arch=compute_90a,code=sm_90a", *FLASHINFER_FLAGS]
    command += [f"-I{data / 'cccl' / part}" for part in ("cub", "libcudacxx/include", "thrust")]
    include = (data / "include", data / "csrc", data / "spdlog/include", sources / "nvidia/cu13/include")
    for path in (*include, tvm_ffi / "include", tvm_ffi / "3rdparty/dlpack/include"):
        command += ["-isystem", str(path)]
    names = ("topk.cu", "flashinfer_topk_binding.cu", "flashinfer_fast_topk_clusters_binding.cu")
    command += [str(data / "csrc" / name) for name in names]
    print("compiling FlashInfer's top-k (minutes)", file=sys.stderr)
    subprocess.run([*command, f"-L{tvm_ffi / 'lib'}", "-ltvm_ffi", "-lcudart", "-o", str(library)], check=True)


def wheels_of(requirement: str, wheels: Path) -> Path:
    return next((wheels / requirement.replace("==", "-")).glob("*.whl"))


def pack(folder: Path) -> Path:
    archive = folder.with_name(folder.name + ".tar.xz")
    with tarfile.open(archive, "w:xz", preset=6) as out:
        out.add(folder, folder.name, filter=lambda member: None if "__pycache__" in member.name else member)
    return archive


def files(path: Path) -> list[Path]:
    return [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file() and not file.is_symlink()]


if __name__ == "__main__":
    sys.exit(main())
