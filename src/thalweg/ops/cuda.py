"""Kernels in CUDA C++: compiled by NVRTC for one architecture when they are first launched, launched through the driver.

For architecture files (hopper.cu) whose means Triton does not offer. NVRTC and the driver come with NVIDIA's cuda-bindings,
which torch's own builds for CUDA 12.9 and later require.
"""

import ctypes
import functools
import importlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_FOLDER = Path(__file__).parent
_TYPES = {"i": ctypes.c_int32, "l": ctypes.c_int64, "f": ctypes.c_float}


@dataclass(frozen=True)
class CudaVariant:
    """One configuration of one kernel: what a launch passes, and what the compile suite compiles.

    `source`: a file below thalweg/ops; `defines`: its macros. `signature` names the kernel's parameters and gives their types: p
    pointer (a tensor or None), i int32, l int64, f float, m tensor map. `shared_memory`: bytes of a block, checked by the source.
    """

    name: str  # unique in the room
    source: str
    entry: str
    defines: Mapping[str, int | str]
    signature: Mapping[str, str]
    threads: int
    shared_memory: int
    overlaps: bool = False  # may be launched while the kernel before it runs, for whose end it waits itself
    representative: bool = False  # compiled by default, not only with --all
    matrix: bool = False  # holds a matrix product, which must reach the tensor cores

    def launch(self, blocks: tuple[int, int] | int, *args: Any, cluster: int = 1) -> None:
        """Launches so many blocks (x, y), in clusters of `cluster`, on the current stream of the first tensor's device."""
        index = device_of(args)
        with torch.cuda.device(index):
            function = _function(self, index)
            launch(
                function,
                blocks,
                self.threads,
                self.shared_memory,
                self.signature.values(),
                args,
                cluster,
                self.overlaps,
            )

    def __hash__(self) -> int:
        return hash((self.source, self.name))


def unsupported(device: torch.device, architecture: str) -> str | None:
    """Why kernels for `architecture` ("sm_90") cannot run on `device`, or None."""
    if device.type != "cuda" or torch.version.cuda is None:
        return f"needs an NVIDIA GPU of {architecture}"
    major, minor = torch.cuda.get_device_capability(device)
    if f"sm_{major}{minor}" != architecture:
        return f"written for {architecture}, this is sm_{major}{minor}"
    return compiler_missing()


def hopper_unsupported(device: torch.device) -> str | None:
    """Why kernels for Hopper cannot run on `device`, or None: what rooms register such kernels with."""
    return unsupported(device, "sm_90")


@functools.cache
def compiler_missing() -> str | None:
    """Why CUDA C++ cannot be compiled here, or None."""
    try:
        _checked(_bindings("nvrtc").nvrtcVersion())
    except (ImportError, RuntimeError) as error:
        return f"NVRTC cannot be loaded ({str(error).splitlines()[0]}); pip install cuda-bindings nvidia-cuda-nvrtc"
    return None


@functools.cache
def compile_source(source: str, defines: tuple[tuple[str, int | str], ...], architecture: str) -> tuple[bytes, str]:
    """(machine code, the assembler's report) of a file below thalweg/ops for "sm_90". Raises RuntimeError with NVRTC's log."""
    nvrtc = _bindings("nvrtc")
    # `a`: the architecture's own instructions, which no other executes.
    program, report = _compile(source, defines, f"{architecture}a")
    code = _room(_checked(nvrtc.nvrtcGetCUBINSize(program)))
    _checked(nvrtc.nvrtcGetCUBIN(program, code))
    _checked(nvrtc.nvrtcDestroyProgram(program))
    return code, report


def assembly_of(source: str, defines: tuple[tuple[str, int | str], ...], architecture: str) -> str:
    """The PTX of a file below thalweg/ops. Raises RuntimeError with NVRTC's log."""
    nvrtc = _bindings("nvrtc")
    program, _report = _compile(source, defines, architecture.replace("sm_", "compute_") + "a")
    text = _room(_checked(nvrtc.nvrtcGetPTXSize(program)))
    _checked(nvrtc.nvrtcGetPTX(program, text))
    _checked(nvrtc.nvrtcDestroyProgram(program))
    return text.decode().rstrip("\0")


