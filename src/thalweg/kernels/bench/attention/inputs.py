"""Random inputs for attention over index lists: caches of random rows, and sets of arguments that share no slot of them."""

from dataclasses import dataclass

import torch

from thalweg.kernels.bench.attention import cases
from thalweg.kernels.bench.attention.cases import Case, Decode, Prefill
from thalweg.layouts import sizes, v4, v32

CACHED_BYTES = 60 * 10**6  # the L2 of an H200; sets are rotated until they are twice that
MOST_SETS = 512
MOST_BYTES = 16 * 2**30
WINDOW_PAGE_SLOTS = 256
C4_PAGE_SLOTS = 64
C128_PAGE_SLOTS = 2
V32_PAGE_SLOTS = 64
_SLOTS_AT_ONCE = 2**16
# 448 x 2^-7. Where a v32 scale is a power of two, peers that hold it in bf16 (FlashMLA) lose nothing by that.
_V32_LARGEST = 3.5


@dataclass
class Inputs:
    """Arguments of one call, shapes as in `thalweg.ops.sparse_mla`."""

    case: Case
    q: torch.Tensor
    cache: torch.Tensor
    indices: torch.Tensor
    lengths: torch.Tensor
    sink: torch.Tensor
    extra: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None
    scale: float


def sets(case: Case, ops: list[str], device: torch.device, seed: int) -> list[Inputs]:
    """As many sets for `case` as `number_of_sets` says."""
    return make(case, number_of_sets(case), device, seed)


def number_of_sets(case: Case) -> int:
    """So many that what a call reads does not stay in the L2 between its calls, within reason."""
    least = cases.bytes_moved(case)
    return max(1, min(-(-2 * CACHED_BYTES // least), MOST_SETS, MOST_BYTES // least))


def make(case: Case, count: int, device: torch.device, seed: int) -> list[Inputs]:
    """`count` sets for `case`; the same seed gives the same sets. What a set reads is read by no other."""
    generator = torch.Generator(device).manual_seed(seed)
    if isinstance(case, Decode):
        first, second = _decode_lists(case, count, generator)
    else:
        first, second = _prefill_lists(case, count, generator)
    rows, heads, width = case.rows, case.heads, cases.WIDTH[case.layout]
    made = []
    for number in range(count):
        q = torch.randn(rows, heads, width, device=device, generator=generator).to(torch.bfloat16)
        cache, indices = first[0], first[1][number]
        extra = None if second is None else (second[0], second[1][number], _full(second[1][number]))
        sink = torch.randn(heads, device=device, generator=generator)
        made.append(Inputs(case, q, cache, indices, _full(indices), sink, extra, width**-0.5))
    return made


Lists = tuple[torch.Tensor, torch.Tensor]  # a cache, and int32 [sets, rows, entries] of its slots


def _decode_lists(case: Decode, count: int, generator: torch.Generator) -> tuple[Lists, Lists | None]:
    """Slots at random, none of them twice in all sets."""

    def lists(entries: int, page_slots: int) -> Lists:
        needed = count * case.batch * entries
        cache = _random_cache(case.layout, needed, page_slots, generator)
        return cache, _shuffled_slots(cache, generator)[:needed].view(count, case.batch, entries)

    extra = case.entries - case.window_entries
    first = lists(case.window_entries, WINDOW_PAGE_SLOTS if case.layout == "v4" else V32_PAGE_SLOTS)
    return first, lists(extra, _extra_page_slots(extra)) if extra else None


def _prefill_lists(case: Prefill, count: int, generator: torch.Generator) -> tuple[Lists, Lists | None]:
    """Each row the window before it; of the compressed cache a random choice of its own, or all of it."""
    positions = case.rows + cases.WINDOW - 1
    cache = _random_cache("v4", count * positions, WINDOW_PAGE_SLOTS, generator)
    tokens = _slots_by_position(cache, generator)[: count * positions].view(count, positions)
    first = cache, tokens.unfold(1, cases.WINDOW, 1).contiguous()
    extra = case.entries - cases.WINDOW
    if not extra:
        return first, None
    compressed = _random_cache("v4", count * case.candidates, _extra_page_slots(extra), generator)
    slots = _slots_by_position(compressed, generator)[: count * case.candidates].view(count, case.candidates)
    if extra == case.candidates:
        return first, (compressed, slots.unsqueeze(1).expand(count, case.rows, extra).contiguous())
    chosen = torch.stack([_random_choices(case, extra, one, generator) for one in slots])
    return first, (compressed, chosen)


def _random_choices(case: Prefill, extra: int, slots: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """int32 [rows, extra]: each row's own choice among `slots`."""
    shape = case.rows, slots.numel()
    return slots[torch.rand(shape, device=slots.device, generator=generator).topk(extra, dim=1).indices]


def _extra_page_slots(extra: int) -> int:
    return C4_PAGE_SLOTS if extra <= cases.CSA_ENTRIES else C128_PAGE_SLOTS


def _full(indices: torch.Tensor) -> torch.Tensor:
    return torch.full((indices.shape[0],), indices.shape[1], dtype=torch.int32, device=indices.device)


def _shuffled_slots(cache: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    slots = cache.shape[0] * cache.shape[1]
    return torch.randperm(slots, device=cache.device, generator=generator).to(torch.int32)


def _slots_by_position(cache: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """The slot of every position: in order within a page, pages permuted."""
    pages = torch.randperm(cache.shape[0], device=cache.device, generator=generator)
    within = torch.arange(cache.shape[1], device=cache.device)
    return (pages.unsqueeze(1) * cache.shape[1] + within).flatten().to(torch.int32)


def _random_cache(layout: str, slots: int, page_slots: int, generator: torch.Generator) -> torch.Tensor:
    """A cache of normal rows with `slots` slots and a page more, so that no list is the pool in order."""
    module = v4 if layout == "v4" else v32
    cache = module.allocate(sizes.pages_for(slots, page_slots) + 1, page_slots, generator.device)
    for part in torch.arange(cache.shape[0] * page_slots, device=cache.device).split(_SLOTS_AT_ONCE):
        rows = torch.randn(part.numel(), module.WIDTH, device=cache.device, generator=generator)
        module.write(cache, part, _with_round_scales(rows) if layout == "v32" else rows)
    return cache


def _with_round_scales(rows: torch.Tensor) -> torch.Tensor:
    """The largest of every 128 latent channels becomes 3.5: their scale is a power of two."""
    latent = rows[:, : sizes.LATENT_DIM].clamp(-_V32_LARGEST, _V32_LARGEST).unflatten(1, (-1, sizes.V32_SCALE_GROUP))
    largest = latent.abs().argmax(dim=2, keepdim=True)
    latent = latent.scatter(2, largest, torch.copysign(torch.tensor(_V32_LARGEST), latent.gather(2, largest)))
    return torch.cat([latent.flatten(1), rows[:, sizes.LATENT_DIM :]], dim=1)
