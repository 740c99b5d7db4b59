"""Compiles one variant of a kernel for one architecture, without a GPU, and reads what the assembler says about it."""

import contextlib
import io
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from thalweg.kernels import rooms
from thalweg.ops import cuda
from thalweg.ops.hardware import Hardware, by_architecture
from thalweg.ops.variants import KernelVariant

# What the tensor cores execute, by the instruction's name and the type of its left operand.
_MATRIX_INSTRUCTIONS = {
    "mma.sync": r"\bmma\.sync\.aligned\.m\d+n\d+k\d+\.row\.col(?:\.kind::\w+)?\.\w+\.(\w+)\.\w+\.\w+",
    "wgmma": r"\bwgmma\.mma_async\.sync\.aligned\.m\d+n\d+k\d+\.\w+\.(\w+)\.\w+",
    "tcgen05": r"\btcgen05\.mma[\w.:]*?\.kind::(\w+)",
    "mfma": r"\bv_mfma_\w+?_\d+x\d+x\d+_?(\w+)",
}


@dataclass(frozen=True)
class Compiled:
    """What compiling a kernel variant for an architecture gave. `error`, one line, stands in place of all measures."""

    kernel: str
    architecture: str
    matrix_wanted: bool
    seconds: float = 0.0
    shared_memory: int = 0  # bytes a block
    registers: int = 0  # of 32 bits, a thread
    spills: int = 0  # a thread: bytes stored and loaded (NVIDIA), vector registers (AMD)
    matrix: dict[str, int] = field(default_factory=dict)  # instructions in the code, {"wgmma e4m3": 8}
    notes: tuple[str, ...] = ()  # what the assembler warns of
    notes_are_problems: bool = (
        False  # of code written by hand for the architecture; of Triton's they are its compiler's
    )
    error: str | None = None

    def problems(self) -> list[str]:
        """What stops this kernel from running well on the architecture, one line each; empty where nothing does."""
        where = f"{self.kernel} on {self.architecture}"
        if self.error is not None:
            return [f"{where} does not compile: {self.error}"]
        found = []
        limit = by_architecture(self.architecture).shared_memory
        if self.shared_memory > limit:
            found.append(f"{where} needs {self.shared_memory:,} bytes of shared memory, the limit is {limit:,}")
        if self.spills:
            unit = "registers" if self.architecture.startswith("gfx") else "bytes of registers"
            found.append(f"{where} spills {self.spills:,} {unit} a thread; it may spill none")
        if self.notes_are_problems:
            found += [f"{where}: {note}" for note in self.notes]
        if self.matrix_wanted and not self.matrix:
            found.append(f"{where} has a matrix product and no tensor-core instruction")
        return found


def use_cache(folder: str) -> None:
    """Sets this process up to compile everything anew, below `folder`, and to show what the assembler says."""
    from triton import knobs

    knobs.cache.dir = folder
    knobs.compilation.always_compile = True
    knobs.nvidia.dump_ptxas_log = True


def compile_variant(module: str, name: str, architecture: str) -> Compiled:
    """Compiles variant `name` of the room's `module`. What fails to compile is a result too, with its `error`."""
    hardware = by_architecture(architecture)
    variant = rooms.variants(module, hardware)[name]
    if isinstance(variant, cuda.CudaVariant):
        return _compile_cuda(variant, architecture)
    begin = time.perf_counter()
    compiled, failure = None, ""
    with _captured() as output:
        try:
            compiled = compile_triton(variant, hardware)
        except Exception as error:  # whatever the compiler raises is what this suite is there to report
            failure = _last_line(error)
    seconds = time.perf_counter() - begin
    text = output.getvalue()
    # MLIR and ptxas say more than the exception does; AMD's code generator drops inline assembly with an error, and goes on.
    if written := re.search(r"(?:error|fatal)\s*: (.+)", text):
        failure = written.group(1).strip()
    if compiled is None or failure:
        return Compiled(name, architecture, variant.matrix, seconds, error=failure)
    registers, spills = _of_ptxas(text) if hardware.backend == "cuda" else _of_amdgcn(compiled.asm["amdgcn"])
    return Compiled(
        kernel=name,
        architecture=architecture,
        matrix_wanted=variant.matrix,
        seconds=seconds,
        shared_memory=compiled.metadata.shared,
        registers=registers,
        spills=spills,
        matrix=matrix_instructions(compiled.asm["ptx" if hardware.backend == "cuda" else "amdgcn"]),
        notes=_notes(text),
    )


