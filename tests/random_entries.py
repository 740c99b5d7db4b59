"""The negative control of the indexer: as many entries as it would choose, drawn blindly."""

from collections.abc import Callable

import torch


def random_entries(seed: int) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """What stands in for `thalweg.models.deepseek_v4.indexer.index_topk`; the draws follow from the seed."""
    generator = torch.Generator().manual_seed(seed)

    def choose(
        q: torch.Tensor,
        cache: torch.Tensor,
        weights: torch.Tensor,
        lengths: torch.Tensor,
        page_table: torch.Tensor,
        k: int,
        row_to_request: torch.Tensor,
        page_slots: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        indices = torch.full((len(lengths), k), -1)
        for row, length in enumerate(lengths.tolist()):
            drawn = torch.randperm(length, generator=generator)[:k]
            indices[row, : len(drawn)] = drawn
        pages = page_table[row_to_request.unsqueeze(1), indices.clamp(min=0) // page_slots]
        slots = torch.where(indices >= 0, pages * page_slots + indices % page_slots, -1)
        return indices.int(), slots.int()

    return choose
