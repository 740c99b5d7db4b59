"""SGLang's V4 top-k, v1 and v2, without SGLang: travels beside the sources that `benchmarks/peers.py` takes from its wheel.

`benchmarks/peers.py` copies this file into the folder of peers as the package `sglang_topk`. The functions have the names
and arguments of `sglang.kernels.ops.attention.dsv4.topk`, and the kernels are compiled with SGLang's own flags, so that a
benchmark can take either. v2 is compiled for the number of clusters that its own probe finds on the card.
"""

import functools
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Clusters that fit an H200, which differ from chip to chip: (of 8 blocks at 2 a multiprocessor, of 16 at 1), built ahead.
LIKELY_CLUSTERS = ((30, 6), (30, 7), (31, 7), (32, 8))
_HEADERS = ("container/tensor.h", "dtype.h", "error.h", "extra/c_env_api.h", "function.h")
_SOURCES = {
    "probe": ("csrc/occupancy/cluster_probe.cuh", {"get_max_active_clusters": "get_max_active_clusters"}),
    "topk_v1": ("csrc/deepseek_v4/topk_v1.cuh", {"topk_transform": "TopKKernel<true>::transform"}),
    "topk_v2": (
        "csrc/deepseek_v4/topk_v2.cuh",
        {"topk_transform_paged": "TopKKernel<true>::transform_paged", "topk_plan": "TopKKernel<true>::plan"},
    ),
}


def topk_transform_paged(scores, seq_lens, page_tables, out_page_indices, page_size, out_raw_indices=None):
    """v1: k up to 1,024; every row one block."""
    _module("topk_v1").topk_transform(scores, seq_lens, page_tables, out_page_indices, page_size, out_raw_indices)


def plan_topk_v2(seq_lens, static_threshold=-1, *, out=None):
    """The routing plan of v2 for these lengths."""
    metadata = seq_lens.new_empty(seq_lens.shape[0] + 1, 2) if out is None else out
    _module(_v2()).topk_plan(seq_lens, metadata, static_threshold)
    return metadata


def topk_transform_paged_v2(scores, seq_lens, page_tables, out_page_indices, page_size, metadata, out_raw_indices=None):
    """v2: long rows are spread over clusters of blocks."""
    _module(_v2()).topk_transform_paged(
        scores, seq_lens, page_tables, out_page_indices, page_size, metadata, out_raw_indices
    )


def build(name: str) -> Path:
    """The shared library of `probe`, `topk_v1` or `topk_v2_<clusters of 8>_<clusters of 16>`, compiled if it is not there."""
    library = HERE / f"{name}.so"
    if library.exists():
        return library
    source, exports = _SOURCES["topk_v2" if name.startswith("topk_v2") else name]
    lines = [f"#include <tvm/ffi/{header}>" for header in _HEADERS]
    lines += [f'#include "{HERE / source}"', "namespace sglang {"]
    lines += [f"TVM_FFI_DLL_EXPORT_TYPED_FUNC({export}, ({function}));" for export, function in exports.items()]
    unit = HERE / f"{name}.cu"
    unit.write_text("\n".join([*lines, "}  // namespace sglang", ""]))
    defines = ["-DSGL_CUDA_ARCH=900"]
    if name.startswith("topk_v2"):
        clusters = name.split("_")[2:]
        defines += [f"-DSGL_TOPK_V2_MAX_C8_OCC2={clusters[0]}", f"-DSGL_TOPK_V2_MAX_C16_OCC1={clusters[1]}"]
    tvm_ffi = HERE.parent / "tvm_ffi"
    command = ["nvcc", "-shared", "-Xcompiler", "-fPIC", "-gencode=arch=compute_90a,code=sm_90a", "-std=c++20", "-O3"]
    command += ["--expt-relaxed-constexpr", *defines, f"-I{HERE / 'include'}", f"-I{tvm_ffi / 'include'}"]
    command += [f"-I{tvm_ffi / '3rdparty/dlpack/include'}", str(unit), f"-L{tvm_ffi / 'lib'}", "-ltvm_ffi", "-lcudart"]
    print(f"compiling {library.name}", file=sys.stderr)
    subprocess.run([*command, "-o", str(library)], check=True)
    return library


@functools.cache
def _module(name: str):
    import tvm_ffi

    return tvm_ffi.load_module(str(build(name)))


@functools.cache
def _v2() -> str:
    probe = _module("probe")
    return f"topk_v2_{probe.get_max_active_clusters(8, 2)}_{probe.get_max_active_clusters(16, 1)}"
