"""The scripts as a person calls them, on a machine without a GPU."""

import argparse
import importlib
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
import zipfile
from pathlib import Path

import pytest
import torch

from thalweg.cli import main
from thalweg.kernels.bench import records, verb
from thalweg.kernels.bench.index import pairs
from thalweg.kernels.bench.index.cases import Case

ROOT = Path(__file__).parents[2]


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch):
    """Imports a script of benchmarks/ and gives its main with the arguments set."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))

    def load(name: str, *arguments: object):
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
        return importlib.import_module(name)

    return load


def records_file(folder: Path) -> Path:
    """A run of two batches at three ceilings."""
    made = []
    stamp = {"run": "a", "gpu": "NVIDIA H200"}
    for batch in (1, 64):
        for ceiling in (8192, 131072, 1048576):
            results = [
                {"impl": impl, "op": op, "us": us, "error": 0.0, "variant": "v", "variants": {}}
                | {"checked_rows": 1, "scratch_bytes": 4096, "sets": 1}
                for impl, op, us in (
                    ("thalweg", "index_topk", 5.0),
                    ("deepgemm", "mqa_logits", 6.0),
                    ("flashinfer", "topk", 9.0),
                )
            ]
            made += pairs.records_of(Case(batch, 128, ceiling), results, stamp, None)
    records.merge(folder / "index.jsonl", made)
    return folder / "index.jsonl"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--case", "batch=1,keys=128"), "needs also ceiling"),
        (("--impl", "thalweg,deepgem"), "'deepgem' is unknown; there are: thalweg, deepgemm"),
        (("--peers", "nowhere"), "no such folder"),
        ((), "finds no CUDA device"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, said: str, script, capsys, no_gpu) -> None:
    assert script("index", *arguments).main() == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("arguments", [(), ("--minutes", "2", "--json", "out.jsonl")])
def test_the_verb_says_in_one_line_that_it_needs_a_gpu(
    arguments: tuple[str, ...], tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch, no_gpu
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["kernels", "bench", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.fullmatch(
        r"thalweg kernels bench: it times GPU kernels, and torch \S+ finds no CUDA device here; .*\n", captured.err
    )
    assert not list(tmp_path.iterdir())


def test_the_verb_hands_its_minutes_and_its_file_over(monkeypatch: pytest.MonkeyPatch) -> None:
    handed: list[argparse.Namespace] = []
    monkeypatch.setattr(verb, "main", lambda options: handed.append(options) or 1)
    assert main(["kernels", "bench", "--minutes", "2", "--json", "out.jsonl"]) == 1
    assert main(["kernels", "bench"]) == 1
    assert [(each.minutes, each.json) for each in handed] == [(2.0, Path("out.jsonl")), (5.0, None)]


def test_an_unknown_option_of_the_verb_is_named_with_the_one_meant(capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["kernels", "bench", "--minuts", "2"])
    assert "thalweg kernels bench: unknown option --minuts; did you mean --minutes?" in capsys.readouterr().err


def test_records_are_summed_up_without_a_gpu(tmp_path: Path, script, capsys) -> None:
    assert script("index", "--summary", records_file(tmp_path)).main() == 0
    said = capsys.readouterr().out
    assert "scratch bytes of index_topk, batch 64" in said
    assert "geomean 3.000 x over 6 points" in said


def test_the_pictures_hold_a_line_for_each_batch_and_its_peers(tmp_path: Path, script) -> None:
    assert script("index_plots", records_file(tmp_path), "--out", tmp_path / "out").main() == 0
    for name, lines in (("index_by_ceiling.svg", 1), ("index_by_keys.svg", 2)):
        picture = ElementTree.parse(tmp_path / "out" / name).getroot()
        assert len(picture.findall("{http://www.w3.org/2000/svg}polyline")) == 2 * lines


def test_a_pictures_level_line_is_level(tmp_path: Path, script) -> None:
    script("index_plots", records_file(tmp_path), "--out", tmp_path).main()
    picture = ElementTree.parse(tmp_path / "index_by_ceiling.svg").getroot()
    ours, peers = picture.findall("{http://www.w3.org/2000/svg}polyline")
    heights = [{pair.split(",")[1] for pair in line.get("points", "").split()} for line in (ours, peers)]
    assert len(heights[0]) == len(heights[1]) == 1
    assert float(heights[0].pop()) > float(heights[1].pop())  # 5 us is below 15 us


def test_one_file_of_records_is_merged_into_another(tmp_path: Path) -> None:
    source, target = records_file(tmp_path), tmp_path / "results/index.jsonl"
    command = [sys.executable, "-m", "thalweg.kernels.bench.records", str(source), str(target)]
    assert subprocess.run(command).returncode == 0
    assert records.read(target) == records.read(source)


def test_peers_are_unpacked_without_what_is_never_read(tmp_path: Path, script) -> None:
    wheel = tmp_path / "peer.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("peer/__init__.py", "")
        archive.writestr("peer/tests/large.bin", "x")
    script("peers").unpack(wheel, tmp_path / "out", ("peer/tests/",))
    assert [str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*.*")] == ["peer/__init__.py"]


def test_another_version_of_sglang_is_refused_by_name(tmp_path: Path, script) -> None:
    wheel = tmp_path / "sglang.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("sglang/kernels/jit/csrc/deepseek_v4/topk_v1.cuh", "")
        archive.writestr("sglang/kernels/ops/attention/dsa/tilelang_kernel.py", "import tilelang\n")
    with pytest.raises(SystemExit, match="no longer has: from sglang"):
        script("peers").take_sglang(wheel, tmp_path / "out")


def test_assembling_needs_a_compiler_and_says_so(
    tmp_path: Path, script, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = script("peers", tmp_path / "out")
    monkeypatch.setenv("PATH", "")
    assert module.main() == 2
    assert "no nvcc on PATH" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
