"""Checkpoints whose parts fit each other and whose contents no model can run on: one line, not a failure in a step."""

import shutil
from pathlib import Path

import pytest

from tests.models.weights.tiny import V4, random_tensors, stored, write_folder
from thalweg.errors import UserError
from thalweg.models.config import read_config
from thalweg.models.open import open_model
from thalweg.models.weights.expected import expected_tensors

REAL = V4 | {"head_dim": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}


def folder_of(tmp_path: Path, config: dict[str, object], token_experts: int = 0) -> Path:
    """A random checkpoint of `config`, `token_experts` added to every entry of its hash routing."""
    folder = write_folder(tmp_path / "of", config, {})
    tensors = random_tensors(expected_tensors(read_config(folder)))
    shutil.rmtree(folder)
    return write_folder(
        folder, config, stored({n: t + token_experts if "tid2eid" in n else t for n, t in tensors.items()})
    )


def test_the_checkpoint_of_these_tests_opens(tmp_path: Path) -> None:
    assert open_model(folder_of(tmp_path, REAL)).config.head_dim == 512


@pytest.mark.parametrize(("field", "value"), [("head_dim", 256), ("index_head_dim", 64)])
def test_heads_that_no_cache_holds(tmp_path: Path, field: str, value: int) -> None:
    with pytest.raises(UserError, match=f"{field} {value}.*possible are 512 and 128, as the cache formats hold them"):
        open_model(folder_of(tmp_path, REAL | {field: value}))


@pytest.mark.parametrize("added", [1, -1])
def test_hash_routing_to_an_expert_that_is_not_there(tmp_path: Path, added: int) -> None:
    with pytest.raises(UserError, match=r"layers\.0\.ffn\.gate\.tid2eid holds experts .*: this model's are 0 to 3"):
        open_model(folder_of(tmp_path, REAL, added))