def _compile(source: str, defines: tuple[tuple[str, int | str], ...], target: str) -> tuple[Any, str]:
    nvrtc = _bindings("nvrtc")
    program = _checked(nvrtc.nvrtcCreateProgram((_FOLDER / source).read_bytes(), source.encode(), 0, [], []))
    options = [f"-arch={target}", "-std=c++17", f"-I{_FOLDER}"]
    options += ["--ptxas-options=-v"] if target.startswith("sm_") else []
    options += [f"-D{name}={value}" for name, value in defines]
    status = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])[0]
    log = _room(_checked(nvrtc.nvrtcGetProgramLogSize(program)))
    _checked(nvrtc.nvrtcGetProgramLog(program, log))
    report = log.decode(errors="replace").rstrip("\0\n")
    if int(status) != 0:
        first = next((line for line in report.splitlines() if "error" in line), str(status))
        raise RuntimeError(f"{report}\n{source} does not compile: {first}")
    return program, report


@functools.cache
def _function(variant: CudaVariant, index: int) -> Any:
    major, minor = torch.cuda.get_device_capability(index)
    code, _report = compile_source(variant.source, tuple(variant.defines.items()), f"sm_{major}{minor}")
    return load(code, variant.entry, variant.shared_memory)


def load(code: bytes, entry: str, shared_memory: int) -> Any:
    """The kernel `entry` of machine code, loaded on the current device, and allowed its bytes of shared memory."""
    driver = _bindings("driver")
    module = _checked(driver.cuModuleLoadData(code))
    function = _checked(driver.cuModuleGetFunction(module, entry.encode()))
    most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    _checked(driver.cuFuncSetAttribute(function, most, shared_memory))
    return function


def launch(
    function: Any,
    blocks: tuple[int, int] | int,
    threads: int,
    shared_memory: int,
    kinds: Iterable[str],
    args: Sequence[Any],
    cluster: int = 1,
    overlaps: bool = False,
) -> None:
    """Launches a loaded kernel on the current stream of the current device; `kinds` as in `CudaVariant.signature`."""
    driver = _bindings("driver")
    values = [_packed(kind, arg) for kind, arg in zip(kinds, args, strict=True)]
    addresses = (ctypes.c_void_p * len(values))(
        *(value.getPtr() if hasattr(value, "getPtr") else ctypes.addressof(value) for value in values)
    )
    config = driver.CUlaunchConfig()
    across, down = blocks if isinstance(blocks, tuple) else (blocks, 1)
    config.gridDimX, config.gridDimY, config.gridDimZ = across, down, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = shared_memory
    config.hStream = torch.cuda.current_stream().cuda_stream
    attributes = []
    if cluster > 1:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        attribute.value.clusterDim.x, attribute.value.clusterDim.y, attribute.value.clusterDim.z = cluster, 1, 1
        attributes.append(attribute)
    if overlaps:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        attributes.append(attribute)
    if attributes:
        config.attrs, config.numAttrs = attributes, len(attributes)
    _checked(driver.cuLaunchKernelEx(config, function, ctypes.addressof(addresses), 0))


def device_of(args: Sequence[Any]) -> int:
    """The index of the first tensor's device."""
    device = next(arg.device for arg in args if isinstance(arg, torch.Tensor))
    return torch.cuda.current_device() if device.index is None else device.index


@functools.lru_cache(maxsize=256)
def tensor_map(address: int, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]) -> Any:
    """A map of bytes for the copy engine, 128-byte swizzle: sizes and box from the innermost dimension on, strides (bytes, of
    all dimensions but the innermost) multiples of 16, as the address is."""
    driver = _bindings("driver")
    u32, u64 = driver.cuuint32_t, driver.cuuint64_t
    return _checked(
        driver.cuTensorMapEncodeTiled(
            driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8,
            len(sizes),
            address,
            [u64(size) for size in sizes],
            [u64(stride) for stride in strides],
            [u32(size) for size in box],
            [u32(1)] * len(sizes),
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )


def as_int32(numbers: torch.Tensor) -> torch.Tensor:
    """Lengths or ids as kernels read them; what int32 cannot hold is as far outside as it can be."""
    if numbers.dtype == torch.int64:
        numbers = numbers.clamp(-(2**31), 2**31 - 1).int()
    return numbers.contiguous()


def _room(size: int) -> bytes:
    """Bytes that NVRTC's bindings write into. Two at least: Python has one object for all single bytes of a value."""
    return bytes(max(size, 2))


def _packed(kind: str, arg: Any) -> Any:
    if kind == "m":
        return arg
    if kind == "p":
        return ctypes.c_void_p(None if arg is None else arg.data_ptr())
    return _TYPES[kind](arg)


def _bindings(name: str) -> Any:
    return importlib.import_module(f"cuda.bindings.{name}")


def _checked(answer: tuple[Any, ...]) -> Any:
    """The results of a call of the bindings; raises RuntimeError where its status is an error."""
    status, *results = answer
    if int(status) != 0:
        raise RuntimeError(f"CUDA: {status!r}")
    return results[0] if len(results) == 1 else tuple(results)
