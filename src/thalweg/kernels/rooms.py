"""The kernels there are: every room of `thalweg.ops` with a triton.py offers its variants."""

import functools
import importlib
import pkgutil
from pathlib import Path

from thalweg import ops
from thalweg.ops.hardware import Hardware
from thalweg.ops.variants import KernelVariant


def kernel_modules() -> list[str]:
    """The dotted names of the rooms' modules of kernels. Found, not listed: a new room cannot be forgotten."""
    rooms = [module for module in pkgutil.iter_modules(ops.__path__, "thalweg.ops.") if module.ispkg]
    folder = Path(ops.__path__[0])
    return [f"{room.name}.triton" for room in rooms if (folder / room.name.rpartition(".")[2] / "triton.py").exists()]


@functools.cache
def variants(module: str, hardware: Hardware) -> dict[str, KernelVariant]:
    """What `module` can choose on `hardware`, by name. Raises ValueError for a name given twice."""
    found: dict[str, KernelVariant] = {}
    for variant in importlib.import_module(module).variants(hardware):
        if variant.name in found:
            raise ValueError(f"{module}: two variants on {hardware.name} are named {variant.name!r}")
        found[variant.name] = variant
    return found
