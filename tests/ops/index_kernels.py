"""What the tests of the indexer's kernels share. They run on the GPU where there is one, else interpreted on the CPU."""

import pytest
import torch

from tests.ops.builders import NAN
from tests.ops.index_inputs import IndexInputs
from thalweg.ops import mqa_logits
from thalweg.ops.cuda import hopper_unsupported

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SCORING = ["triton", "triton_f16"]
HOPPER = "hopper"
_no_hopper = hopper_unsupported(DEVICE)
# What a GPU may run: also kernels for one architecture, with products of e4m3.
E4M3_ON_A_GPU = [
    "triton",
    pytest.param(HOPPER, marks=pytest.mark.skipif(_no_hopper is not None, reason=str(_no_hopper))),
]
ON_A_GPU = [*E4M3_ON_A_GPU, "triton_f16"]
FEW = 64  # entries of a row whose largest score need not be large: few sums, in which what is added may cancel
UNTOUCHED = 123.0


def tolerance(implementation: str, heads: int = 64) -> float:
    """Of a score, relative to the row's largest magnitude: the contract's for 64 heads.

    The tensor cores' sums of e4m3 products are rounded to some 13 bits; the errors of fewer heads cancel less (largest seen on
    an H200: 3.7e-4 of 64 heads, 6.4e-4 of 16, 5.6e-4 of 1).
    """
    if implementation in ("triton", HOPPER) and DEVICE.type == "cuda":
        return 5e-4 if heads >= 64 else 1e-3
    return 1e-5


def moved(inputs: IndexInputs) -> IndexInputs:
    """The inputs where kernels run."""
    return IndexInputs(*(None if tensor is None else tensor.to(DEVICE) for tensor in vars(inputs).values()))


def check_scores(got: torch.Tensor, want: torch.Tensor, within: float, summed: torch.Tensor | None = None) -> None:
    """`want`'s untouched columns, -inf and NaN in the same places, and all other scores `within` of the row's largest.

    summed: the scores without their weights' signs, to which rows of FEW scores are held instead.
    """
    got, want = got.cpu(), want.cpu()
    scored = want.isfinite() & (want != UNTOUCHED)
    assert torch.equal(got.where(~scored, 0).nan_to_num(nan=7.0), want.where(~scored, 0).nan_to_num(nan=7.0))
    largest = want.where(scored, 0).abs().amax(1, keepdim=True) if want.numel() else want
    if summed is not None and want.numel():
        few = scored.sum(1, keepdim=True) <= FEW
        largest = torch.where(few, summed.cpu().where(scored, 0).abs().amax(1, keepdim=True), largest)
    assert ((got - want).abs().where(scored, 0) <= within * largest).all()


def check_logits(inputs: IndexInputs, implementation: str, clean: bool = False) -> torch.Tensor:
    """mqa_logits as the reference, into a buffer wider than the table; returns what the kernels wrote."""
    there = moved(inputs).arguments()
    width = inputs.page_table.shape[1] * inputs.cache.shape[1] + 5
    poison = NAN if clean else UNTOUCHED
    got, want = (torch.full((len(inputs.lengths), width), poison, device=DEVICE) for _ in range(2))
    assert mqa_logits(**there, out=got, clean=clean, implementation=implementation) is got
    mqa_logits(**there, out=want, clean=clean, implementation="reference")
    summed = torch.full_like(want, poison)
    unsigned = {**there, "weights": there["weights"].abs()}
    mqa_logits(**unsigned, out=summed, clean=clean, implementation="reference")
    check_scores(got, want, tolerance(implementation, inputs.q.shape[1]), summed.nan_to_num(posinf=0, neginf=0))
    return got.cpu()


def in_order(indices: torch.Tensor) -> torch.Tensor:
    """Each row's indices rising, -1 first: selections are sets."""
    return indices.cpu().sort(dim=1).values


def guarded(inputs: IndexInputs) -> IndexInputs:
    """The inputs, each in the middle of a buffer: what is read beside them is not another's."""

    def guard(tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None:
            return None
        size, margin = tensor.numel() * tensor.element_size(), 1 << 14
        middle = torch.full((size + 2 * margin,), 0xFF, dtype=torch.uint8)[margin : margin + size]
        return middle.view(tensor.dtype).view(tensor.shape).copy_(tensor)

    return IndexInputs(*(guard(tensor) for tensor in vars(inputs).values()))


interpreted = pytest.mark.skipif(DEVICE.type == "cuda", reason="accesses are seen where kernels are interpreted")
