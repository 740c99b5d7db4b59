"""The Hadamard rotation on both sides leaves scores alone; on one side it is a bug that no configuration can ask for."""

import dataclasses
from pathlib import Path

import pytest
import torch

from tests.models.test_config import FLASH
from tests.ops.builders import frequencies, randn, seeded
from thalweg.errors import UserError
from thalweg.layouts import exact
from thalweg.models.config import parse_config
from thalweg.ops import CompressPlan, compress, mqa_logits, rope_quantise_index_q


def scores(rotate_q: bool, rotate_keys: bool) -> torch.Tensor:
    """Scores of 3 queries over 12 compressed index keys through the operations, exact layout."""
    g = seeded(1)
    kv, gate, ape, norm = randn(g, 48, 256), randn(g, 48, 256), randn(g, 4, 256), randn(g, 128)
    positions = torch.arange(48)
    slots = torch.where(positions % 4 == 3, 16 + positions // 4, -1)
    cache, state = exact.allocate(2, 16, 128), torch.zeros(1, 8, 2, 256)
    plan = CompressPlan(positions, torch.zeros(48, dtype=torch.long), slots)
    compress(kv, gate, state, ape, plan, norm, frequencies(), cache, ratio=4, hadamard=rotate_keys)
    q, weights = rope_quantise_index_q(
        randn(g, 3, 16, 128),
        randn(g, 3, 16),
        frequencies(),
        torch.tensor([47, 40, 20]),
        hadamard=rotate_q,
        quantise=False,
    )
    table = torch.ones(3, 1, dtype=torch.int32)
    return mqa_logits(q, cache, weights, torch.full((3,), 12), table)[:, :12].double()


def test_rotating_q_and_keys_leaves_the_scores_unchanged_and_one_of_them_does_not() -> None:
    neither, both = scores(False, False), scores(True, True)
    assert (both - neither).abs().max() < 1e-5 * neither.abs().max()
    for one_sided in (scores(True, False), scores(False, True)):
        assert (one_sided - neither).abs().max() > 0.1 * neither.abs().max()


def test_the_configuration_has_one_switch_for_both_sides() -> None:
    """Field case 13: Hadamard on one side only must be impossible to configure.

    What it would do to retrieval: tests/engine/test_retrieval.py.
    """
    for value in (True, False):
        config = parse_config({**FLASH, "index_hadamard": value}, Path("config.json"))
        fields = [field.name for field in dataclasses.fields(config) if "hadamard" in field.name]
        assert fields == ["index_hadamard"] and config.index_hadamard is value
    assert parse_config(FLASH, Path("config.json")).index_hadamard is True


@pytest.mark.parametrize("value", ["q", "k", ["q"], {"q": True, "k": False}, 1])
def test_anything_but_true_or_false_is_refused(value: object) -> None:
    with pytest.raises(UserError, match="index_hadamard"):
        parse_config({**FLASH, "index_hadamard": value}, Path("config.json"))
