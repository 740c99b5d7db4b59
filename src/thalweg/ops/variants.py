"""A kernel in one configuration that its room can choose: what a launch passes, and what the compile suite compiles.

A room with Triton kernels offers `variants(hardware) -> Iterable[KernelVariant]` in its triton.py: every configuration it
can choose on that hardware.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

# Triton's types of pointers to what activations and norm weights are made of, and the same in names of variants.
FLOAT_POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}
FLOAT_NAMES = {dtype: pointer.removeprefix("*") for dtype, pointer in FLOAT_POINTERS.items()}


def packed(tensor: torch.Tensor) -> torch.Tensor:
    """As kernels read it: the last dimension side by side, any distance in the others."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


@dataclass(frozen=True)
class KernelVariant:
    """One configuration of one kernel.

    `signature` gives the parameters of `kernel`, a @triton.jit function, their Triton types ("*fp8e4nv", "*fp32", "i32",
    "i64"), `constexprs` gives those that are constants their values. `divisible_by_16` names the pointers (bytes) and integers
    that Triton may assume divisible by 16, as its launcher finds them to be.
    """

    name: str  # unique in the room: "mqa_logits/fp8/block128/rows4"
    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    divisible_by_16: tuple[str, ...] = ()
    num_warps: int = 4
    num_stages: int = 1
    max_registers: int | None = None  # a limit below the architecture's, so that more programs fit a multiprocessor
    overlaps: bool = (
        False  # may be launched while the kernel before it runs, for whose end it waits itself (from sm_90 on)
    )
    representative: bool = False  # compiled by default, not only with --all
    matrix: bool = False  # holds a matrix product, which must reach the tensor cores

    def options(self) -> dict[str, Any]:
        """The compiler's options, which a launch passes as they are: kernel[grid](..., **variant.options())."""
        # Fused multiply-add by choice: Triton's default is about to change.
        options: dict[str, Any] = {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True}
        if self.max_registers is not None:
            options["maxnreg"] = self.max_registers
        if self.overlaps:
            options["launch_pdl"] = True
        return options

    def launch(self, grid: tuple[int, ...], *args: Any) -> None:
        """Launches the kernel in this configuration; args: its parameters up to the constexprs."""
        self.kernel[grid](*args, **self.constexprs, **self.options())
