"""Runs Triton's kernels from a bundle: what a launch would compile for this GPU is code of Ampere or Ada in its place.

Whatever the bundle has not is an error, and a line in a list that `python -m tools.foreign --want` reads; or, on request, it is
compiled and assembled in the same way here. Nothing falls back on this GPU's own code.
"""

import functools
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from thalweg.errors import UserError
from thalweg.ops import cuda, hardware
from thalweg.ops.cuda import CudaVariant
from thalweg.ops.hardware import Hardware
from thalweg.ops.variants import KernelVariant
from tools.foreign.assemble import RUNS_ON, Assembled, assemble
from tools.foreign.bundle import Bundle, Entry
from tools.foreign.wanted import Wanted, wanted

_POINTERS = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.uint8: "*u8", torch.int32: "*i32",
    torch.float8_e4m3fn: "*fp8e4nv",
}  # fmt: skip


class Missing(AssertionError):
    """A kernel that was launched and that the bundle has not."""


@dataclass
class Launcher:
    """Launches from a bundle, and what it launched.

    `missing`: a file to which kernels that are not in the bundle are added, a line each; `compiles`: they are compiled instead.
    """

    bundle: Bundle
    missing: Path | None = None
    compiles: bool = False
    launched: Counter[str] = field(default_factory=Counter)  # by the variants' names
    compiled: list[Wanted] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The implementation's: `thalweg@sm_80`."""
        return f"thalweg@{self.bundle.architecture}"

    def launch(self, variant: KernelVariant, grid: tuple[int, ...], args: tuple[Any, ...]) -> None:
        """Raises Missing, or TypeError for arguments of other types than the variant declares."""
        declared = zip(variant.signature.items(), args, strict=True)
        args = tuple(as_declared(variant.name, name, kind, arg) for (name, kind), arg in declared)
        assumed = [name for name, arg in zip(variant.signature, args, strict=True) if divisible(arg)]
        how = self._find(wanted(variant, self.bundle.architecture, assumed))
        index = cuda.device_of(args)
        with torch.cuda.device(index):
            function = _loaded(how.code, how.entry, how.shared_memory, index)
            across, down = grid if len(grid) > 1 else (grid[0], 1)
            scratch = [None] * how.scratch
            cuda.launch(function, (across, down), how.threads, how.shared_memory, how.kinds, (*args, *scratch))
        self.launched[variant.name] += 1

    def summary(self) -> str:
        """What was launched, in one line."""
        here = f", {len(self.compiled)} compiled here" if self.compiles else ""
        return f"{self.name}: {self.launched.total():,} launches of {len(self.launched)} kernel variants{here}"

    def _find(self, want: Wanted) -> Assembled:
        found = self.bundle.find(want)
        if found is None:
            if not self.compiles:
                report(self.missing, want)
                what = f"{want.name}, {', '.join(want.assumed) or 'nothing'} divisible by 16"
                raise Missing(f"{what}: not in {self.bundle.folder} ({len(self.bundle)} kernels)")
            found = Entry(want, assemble(want))
            self.bundle.add(found)
            self.compiled.append(want)
        return found.assembled


@contextmanager
def installed(launcher: Launcher) -> Iterator[None]:
    """Within it, kernels are chosen as on the bundle's architecture and launched by `launcher`.

    Raises UserError where no Hopper GPU is.
    """
    bundle = launcher.bundle
    reason = cuda.unsupported(torch.device("cuda" if torch.cuda.is_available() else "cpu"), RUNS_ON)
    if reason is not None:
        raise UserError(f"{bundle.folder}: machine code for {RUNS_ON}: {reason}")
    card = hardware.by_architecture(bundle.architecture)
    theirs = (hardware.of_device, KernelVariant.launch, CudaVariant.launch)

    def of_device(device: torch.device) -> Hardware:
        return card if device.type == "cuda" else theirs[0](device)

    def launch(self: KernelVariant, grid: tuple[int, ...], *args: Any) -> None:
        launcher.launch(self, grid, args)

    def refuse(self: CudaVariant, *args: Any, **options: Any) -> None:
        raise AssertionError(f"{self.name}: CUDA C++ for another card than {bundle.architecture}")

    def put(choosing: Any, launching: Any, of_cuda: Any) -> None:
        for owner, name, function in (
            (hardware, "of_device", choosing),
            (KernelVariant, "launch", launching),
            (CudaVariant, "launch", of_cuda),
        ):
            setattr(owner, name, function)

    put(of_device, launch, refuse)
    try:
        yield
    finally:
        put(*theirs)


def as_declared(kernel: str, name: str, kind: str, arg: Any) -> Any:
    """The argument as the signature has it. Integers of 64 bits are inputs: a copy of 32 bits with the same strides."""
    if isinstance(arg, torch.Tensor):
        if arg.dtype == torch.int64 and kind == "*i32":
            narrow = torch.empty_strided(arg.shape, arg.stride(), dtype=torch.int32, device=arg.device)
            return narrow.copy_(arg.clamp(-(2**31), 2**31 - 1))
        given = _POINTERS.get(arg.dtype, str(arg.dtype))
    else:
        given = "fp32" if isinstance(arg, float) else kind if isinstance(arg, int) and kind in ("i32", "i64") else "?"
    if given != kind:
        raise TypeError(f"{kernel}: {name} is {given}, its signature says {kind}")
    return arg


def divisible(arg: Any) -> bool:
    """Whether Triton's launcher would take it to be divisible by 16."""
    value = arg.data_ptr() if isinstance(arg, torch.Tensor) else arg
    return isinstance(value, int) and value % 16 == 0


def report(missing: Path | None, want: Wanted) -> None:
    """Adds a kernel to the list of those that were missed."""
    if missing is not None:
        with missing.open("a") as file:
            file.write(json.dumps(asdict(want)) + "\n")


@functools.cache
def _loaded(code: bytes, entry: str, shared_memory: int, index: int) -> Any:
    return cuda.load(code, entry, shared_memory)
