"""The kernels there are: every room of `thalweg.ops` offers the variants of its triton.py and of files for an architecture."""

import functools
import importlib
import pkgutil
from pathlib import Path

from thalweg import ops
from thalweg.ops.cuda import CudaVariant
from thalweg.ops.hardware import Hardware
from thalweg.ops.variants import KernelVariant

_FILES = ("hopper", "triton")
Variant = KernelVariant | CudaVariant


def kernel_modules() -> list[str]:
    """The dotted names of the rooms' modules of kernels. Found, not listed: a new room cannot be forgotten."""
    rooms = [module for module in pkgutil.iter_modules(ops.__path__, "thalweg.ops.") if module.ispkg]
    folder = Path(ops.__path__[0])
    return [
        f"{room.name}.{file}"
        for room in rooms
        for file in _FILES
        if (folder / room.name.rpartition(".")[2] / f"{file}.py").exists()
    ]


@functools.cache
def variants(module: str, hardware: Hardware) -> dict[str, Variant]:
    """What `module` can choose on `hardware`, by name. Raises ValueError for a name given twice."""
    found: dict[str, Variant] = {}
    for variant in importlib.import_module(module).variants(hardware):
        if variant.name in found:
            raise ValueError(f"{module}: two variants on {hardware.name} are named {variant.name!r}")
        found[variant.name] = variant
    return found
