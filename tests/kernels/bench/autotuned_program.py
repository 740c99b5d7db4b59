"""Compiles what an autotuner would choose from, for an H200 that is not there: its driver names the card and launches nothing.

Run by test_autotuned.py in a process of its own, where kernels are compiled and not interpreted. Prints what came of it as JSON.
"""

import json

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime.autotuner import Autotuner

from thalweg.kernels.bench.autotuned import compile_at_once


class NoCard:
    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


@triton.autotune([triton.Config({"BLOCK": block}) for block in (32, 64, 96)], key=["count"])
@triton.jit
def doubled(values, count, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # refused for 96, which is no power of two
    inside = offsets < count
    tl.store(values + offsets, tl.load(values + offsets, mask=inside) * 2, mask=inside)


def main() -> None:
    triton.runtime.driver.set_active(NoCard())
    values, run = torch.ones(100), Autotuner.run
    compile_at_once(lambda: doubled[(1,)](values, 100))
    compiled, chosen = len(doubled.fn.device_caches[0][0]), len(doubled.cache)
    try:
        compile_at_once(lambda: 1 // 0)
        raised = False
    except ZeroDivisionError:
        raised = True
    print(
        json.dumps(
            {
                "compiled": compiled,
                "chosen": chosen,
                "untouched": bool((values == 1).all()),
                "raised": raised,
                "restored": Autotuner.run is run,
            }
        )
    )


if __name__ == "__main__":
    main()
