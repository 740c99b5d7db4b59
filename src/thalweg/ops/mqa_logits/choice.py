"""How the kernels that score are configured, by hardware and shape: launches and the compile suite read the same tables."""

from dataclasses import dataclass

import torch

from thalweg.layouts import index_fp8
from thalweg.layouts.registry import layout_of
from thalweg.ops.hardware import Hardware

MOST_HEADS = 64


@dataclass(frozen=True)
class Choice:
    """One configuration of the scoring loop."""

    dot: str  # "fp8", or how e4m3 becomes float16 (Hardware.e4m3_to_f16)
    run_rows: int
    pass_rows: int  # of them in one product
    heads: int  # as the product has them: a power of two
    block: int  # keys of a tile
    warps: int
    stages: int
    per_multiprocessor: int  # programs of the grid
    max_registers: int | None = None

    def constexprs(self) -> dict[str, object]:
        """What the kernels take of it."""
        return {
            "DOT": self.dot,
            "ROWS": self.run_rows,
            "PASS": self.pass_rows,
            "HEADS": self.heads,
            "BLOCK": self.block,
            "STAGES": self.stages,
        }

    def label(self) -> str:
        """For the names of variants."""
        return f"{self.dot}/heads{self.heads}/rows{self.run_rows}/block{self.block}"


def choose(hardware: Hardware, rows: int, requests: int, heads: int, exact: bool) -> Choice:
    """The configuration for `rows` query rows of `heads` heads over `requests` requests; exact: float16 products."""
    per_request = -(-rows // max(1, requests))
    possible = run_rows_of(hardware, exact)
    run_rows = next((most for most in possible if per_request <= most), possible[-1])
    return configure(hardware, run_rows, 1 << max(4, (heads - 1).bit_length()), exact)


def configure(hardware: Hardware, run_rows: int, heads: int, exact: bool) -> Choice:
    """The configuration for runs of `run_rows` rows and a product of `heads` heads."""
    if not _fp8(hardware, exact):
        return Choice(hardware.e4m3_to_f16, run_rows, run_rows, heads, 64, 4, 4, 2)
    if hardware.name != "sm_90":  # not measured
        # The limit is the architecture's: left alone, the assembler of triton 3.9 aims lower on sm_120, and spills.
        return Choice("fp8", run_rows, run_rows, heads, 64, 4, 6, 2, hardware.max_registers)
    pass_rows, programs, registers = {1: (1, 4, 128), 2: (1, 3, 168), 4: (2, 2, None)}[run_rows]
    return Choice("fp8", run_rows, pass_rows, heads, 64, 4, 6, programs, registers)


def run_rows_of(hardware: Hardware, exact: bool) -> tuple[int, ...]:
    """How many rows can be a run: four products side by side need Hopper's registers for operands in shared memory."""
    return (1, 2, 4) if hardware.name == "sm_90" and _fp8(hardware, exact) else (1, 2)


def all_choices(hardware: Hardware) -> list[Choice]:
    """Everything that `choose` can answer on this hardware."""
    return [
        configure(hardware, run_rows, heads, exact)
        for exact in ((False, True) if hardware.fp8_dot else (True,))
        for heads in (16, 32, 64)
        for run_rows in run_rows_of(hardware, exact)
    ]


def _fp8(hardware: Hardware, exact: bool) -> bool:
    return hardware.fp8_dot and not exact


def rejects(q: torch.Tensor, cache: torch.Tensor, page_table: torch.Tensor) -> str | None:
    """Why such queries, keys and tables are not for the kernels, or None."""
    if layout_of(cache) is not index_fp8:
        return f"an {layout_of(cache).NAME} cache, they read index_fp8"
    if cache.stride(0) % 4 or cache.storage_offset() % 4:
        return f"pages {cache.stride(0)} bytes apart at byte {cache.storage_offset()}: the fp32 scales are not aligned"
    if page_table.stride(1) != 1 and page_table.shape[1] > 1:  # a copy would be as wide as the ceiling
        return f"a page table of stride {page_table.stride(1)} along a request, not 1"
    return rejects_queries(q)


def rejects_queries(q: torch.Tensor) -> str | None:
    """Why such queries are not for the kernels, or None."""
    if q.shape[1] > MOST_HEADS:
        return f"{q.shape[1]} heads, they take {MOST_HEADS} at most"
    return None if q.stride(2) == 1 else f"q of stride {q.stride(2)} along a head, not 1"


def rejects_out(out: torch.Tensor) -> str | None:
    """Why the kernels cannot write such logits, or None."""
    return None if out.stride(1) == 1 else f"out of stride {out.stride(1)} along a row, not 1"


def codes_and_scales(cache: torch.Tensor, dot: str) -> tuple[torch.Tensor, torch.Tensor]:
    """An index_fp8 cache as the kernels take it: codes [pages, keys, 128], of e4m3 for fp8 products, and scales [pages, keys]."""
    codes, scales = index_fp8.blocks(cache)
    return as_codes(codes, dot), scales.view(torch.float32)[..., 0]


def as_codes(codes: torch.Tensor, dot: str) -> torch.Tensor:
    """e4m3 or uint8 as fp8 products take it (e4m3), or as the conversion to float16 does (uint8)."""
    return codes.view(torch.float8_e4m3fn if dot == "fp8" else torch.uint8)
