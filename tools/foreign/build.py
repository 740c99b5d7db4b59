"""What to compile, and compiling it in several processes."""

import contextlib
import io
import json
import multiprocessing
import os
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from thalweg.kernels import compiler, rooms
from thalweg.ops.hardware import by_architecture
from thalweg.ops.variants import KernelVariant
from tools.foreign.assemble import Assembled, assemble
from tools.foreign.wanted import Wanted, from_json, wanted


def choose(architecture: str, every: bool, containing: str = "") -> list[Wanted]:
    """The Triton kernels that the rooms choose on `architecture`: the representative ones, or `every` one.

    Each twice: under the assumptions that its variant declares, and under none, for tensors that are not aligned.
    """
    card = by_architecture(architecture)
    chosen = [
        variant
        for module in rooms.kernel_modules()
        for variant in rooms.variants(module, card).values()
        if isinstance(variant, KernelVariant) and (every or variant.representative) and containing in variant.name
    ]
    return [wanted(variant, architecture, assumed) for variant in chosen for assumed in (variant.divisible_by_16, ())]


def read_list(file: Path, architecture: str) -> list[Wanted]:
    """Those of `architecture` in a list of kernels that a run missed (launch.py writes it: one a line)."""
    found = [from_json(json.loads(line)) for line in file.read_text().splitlines()]
    return [each for each in found if each.architecture == architecture]


def assemble_all(chosen: Sequence[Wanted], processes: int | None = None) -> Iterator[Assembled]:
    """Assembles in that order, in so many processes (default: one a core). The first failure is raised."""
    processes = min(processes or len(os.sched_getaffinity(0)), max(1, len(chosen)))
    context = multiprocessing.get_context("forkserver")
    with (
        tempfile.TemporaryDirectory(prefix="thalweg-foreign-") as folder,
        ProcessPoolExecutor(processes, context, compiler.use_cache, (folder,)) as pool,
    ):
        try:
            yield from pool.map(quietly, chosen)
        finally:
            pool.shutdown(cancel_futures=True)


def quietly(each: Wanted) -> Assembled:
    """`assemble` without what ptxas says of the architecture that is left."""
    with contextlib.redirect_stdout(io.StringIO()):
        return assemble(each)
