"""Compiles every kernel for every architecture wanted, in several processes; the order of the results is that of the jobs."""

import multiprocessing
import os
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

from thalweg.errors import UserError
from thalweg.kernels import compiler, rooms
from thalweg.kernels.compiler import Compiled
from thalweg.ops import hardware


@dataclass(frozen=True)
class Job:
    """One variant for one architecture."""

    module: str
    kernel: str
    architecture: str
    matrix: bool


def jobs(architectures: Sequence[str], every: bool, containing: str = "") -> list[Job]:
    """What to compile: the representative variants, or `every` one; of kernels whose name holds `containing`.

    Raises UserError for an unknown architecture, without triton, under the interpreter, and where nothing is left to compile.
    """
    found = [hardware.by_architecture(name) for name in dict.fromkeys(architectures)]
    if hardware.interpreting():
        raise UserError("TRITON_INTERPRET=1 is set: kernels would be interpreted, not compiled; unset it")
    chosen = [
        Job(module, variant.name, card.name, variant.matrix)
        for module in rooms.kernel_modules()
        for card in found
        for variant in rooms.variants(module, card).values()
        if (every or variant.representative) and containing in variant.name
    ]
    if not chosen:
        what = f"holds {containing!r} in its name" if containing else "is there"
        raise UserError(f"no kernel variant {what} on {', '.join(card.name for card in found)}: nothing to compile")
    return sorted(chosen, key=lambda job: (job.module, job.kernel))  # stable: a kernel's architectures stand together


def compile_all(chosen: Sequence[Job], processes: int | None = None) -> Iterator[Compiled]:
    """Yields one result a job, in their order, as they come. `processes`: by default one a core this process may use."""
    processes = processes or len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="thalweg-kernels-") as folder:
        remaining = list(chosen)
        while remaining:
            done = 0
            try:
                for result in _in_one_pool(remaining, min(processes, len(remaining)), folder):
                    yield result
                    done += 1
            except BrokenProcessPool:  # some compilation killed its process: the next one says whether it was this
                yield _alone(remaining[done], folder)
                done += 1
            remaining = remaining[done:]


def _in_one_pool(chosen: Sequence[Job], processes: int, folder: str) -> Iterator[Compiled]:
    # Not forked from here: this process may have threads. The server of forks imports torch and triton once.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["thalweg.kernels.compiler", "triton"])
    with ProcessPoolExecutor(processes, context, compiler.use_cache, (folder,)) as pool:
        try:
            yield from pool.map(_run, chosen)
        finally:
            pool.shutdown(cancel_futures=True)


def _alone(job: Job, folder: str) -> Compiled:
    """The result of a job in a process of its own; that this process died is one too."""
    try:
        return next(_in_one_pool([job], 1, folder))
    except BrokenProcessPool:
        return Compiled(job.kernel, job.architecture, job.matrix, error="the compiler crashed")


def _run(job: Job) -> Compiled:
    return compiler.compile_variant(job.module, job.kernel, job.architecture)
