"""Which configurations of the attention kernel a card should have: candidates that fit it, timed at a few points.

The first choice of a table is for up to 16 heads, and for so few rows that all tiles run at once; the last for 64 and 128.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import torch

from thalweg.kernels.bench.attention import checks, inputs
from thalweg.kernels.bench.attention.cases import Decode
from thalweg.kernels.bench.attention.inputs import Inputs
from thalweg.kernels.bench.cases import label
from thalweg.kernels.bench.clock import Call, Outputs
from thalweg.kernels.bench.measure import Clock, one_line
from thalweg.kernels.bench.summary import geomean
from thalweg.kernels.compiler import Compiled
from thalweg.kernels.suite import Job
from thalweg.ops.hardware import Hardware
from thalweg.ops.sparse_mla import candidates
from thalweg.ops.sparse_mla import choice as choices
from thalweg.ops.sparse_mla.choice import Choice

MODULE = "thalweg.ops.sparse_mla.candidates"
BATCHES = (1, 16, 64, 128)
FEW_HEADS, MANY_HEADS = (16,), (64, 128)
ENTRIES = 640
_REGISTERS = 65_536  # of a multiprocessor, on every NVIDIA card here
_RESERVED = 1024  # bytes of shared memory that the system takes of each block; a multiprocessor has so much more

Times = dict[Choice, dict[Decode, float]]  # microseconds; a candidate that is wrong or fails at a point has none
Say = Callable[[str], object]


def jobs(architecture: str, layouts: Sequence[str]) -> list[Job]:
    """What is compiled before anything is timed."""
    return [
        Job(MODULE, candidates.name_of(layout, choice, split), architecture, True)
        for layout, choice, split in itertools.product(layouts, choices.CANDIDATES, (False, True))
    ]


def fitting(card: Hardware, layout: str, compiled: dict[str, Compiled], say: Say) -> list[Choice]:
    """The candidates that compile without spills and within the card's shared memory, with how many are resident."""
    found = []
    for choice in choices.CANDIDATES:
        both = [compiled[candidates.name_of(layout, choice, split)] for split in (False, True)]
        problems = [problem for one in both for problem in one.problems()]
        if problems:
            say(f"left out: {problems[0]}")
            continue
        found.append(dataclasses.replace(choice, resident=min(resident(card, choice, one) for one in both)))
    return found


def resident(card: Hardware, choice: Choice, compiled: Compiled) -> int:
    """How many programs fit a multiprocessor at once, by registers (allotted by eights) and shared memory."""
    registers = -(-compiled.registers // 8) * 8 * card.warp_size * choice.warps
    memory = (card.shared_memory + _RESERVED) // (compiled.shared_memory + _RESERVED)
    return max(1, min(_REGISTERS // registers, memory))


def points(layout: str, heads: Sequence[int]) -> list[Decode]:
    """Where candidates are timed."""
    return [Decode(batch, each, ENTRIES, layout) for each in heads for batch in BATCHES]


def bind(choice: Choice, i: Inputs) -> Call:
    """A call of the kernels in this configuration."""
    from thalweg.ops.sparse_mla.triton import sparse_mla

    cache, indices, lengths = (None, None, None) if i.extra is None else i.extra

    def call() -> Outputs:
        lists = (i.cache, i.indices, i.lengths, i.sink, cache, indices, lengths)
        out, lse = sparse_mla(i.q, *lists, i.scale, False, choice=choice)
        return {"out": out, "lse": lse}

    return call


def measure(found: Sequence[Choice], cases: Sequence[Decode], clock: Clock, seed: int, say: Say) -> Times:
    """Checks and times the candidates; what is wrong gets no time. Raises RuntimeError where the device is lost."""
    times: Times = {choice: {} for choice in found}
    for case in cases:
        sets = inputs.sets(case, ["sparse_mla"], torch.device("cuda"), seed)
        for choice in found:
            calls = [bind(choice, each) for each in sets]
            try:
                checks.check(sets[0], clock.replayed(calls[0]), "sparse_mla")
                times[choice][case] = clock.median_us(calls)
            except Exception as error:  # a candidate that fails is one that is not chosen
                say(f"FAILED {label(case)}: {choice.full_label()}: {one_line(error)}")
                if not clock.usable():
                    raise RuntimeError(f"{choice.full_label()}: the device cannot be used any more") from error
    return times


def best(times: Times, among: Sequence[Choice], cases: Sequence[Decode]) -> Choice | None:
    """The lowest geometric mean over the cases, of those that are right at all of them."""
    complete = [choice for choice in among if all(case in times[choice] for case in cases)]
    return min(complete, key=lambda choice: geomean([times[choice][case] for case in cases]), default=None)


def table(times: Times, layout: str, multiprocessors: int) -> tuple[Choice, ...]:
    """The choices for a layout: one where tiles of 16 heads are best everywhere, else two. Empty where none is right."""
    few, many = points(layout, FEW_HEADS), points(layout, MANY_HEADS)
    small = [choice for choice in times if choice.heads == min(each.heads for each in times)]
    first = best(times, small, few)
    if first is None:
        return ()
    # Where all tiles of the first run at once it is what runs, whatever the last is.
    left = [
        case for case in many if not choices.all_at_once(first, case.heads, case.rows, widths(case), multiprocessors)
    ]
    last = best(times, list(times), left) if left else None
    if last is None or last.heads <= first.heads:
        return (best(times, small, few + left) or first,)
    return first, last


def widths(case: Decode) -> tuple[int, int]:
    """Of the lists, as the operation sees them."""
    return case.window_entries, case.entries - case.window_entries


def lines(times: Times, cases: Sequence[Decode]) -> list[str]:
    """The times as a table, the fastest candidate first."""
    width = max(len(choice.full_label()) for choice in times)
    heads = "".join(f"{f'{case.heads}x{case.batch}':>9}" for case in cases)
    first = f"{'us by heads x batch':<{width}}{heads}  geomean"
    rows = []
    for choice, measured in times.items():
        cells = "".join(f"{measured[case]:>9.2f}" if case in measured else f"{'-':>9}" for case in cases)
        mean = geomean([measured[case] for case in cases]) if all(case in measured for case in cases) else float("inf")
        rows.append((mean, f"{choice.full_label():<{width}}{cells}" + (f"{mean:>9.2f}" if mean < float("inf") else "")))
    return [first, *(row for _, row in sorted(rows))]
