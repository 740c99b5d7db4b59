"""Is what a call returned right? Held to float64 on the same bytes, by FlashMLA's own bounds. Cheap: rows are sampled."""

import math

import torch

from thalweg.kernels.bench.attention.inputs import Inputs
from thalweg.kernels.bench.benchmark import Wrong
from thalweg.ops.sparse_mla import sparse_mla

ENTRIES_CHECKED = 2**15  # rows x entries held to float64 (two rows at least)
ABSOLUTE, RELATIVE = 1e-3, 2.01 / 128  # an element of the result is within one of them
COSINE = 5e-6  # 1 - 2<x, y> / (|x|^2 + |y|^2) over all that was checked
LSE_ABSOLUTE, LSE_RELATIVE = 1e-6, 8.01 / 65536
LSE_NAMES = ("lse", "lse_log2", "lse_with_sink")  # natural and without the sink; in base 2; with the sink in it


def sample_rows(inputs: Inputs) -> torch.Tensor:
    """Row numbers int64: all of them, or as many as are cheap, the first and the last among them."""
    rows = inputs.case.rows
    between = 1 + torch.randperm(max(0, rows - 2))[: max(0, ENTRIES_CHECKED // inputs.case.entries - 2)]
    return torch.cat([torch.tensor([0, rows - 1]), between]).unique().to(inputs.q.device)


def exact(inputs: Inputs, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [rows, H, 512], lse [rows, H]) float32, computed in float64, of the sampled rows."""
    extra = None
    if inputs.extra is not None:
        cache, indices, lengths = inputs.extra
        extra = (cache, indices[rows], lengths[rows])
    args = (inputs.q[rows].float(), inputs.cache, inputs.indices[rows], inputs.lengths[rows], inputs.sink, extra)
    return sparse_mla(*args, scale=inputs.scale, implementation="reference")


def check(inputs: Inputs, outputs: dict[str, torch.Tensor], op: str) -> tuple[float, int]:
    """(error, rows checked); the error is relative to the largest magnitude of a row's head. Raises Wrong."""
    out = outputs["out"]
    shape = (inputs.case.rows, inputs.case.heads, 512)
    if out.shape != shape or out.dtype != torch.bfloat16:
        raise Wrong(f"a result of {out.dtype} {tuple(out.shape)}, needs torch.bfloat16 {shape}")
    for name, tensor in outputs.items():
        finite = torch.isfinite(tensor)
        if not bool(finite.all()):
            raise Wrong(f"{int((~finite).sum())} of {tensor.numel()} of {name} are not finite or were not written")
    rows = sample_rows(inputs)
    wanted, lse = (tensor.double() for tensor in exact(inputs, rows))
    given = out[rows].double()
    difference = (given - wanted).abs()
    off = (difference > ABSOLUTE) & (difference > RELATIVE * wanted.abs())
    if bool(off.any()):
        raise Wrong(f"{int(off.sum())} of {off.numel()} elements are off, by {float(difference.max()):.1e} at most")
    cosine = float(1 - 2 * (given * wanted).sum() / (given.square().sum() + wanted.square().sum()))
    if cosine > COSINE:
        raise Wrong(f"the cosine distance is {cosine:.1e}, allowed {COSINE:.0e}")
    for name in filter(outputs.__contains__, LSE_NAMES):
        _check_lse(name, outputs[name][rows].double(), lse, inputs.sink.double())
    largest = wanted.abs().amax(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
    return float((difference.amax(dim=-1) / largest).max()), rows.numel()


def _check_lse(name: str, given: torch.Tensor, natural: torch.Tensor, sink: torch.Tensor) -> None:
    wanted = {
        "lse": natural,
        "lse_log2": natural / math.log(2),
        "lse_with_sink": torch.logaddexp(natural, sink.expand_as(natural)),
    }[name]
    if given.shape != wanted.shape:
        raise Wrong(f"{name} of shape {tuple(given.shape)}, needs {tuple(wanted.shape)}")
    difference = (given - wanted).abs()
    if bool(((difference > LSE_ABSOLUTE) & (difference > LSE_RELATIVE * wanted.abs())).any()):
        raise Wrong(f"{name} is off by {float(difference.max()):.1e}, allowed {LSE_RELATIVE:.1e} of it")
