"""`norm_rope_store` where the norm covers the latent and the rotary channels stand outside of it (the MLA family)."""

import pytest
import torch

from thalweg.layouts import exact
from thalweg.ops import norm_rope_store


def test_the_norm_leaves_the_rotary_channels_alone() -> None:
    """One frequency of pi / 2 and position 1 turn a pair (a, b) by a quarter: (-b, a). The others stand still."""
    kv = torch.full((1, 576), 3.0)
    kv[0, 512:514] = torch.tensor([100.0, 7.0])
    frequencies = torch.zeros(32)
    frequencies[0] = torch.pi / 2
    cache = exact.allocate(2, 4, 576)
    norm_rope_store(kv, torch.full((512,), 0.5), frequencies, torch.tensor([1]), cache, torch.tensor([6]), eps=0.0)
    expected = torch.full((576,), 3.0)
    expected[:512] = 0.5  # 3 / sqrt(mean 9) x 0.5
    expected[512:514] = torch.tensor([-7.0, 100.0])
    torch.testing.assert_close(cache[1, 2, 0], expected)
    assert cache.count_nonzero() == 576


def test_more_norm_weights_than_channels_are_refused() -> None:
    cache = exact.allocate(2, 4, 576)
    with pytest.raises(ValueError, match="norm_weight: got 577 channels, kv has 576"):
        norm_rope_store(
            torch.zeros(1, 576), torch.ones(577), torch.zeros(32), torch.tensor([0]), cache, torch.tensor([1])
        )
