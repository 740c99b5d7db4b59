"""A cache tensor says itself which layout it has; what fits none is refused with the possible ones."""

import pytest
import torch

from thalweg.layouts import exact, index_fp8, v4
from thalweg.layouts.registry import layout_of


@pytest.mark.parametrize(
    ("cache", "name"),
    [
        (torch.empty(2, 256, 1, 584, dtype=torch.uint8), "v4"),
        (torch.empty(2, 64, 1, 132, dtype=torch.uint8), "index_fp8"),
        (torch.empty(2, 64, 1, 656, dtype=torch.uint8), "v32"),
        (torch.empty(2, 1, 1, 576, dtype=torch.bfloat16), "mla_bf16"),
        (torch.empty(2, 64, 1, 77), "exact"),
    ],
)
def test_dtype_and_width_name_the_layout(cache: torch.Tensor, name: str) -> None:
    assert name == layout_of(cache).NAME


@pytest.mark.parametrize(
    "cache",
    [
        torch.empty(2, 64, 1, 583, dtype=torch.uint8),
        torch.empty(2, 64, 1, 584, dtype=torch.int8),
        torch.empty(2, 64, 1, 576, dtype=torch.float16),
        torch.empty((), dtype=torch.uint8),
    ],
)
def test_an_unknown_row_is_refused_naming_what_exists(cache: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"v4.*index_fp8.*v32.*mla_bf16.*exact"):
        layout_of(cache)


@pytest.mark.parametrize(
    "cache",
    [
        torch.empty(2, 64, 584, dtype=torch.uint8),
        torch.empty(2, 64, 2, 584, dtype=torch.uint8),
        torch.empty(128, 584, dtype=torch.uint8),
        torch.empty(64),
        torch.empty(()),
    ],
)
def test_a_cache_that_is_not_four_dimensional_with_one_head_is_refused(cache: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"\[pages, page_slots, 1, "):
        layout_of(cache)


@pytest.mark.parametrize("layout", [v4, index_fp8])
def test_bytes_that_are_not_packed_inside_a_page_are_refused(layout) -> None:
    width = layout.allocate(1, 4).shape[3]
    storage = torch.empty(2, 8, 1, width, dtype=torch.uint8)
    with pytest.raises(ValueError, match="packed"):
        layout_of(storage[:, ::2])
    with pytest.raises(ValueError, match="packed"):
        layout_of(torch.empty(2, width, 1, 4, dtype=torch.uint8).transpose(1, 3))


def test_pages_that_overlap_are_refused() -> None:
    with pytest.raises(ValueError, match="page stride"):
        layout_of(v4.allocate(1, 4).expand(3, 4, 1, 584))
    with pytest.raises(ValueError, match="page stride"):
        layout_of(exact.allocate(4, 4, 16).as_strided((4, 4, 1, 16), (16, 16, 16, 1)))


def test_a_single_page_may_have_any_stride() -> None:
    assert layout_of(v4.allocate(4, 4)[2:3]).NAME == "v4"
    assert layout_of(torch.empty(584, dtype=torch.uint8).as_strided((1, 1, 1, 584), (0, 0, 0, 1))).NAME == "v4"
