"""What tests of both oracles watch in the model."""

import pytest
import torch

from thalweg.models.deepseek_v4 import indexer


@pytest.fixture
def choices(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Fills with the entries that thalweg's indexers choose, one tensor a call."""
    recorded: list[torch.Tensor] = []
    real = indexer.index_topk

    def recording(*arguments: object) -> tuple[torch.Tensor, torch.Tensor]:
        indices, slots = real(*arguments)
        recorded.append(indices)
        return indices, slots

    monkeypatch.setattr(indexer, "index_topk", recording)
    return recorded
