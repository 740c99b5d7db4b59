"""Compiles a kernel for Ampere or Ada and assembles that PTX for Hopper.

PTX for an older architecture is valid for every later one. Triton's choices (layouts, matrix instructions, how e4m3 is decoded,
copies to shared memory) are in the PTX; registers are allotted and instructions ordered for the card that runs it.
"""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thalweg.kernels import compiler
from thalweg.ops.hardware import by_architecture
from tools.foreign.wanted import Wanted

RUNS_ON = "sm_90"
FOREIGN = ("sm_80", "sm_86", "sm_89")  # whose PTX Hopper takes
_KINDS = {"u64": "l", "u32": "i", "f32": "f"}  # parameters in PTX, as `ops.cuda` packs them; pointers are p


@dataclass(frozen=True)
class Assembled:
    """Machine code for Hopper of a kernel compiled for another architecture, and how it is launched."""

    code: bytes
    entry: str
    kinds: str  # of the parameters, a letter each, as `CudaVariant.signature` has them; the last are `scratch`
    scratch: int  # pointers that Triton appends (global and profile scratch), which this code does not use: null
    threads: int
    shared_memory: int  # bytes of a block
    matrix: dict[str, int]  # matrix instructions in the PTX
    report: str  # the assembler's, one line


def assemble(wanted: Wanted) -> Assembled:
    """Compiles and assembles. Raises ValueError for what cannot be carried, RuntimeError with the assembler's words."""
    card = by_architecture(wanted.architecture)
    if card.name not in FOREIGN:
        raise ValueError(f"{card.name}: its code cannot run on {RUNS_ON}; possible: {', '.join(FOREIGN)}")
    compiled = compiler.compile_triton(wanted.variant(), card)
    ptx, metadata = compiled.asm["ptx"], compiled.metadata
    if metadata.shared > card.shared_memory:
        raise ValueError(
            f"{wanted.name}: {metadata.shared:,} bytes of shared memory, {card.name} has {card.shared_memory:,}"
        )
    for size in ("global_scratch_size", "profile_scratch_size"):
        if getattr(metadata, size, 0):
            raise ValueError(f"{wanted.name}: needs {getattr(metadata, size)} bytes of {size[:-5]}: not carried")
    kinds = parameters(ptx)
    declared = "".join("p" if kind[0] == "*" else {"i32": "i", "i64": "l", "fp32": "f"}[kind]
                       for kind in wanted.signature.values())  # fmt: skip
    scratch = len(kinds) - len(declared)
    if not kinds.startswith(declared) or set(kinds[len(declared) :]) - {"p"}:
        raise ValueError(f"{wanted.name}: parameters {kinds} in PTX, {declared} in its signature")
    code, report = _ptxas(ptx)
    return Assembled(
        code=code,
        entry=metadata.name,
        kinds=kinds,
        scratch=scratch,
        threads=metadata.num_warps * metadata.warp_size,
        shared_memory=metadata.shared,
        matrix=compiler.matrix_instructions(ptx),
        report=report,
    )


def parameters(ptx: str) -> str:
    """The kinds of the parameters of the one entry in `ptx`."""
    entries = re.findall(r"\.visible \.entry \w+\((.*?)\n\)", ptx, re.DOTALL)
    if len(entries) != 1:
        raise ValueError(f"{len(entries)} kernels in PTX, not one")
    found = re.findall(r"\.param \.(\w+)( \.ptr)?", entries[0])
    return "".join("p" if pointer else _KINDS[kind] for kind, pointer in found)


def architecture_of(code: bytes) -> str:
    """The architecture that machine code (an ELF file) is for, by the flags in its header."""
    if code[:4] != b"\x7fELF":
        raise ValueError("machine code that is no ELF file")
    flags = int.from_bytes(code[48:52], "little")
    # Until ABI 7 the architecture stands in the lowest byte, from ABI 8 on in the second.
    return f"sm_{(flags >> 8) & 0xFF if code[8] >= 8 else flags & 0xFF}"


def _ptxas(ptx: str) -> tuple[bytes, str]:
    with tempfile.TemporaryDirectory(prefix="thalweg-foreign-") as folder:
        source, target = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        command = [_assembler(), "-v", f"--gpu-name={RUNS_ON}", str(source), "-o", str(target)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"ptxas: {(done.stderr or done.stdout).strip()}")
        registers = re.search(r"Used (\d+) registers", done.stderr)
        spills = sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", done.stderr)))
        return target.read_bytes(), f"{registers.group(1) if registers else '?'} registers, {spills} bytes spilled"


def _assembler() -> str:
    """ptxas of Triton's package."""
    from triton import knobs

    tool: Any = knobs.nvidia.ptxas
    return str(tool.path)