def _compile_cuda(variant: cuda.CudaVariant, architecture: str) -> Compiled:
    begin = time.perf_counter()
    defines = tuple(variant.defines.items())
    try:
        _code, report = cuda.compile_source(variant.source, defines, architecture)
        assembly = cuda.assembly_of(variant.source, defines, architecture)
    except (ImportError, RuntimeError) as error:
        return Compiled(
            variant.name, architecture, variant.matrix, time.perf_counter() - begin, error=_last_line(error)
        )
    registers, spills = _of_ptxas(report)
    return Compiled(
        kernel=variant.name,
        architecture=architecture,
        matrix_wanted=variant.matrix,
        seconds=time.perf_counter() - begin,
        shared_memory=variant.shared_memory,
        registers=registers,
        spills=spills,
        matrix=matrix_instructions(assembly),
        notes=_notes(report),
        notes_are_problems=True,
    )


def _notes(report: str) -> tuple[str, ...]:
    """What the assembler says that costs time: products that wait for one another, for example."""
    return tuple(re.findall(r"Potential Performance Loss: (.+?)(?: in the function.*)?$", report, re.MULTILINE))


def compile_triton(variant: KernelVariant, hardware: Hardware) -> Any:
    """What `triton.compile` gives of a variant for `hardware`, without a GPU; raises what the compiler raises."""
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = list(variant.kernel.arg_names)
    given = {**variant.signature, **dict.fromkeys(variant.constexprs, "constexpr")}
    if set(given) != set(names):
        missing, unknown = sorted(set(names) - set(given)), sorted(set(given) - set(names))
        raise ValueError(
            f"parameters without a type or value: {missing or 'none'}; unknown to the kernel: {unknown or 'none'}"
        )
    position = {name: (names.index(name),) for name in names}
    source = ASTSource(
        variant.kernel,
        {name: given[name] for name in names},
        {position[name]: value for name, value in variant.constexprs.items()},
        {position[name]: [["tt.divisibility", 16]] for name in variant.divisible_by_16},
    )
    major, minor = hardware.capability
    chip = 10 * major + minor if hardware.backend == "cuda" else hardware.name
    return compile(source, target=GPUTarget(hardware.backend, chip, hardware.warp_size), options=variant.options())


def matrix_instructions(assembly: str) -> dict[str, int]:
    """How many matrix instructions PTX or AMD assembly holds, by kind and operand type: {"mma.sync f16": 16}."""
    counts = Counter(
        f"{kind} {operand}"
        for kind, pattern in _MATRIX_INSTRUCTIONS.items()
        for operand in re.findall(pattern, assembly)
    )
    return dict(sorted(counts.items()))


def _of_ptxas(log: str) -> tuple[int, int]:
    """(registers, bytes spilled) by `ptxas -v`, which Triton runs and logs."""
    registers = [int(count) for count in re.findall(r"Used (\d+) registers", log)]
    if not registers:
        raise RuntimeError(f"the assembler named no registers: {log!r}")
    return max(registers), sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", log)))


def _of_amdgcn(assembly: str) -> tuple[int, int]:
    """(vector registers, those spilled) by the metadata in AMD assembly. Scalar registers spill into vector registers."""
    counts = re.search(r"\.vgpr_count:\s*(\d+)\s+\.vgpr_spill_count:\s*(\d+)", assembly)
    if counts is None:
        raise RuntimeError("the assembly names no vector registers")
    return int(counts.group(1)), int(counts.group(2))


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" ^")]
    return f"{type(error).__name__}: {lines[-1] if lines else 'no reason given'}"


@contextlib.contextmanager
def _captured() -> Iterator[io.StringIO]:
    """Collects what Python prints and what native code writes to stderr: MLIR and ptxas explain themselves there."""
    text = io.StringIO()
    with tempfile.TemporaryFile("w+", errors="replace") as file:
        sys.stderr.flush()
        stderr = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            with contextlib.redirect_stdout(text):
                yield text
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            file.seek(0)
            text.write(file.read())
