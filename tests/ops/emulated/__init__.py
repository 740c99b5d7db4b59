"""Runs kernels that are CUDA C++ on the CPU, by g++: their own source, with the instructions of Hopper replaced by shim.h."""

import ctypes
import functools
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch

from thalweg.ops import cuda
from thalweg.ops.cuda import CudaVariant

MISSING = None if shutil.which("g++") else "needs g++"
_FOLDER = Path(__file__).parent
_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int, "l": ctypes.c_longlong, "f": ctypes.c_float}
# Functions whose bodies are PTX, and what stands in their place.
_BODIES = {
    "uint4 load_chunk(": "return __ldg((const uint4*)from);",
    "void store_chunk(": "*(uint4*)(memory + to - 1024) = chunk;",
    "void fetch_ahead(": "",
    "void copies_arrive(": "barrier_arrive(barrier);",
    "void copy_chunk(": "*(uint4*)(memory + to - 1024) = __ldg((const uint4*)from);",
    "u32 scaled(": "return scaled_shim(halves, factor);",
    "void decode_four(": "decode_shim(codes, factor, low, high);",
    "void product_scores(": "mma<64>(sums, a, b, add, false);",
    "void product_values(": "mma_of_registers<128>(sums, a, b, add);",
    "void product_more_values(": "mma<192>(sums, a, b, add, true);",
    "void store_matrices(": "store_matrices_shim(to, four);",
    "void load_matrices(": "load_matrices_shim(four, from);",
    "u32 pack_bf16(": "return cvt_bf16x2(high, low);",
    "u32 pack_f16(": "return halves(low, high);",
    "u32 times(": "return cvt_bf16x2(half_at(pair, 1) * by.y, half_at(pair, 0) * by.x);",
    "float power(": "return exp2f(exponent);",
    "u32 thread_again(": "return threadIdx.x;",
}


def launch(variant: CudaVariant, blocks: tuple[int, int], *args: Any, cluster: int = 1) -> None:
    """In place of `CudaVariant.launch`: tensors are on the CPU."""
    values: list[Any] = [ctypes.c_int(number) for number in blocks]
    for kind, arg in zip(variant.signature.values(), args, strict=True):
        values.append(_TYPES[kind](arg.data_ptr() if isinstance(arg, torch.Tensor) else arg))
    _library(variant.source, tuple(variant.defines.items())).launch(*values)


@functools.cache
def _library(source: str, defines: tuple[tuple[str, int | str], ...]) -> ctypes.CDLL:
    room = Path(source).parent.name
    folder = Path(tempfile.mkdtemp(prefix="emulated-"))
    (folder / "kernel.h").write_text(_for_a_cpu((cuda._FOLDER / source).read_text()))
    library = folder / "kernel.so"
    command = ["g++", "-std=c++20", "-O1", "-w", "-fno-strict-aliasing", "-pthread", "-shared", "-fPIC"]
    command += [f"-D{name}={value}" for name, value in defines] + [f"-I{folder}", f"-I{_FOLDER}"]
    done = subprocess.run([*command, str(_FOLDER / f"{room}.cpp"), "-o", str(library)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:2000]
    return ctypes.CDLL(str(library))


def _for_a_cpu(text: str) -> str:
    text = text.replace('#include "device/hopper.cuh"', '#include "shim.h"')
    text = text.replace("extern __shared__ __align__(1024) u8 memory[];", "")
    for start, body in _BODIES.items():
        begin = text.index("{", text.index(start))
        text = text[:begin] + "{ " + body + " }\n" + text[text.index("\n}\n", begin) + 3 :]
    text = re.sub(r'asm volatile\("setmaxnreg[^;]*;"\);', "", text)
    text = re.sub(r'asm volatile\("(griddepcontrol\.\w+);" ::: "memory"\);', "", text)
    assert "asm" not in text, "an instruction that shim.h does not have"
    return text
