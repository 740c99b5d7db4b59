"""What an architecture offers to the Triton kernels, and whether they can run on a device.

No import of triton at the top: `thalweg.ops` is complete, with the references, where there is none.
"""

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from thalweg.errors import UserError

KIB = 1024
INTERPRETED_AS = "sm_90"  # whose choices the interpreter runs (TRITON_INTERPRET=1); tests set others
INTERPRETED_MULTIPROCESSORS = 4  # the interpreter runs programs one after the other: small grids


@dataclass(frozen=True)
class Hardware:
    """One architecture under the installed Triton. The number of multiprocessors is a card's: `multiprocessors(device)`."""

    name: str  # "sm_90", "gfx942"
    backend: str  # Triton's name of the compiler: "cuda" or "hip"
    capability: tuple[int, int]  # as torch reports it: (9, 0); only comparable within one backend
    warp_size: int
    shared_memory: int  # bytes that one block can use
    max_registers: int  # of 32 bits, per thread
    fp8_conversion: bool  # e4m3 <-> float16 by instructions
    fp8_dot: bool  # matrix products of e4m3 without a detour over float16

    @property
    def e4m3_to_f16(self) -> str:
        """How kernels here decode e4m3: the constexpr of `ops.device.e4m3.e4m3_to_f16`."""
        if self.fp8_conversion:
            return "hardware"
        return "packed" if self.backend == "cuda" else "arithmetic"


@dataclass(frozen=True)
class _Facts:
    """An architecture over the versions of Triton: fp8 gives the first version that has it, None where none does.

    Found by compiling with triton 3.6.0, 3.7.1, 3.8.0 and 3.9.0; shared memory from the vendors' guides.
    """

    capability: tuple[int, int]
    shared_memory: int
    conversion_since: tuple[int, int] | None = None
    dot_since: tuple[int, int] | None = None


# sm_80 and sm_86 have no e4m3 instructions, and Triton refuses the type there. gfx942's e4m3 has another bias.
_ARCHITECTURES = {
    "sm_80": _Facts((8, 0), 163 * KIB),
    "sm_86": _Facts((8, 6), 99 * KIB),
    "sm_89": _Facts((8, 9), 99 * KIB, (3, 6), (3, 6)),
    "sm_90": _Facts((9, 0), 227 * KIB, (3, 6), (3, 6)),
    "sm_100": _Facts((10, 0), 227 * KIB, (3, 6), (3, 6)),
    "sm_120": _Facts((12, 0), 99 * KIB, (3, 6), (3, 6)),
    "sm_121": _Facts((12, 1), 99 * KIB, (3, 6), (3, 8)),  # until 3.7 its fp8 products are lowered to float16
    "gfx942": _Facts((9, 4), 64 * KIB),
    "gfx950": _Facts((9, 5), 160 * KIB, (3, 7), (3, 6)),
}
NVIDIA = tuple(name for name in _ARCHITECTURES if name.startswith("sm_"))
AMD = tuple(name for name in _ARCHITECTURES if name.startswith("gfx"))  # compiled, not measured


@functools.cache
def by_architecture(name: str) -> Hardware:
    """The architecture `name` under the installed Triton. Raises UserError for an unknown one, or without triton."""
    facts = _ARCHITECTURES.get(name)
    if facts is None:
        raise UserError(f"architecture {name!r}: not known; there are: {', '.join(_ARCHITECTURES)}")
    problem = _triton_missing()
    if problem is not None:
        raise UserError(f"architecture {name}: {problem}")
    major, minor = triton_version().split(".")[:2]
    version = (int(major), int(minor))
    nvidia = name in NVIDIA
    return Hardware(
        name=name,
        backend="cuda" if nvidia else "hip",
        capability=facts.capability,
        warp_size=32 if nvidia else 64,
        shared_memory=facts.shared_memory,
        max_registers=255 if nvidia else 512,
        fp8_conversion=facts.conversion_since is not None and version >= facts.conversion_since,
        fp8_dot=facts.dot_since is not None and version >= facts.dot_since,
    )


def of_device(device: torch.device) -> Hardware:
    """The hardware of a GPU; of the CPU under TRITON_INTERPRET=1, `INTERPRETED_AS`. Raises UserError where kernels cannot run."""
    reason = triton_unsupported(device)
    if reason is not None:
        raise UserError(f"Triton kernels on {device}: {reason}")
    return by_architecture(INTERPRETED_AS if device.type == "cpu" else _architecture(_index(device)))


def multiprocessors(device: torch.device) -> int:
    """How many multiprocessors (SMs, compute units) the card has, for grids that divide the real work."""
    if device.type == "cpu":
        return INTERPRETED_MULTIPROCESSORS
    return _properties(_index(device)).multi_processor_count


def triton_unsupported(device: torch.device) -> str | None:
    """Why Triton kernels cannot run on `device`, or None: what rooms register their implementation with."""
    problem = _triton_missing()
    if problem is not None:
        return problem
    if device.type == "cpu" and interpreting():
        return None
    if device.type != "cuda":
        return "needs a GPU"
    name = _architecture(_index(device))
    if name not in _ARCHITECTURES:
        return f"no kernels for {name}; there are for {', '.join(_ARCHITECTURES)}"
    return None


def triton_avoided(device: torch.device) -> str | None:
    """Why Triton kernels run on `device` only where somebody forces them, or None."""
    if device.type == "cpu":
        return "interpreted there (TRITON_INTERPRET=1), for tests: must be forced"
    return None


def triton_unproven(device: torch.device) -> str | None:
    """As `triton_avoided`, of kernels whose tests have not all passed on a GPU."""
    return triton_avoided(device) or "not all of its tests have passed on a GPU yet: must be forced"


@functools.cache
def _triton_missing() -> str | None:
    try:
        import triton  # noqa: F401
    except ImportError as error:
        return f"triton cannot be imported ({error})"
    return None


def triton_version() -> str:
    """The installed version of triton: "3.9.0". Needs triton."""
    import triton

    return triton.__version__


def interpreting() -> bool:
    """Whether kernels are interpreted in this process (TRITON_INTERPRET=1). Needs triton."""
    import triton

    return bool(triton.knobs.runtime.interpret)


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


@functools.cache
def _properties(index: int):
    return torch.cuda.get_device_properties(index)


@functools.cache
def _architecture(index: int) -> str:
    properties = _properties(index)
    if torch.version.hip is not None:
        return properties.gcnArchName.partition(":")[0]  # "gfx942:sramecc+:xnack-"
    return f"sm_{properties.major}{properties.minor}"


def on_first_call(module: str, function: str) -> Callable[..., Any]:
    """`function` of `module`, which is imported when it is first called: kernels' modules import triton."""

    def call(*args: Any) -> Any:
        return getattr(importlib.import_module(module), function)(*args)

    return call
