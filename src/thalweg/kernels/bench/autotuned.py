"""Peers that autotune: Triton compiles a configuration when its turn to be timed comes, which is minutes for a large kernel."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import triton
from triton.runtime.autotuner import Autotuner


def compile_at_once(call: Callable[[], object]) -> None:
    """Compiles what the autotuned kernels of `call` will choose from, on all cores; none of them is launched.

    What does not compile is left to the autotuner, which meets it again and does not choose it.
    """

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        self.warmup(*args, grid=grid, **kwargs)

    run = Autotuner.run
    with ThreadPoolExecutor(os.cpu_count()) as threads, triton.AsyncCompileMode(threads, ignore_errors=True):
        Autotuner.run = compile_only
        try:
            call()
        finally:
            Autotuner.run = run
