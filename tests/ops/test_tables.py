"""Tables of configurations as files: what launches take from them, and what is no table."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from thalweg.errors import UserError
from thalweg.ops import hardware, tables
from thalweg.ops.sparse_mla import choice

ONE = {"heads": 16, "block": 32, "warps": 4, "stages": 3, "resident": 2, "max_registers": None}
CARD = hardware.by_architecture("sm_86")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(tables.VARIABLE, str(tmp_path))
    choice._measured.cache_clear()
    return tmp_path


def write(folder: Path, rows: Any, triton: str | None = None, architecture: str = "sm_86") -> None:
    content = {"triton": triton or hardware.triton_version(), "choices": {"v4": rows}}
    (folder / f"sparse_mla.{architecture}.json").write_text(json.dumps(content))


def test_a_card_takes_its_own_table_and_others_their_default(folder: Path) -> None:
    write(folder, [ONE])
    assert choice.all_choices(CARD, "v4") == (choice.Choice(16, 32, 4, 3, 2),)
    assert choice.all_choices(CARD, "mla_bf16") == choice._DEFAULT["mla_bf16"]
    for other in ("sm_80", "sm_120"):
        assert choice.all_choices(hardware.by_architecture(other), "v4") == choice._DEFAULT["v4"]


def test_a_measured_table_goes_before_what_stands_in_the_source(folder: Path) -> None:
    write(folder, [ONE], architecture="sm_90")
    hopper = hardware.by_architecture("sm_90")
    assert choice.all_choices(hopper, "v4") == (choice.Choice(16, 32, 4, 3, 2),)
    assert choice.untuned(hopper, "v4") != choice.all_choices(hopper, "v4")


def test_the_compile_suite_compiles_what_the_table_chooses(folder: Path) -> None:
    from thalweg.ops.sparse_mla.triton import variants

    write(folder, [ONE])
    v4 = [variant.name for variant in variants(CARD) if variant.name.startswith("sparse_mla/v4")]
    assert v4 and all("heads16/block32/warps4/stages3" in name for name in v4)


def test_a_table_of_another_triton_is_not_used_and_that_is_said(folder: Path) -> None:
    write(folder, [ONE], triton="3.1.0")
    with pytest.warns(RuntimeWarning, match=r"made with triton 3\.1\.0, this is .*: not used"):
        assert choice.all_choices(CARD, "v4") == choice._DEFAULT["v4"]
    with warnings.catch_warnings():  # once
        warnings.simplefilter("error")
        choice.all_choices(CARD, "v4")


@pytest.mark.parametrize(
    ("rows", "what"),
    [
        ([{**ONE, "block": 48}], "needs powers of two"),
        ([{**ONE, "heads": 8}], "needs powers of two for heads and block, from 16 on"),
        ([{**ONE, "warps": 0}], "needs whole numbers above 0"),
        ([{**ONE, "stages": "2"}], "needs whole numbers above 0"),
        ([{**ONE, "colour": 1}], "needs heads, block, warps, stages, resident, max_registers"),
        ([ONE, ONE], "by rising number of heads"),
        ([], "needs one at least"),
    ],
)
def test_a_table_that_no_kernel_can_be_made_of_is_refused(folder: Path, rows: Any, what: str) -> None:
    write(folder, rows)
    with pytest.raises(UserError, match=f"sparse_mla.sm_86.json, v4: .*{what}"):
        choice.all_choices(CARD, "v4")


def test_a_file_that_is_no_table_and_a_folder_that_is_none_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "sparse_mla.sm_86.json").write_text("{}")
    with pytest.raises(UserError, match="not a table of `thalweg kernels tune`"):
        choice.all_choices(CARD, "v4")
    monkeypatch.setenv(tables.VARIABLE, str(folder / "none"))
    with pytest.raises(UserError, match=r"THALWEG_TABLES=.*none: no such folder"):
        choice.all_choices(CARD, "v4")
