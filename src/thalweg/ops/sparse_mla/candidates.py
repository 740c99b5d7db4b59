"""What `thalweg kernels tune` tries, as variants of the attention kernel for the compile suite; no launch chooses among them."""

import dataclasses
from collections.abc import Iterable

from thalweg.layouts import v4, v32
from thalweg.ops import hardware
from thalweg.ops.sparse_mla import choice as choices
from thalweg.ops.sparse_mla.triton import attend_variant, can_overlap
from thalweg.ops.variants import KernelVariant

LAYOUTS = (v4.NAME, v32.NAME)


def name_of(layout: str, choice: choices.Choice, split: bool) -> str:
    """The name of its variant."""
    return f"sparse_mla/candidate/{layout}/{choice.full_label()}/{'split' if split else 'whole'}"


def variants(hardware: hardware.Hardware) -> Iterable[KernelVariant]:
    """Every candidate as it is timed, with lengths and a sink; with splits and without."""
    for layout in LAYOUTS:
        for choice in choices.CANDIDATES:
            for split in (False, True):
                how = (choice, layout, hardware.e4m3_to_f16, True, True, True, split)
                variant = attend_variant(*how, overlap=can_overlap(hardware))
                yield dataclasses.replace(variant, name=name_of(layout, choice, split))
