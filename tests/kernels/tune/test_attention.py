"""What `thalweg kernels tune` chooses from measured times: by a clock that says them, on any machine."""

import json
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from thalweg.errors import UserError
from thalweg.kernels import suite
from thalweg.kernels.bench import records, run
from thalweg.kernels.bench.attention import checks, inputs
from thalweg.kernels.bench.attention.cases import Decode
from thalweg.kernels.bench.benchmark import Wrong
from thalweg.kernels.bench.clock import Call, Outputs
from thalweg.kernels.compiler import Compiled
from thalweg.kernels.suite import Job
from thalweg.kernels.tune import attention, verb
from thalweg.ops import hardware, tables
from thalweg.ops.sparse_mla import candidates, choice
from thalweg.ops.sparse_mla.choice import Choice

SMALL, OTHER, WIDE = Choice(16, 32, 8, 2, 1), Choice(16, 64, 8, 2, 1), Choice(64, 32, 8, 2, 1)
CARD = hardware.by_architecture("sm_89")
MULTIPROCESSORS = 58


class FakeClock:
    """A call says its microseconds."""

    def __init__(self, usable: bool = True) -> None:
        self._usable = usable

    def usable(self) -> bool:
        return self._usable

    def retained_bytes(self) -> int:
        return 0

    def scratch_bytes(self, call: Call) -> int:
        return 0

    def replayed(self, call: Call) -> Outputs:
        return call()

    def median_us(self, calls: list[Call]) -> float:
        return float(calls[0]()["us"])


@pytest.fixture
def wrong(monkeypatch: pytest.MonkeyPatch) -> set[Choice]:
    """Calls take `us_of(choice, case)`; those of the choices that are put in here give wrong results."""
    wrong: set[Choice] = set()

    def bind(chosen: Choice, case: Decode) -> Call:
        return lambda: {"us": torch.tensor(us_of(chosen, case)), "wrong": torch.tensor(chosen in wrong)}

    def check(case: Decode, outputs: Outputs, op: str) -> tuple[float, int]:
        if outputs["wrong"]:
            raise Wrong("7 of 9 elements are off, by 1.0e+00 at most")
        return 0.0, 1

    monkeypatch.setattr(attention, "bind", bind)
    monkeypatch.setattr(inputs, "sets", lambda case, ops, device, seed: [case])
    monkeypatch.setattr(checks, "check", check)
    return wrong


def us_of(chosen: Choice, case: Decode) -> float:
    """A tile of 64 heads costs 2.5 of 16, and holds four times the heads; blocks of 64 are a little slower."""
    tiles = -(-case.heads // chosen.heads)
    return case.batch * tiles * {16: 1.0, 32: 1.6, 64: 2.5}[chosen.heads] * (1.1 if chosen.block == 64 else 1.0)


def measured(found: list[Choice], said: list[str] | None = None) -> attention.Times:
    cases = attention.points("v4", (*attention.FEW_HEADS, *attention.MANY_HEADS))
    return attention.measure(found, cases, FakeClock(), 0, (said if said is not None else []).append)


def test_few_heads_get_the_small_tile_that_is_fastest_there_and_many_the_wide_one(wrong: set[Choice]) -> None:
    assert attention.table(measured([OTHER, SMALL, WIDE]), "v4", MULTIPROCESSORS) == (SMALL, WIDE)


def test_what_is_wrong_is_not_chosen_and_is_named(wrong: set[Choice]) -> None:
    wrong.update({SMALL, WIDE})
    said: list[str] = []
    assert attention.table(measured([OTHER, SMALL, WIDE], said), "v4", MULTIPROCESSORS) == (OTHER,)
    assert said[0] == (
        "FAILED batch=1,heads=16,entries=640,layout=v4: heads16/block32/warps8/stages2: "
        "Wrong: 7 of 9 elements are off, by 1.0e+00 at most"
    )
    wrong.add(OTHER)
    assert attention.table(measured([OTHER, SMALL, WIDE]), "v4", MULTIPROCESSORS) == ()


def test_one_choice_stands_for_all_heads_where_the_wide_tile_is_no_faster(
    wrong: set[Choice], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = {SMALL: 1.0, OTHER: 0.9, WIDE: 9.0}
    monkeypatch.setitem(globals(), "us_of", lambda chosen, case: slow[chosen] * (3 if case.heads == 16 else 1))
    assert attention.table(measured([SMALL, OTHER, WIDE]), "v4", MULTIPROCESSORS) == (OTHER,)


def test_where_all_small_tiles_run_at_once_a_wide_tiles_time_does_not_count(
    wrong: set[Choice], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launches take the first choice there, whatever the last is: here for one row, on 200 multiprocessors."""
    few = {SMALL: 1.0, WIDE: 0.01}
    monkeypatch.setitem(globals(), "us_of", lambda chosen, case: few[chosen] if case.batch == 1 else chosen.heads / 10)
    times = measured([SMALL, WIDE])
    assert attention.table(times, "v4", multiprocessors=10) == (SMALL, WIDE)
    assert attention.table(times, "v4", multiprocessors=200) == (SMALL,)


def test_a_lost_device_ends_the_work(wrong: set[Choice]) -> None:
    wrong.add(SMALL)
    with pytest.raises(RuntimeError, match="the device cannot be used any more"):
        attention.measure([SMALL], attention.points("v4", (16,)), FakeClock(usable=False), 0, lambda line: None)


def test_the_table_that_is_printed_has_the_fastest_first_and_no_mean_of_what_failed(wrong: set[Choice]) -> None:
    wrong.add(SMALL)
    cases = attention.points("v4", (16,))
    said = attention.lines(attention.measure([SMALL, WIDE, OTHER], cases, FakeClock(), 0, lambda line: None), cases)
    assert said == [
        "us by heads x batch                16x1    16x16    16x64   16x128  geomean",
        "heads16/block64/warps8/stages2     1.10    17.60    70.40   140.80    20.93",
        "heads64/block32/warps8/stages2     2.50    40.00   160.00   320.00    47.57",
        "heads16/block32/warps8/stages2        -        -        -        -",
    ]


def compiled(job: Job, **more: int) -> Compiled:
    """As it came from the compiler: 128 registers and 40 KiB, unless `more` says otherwise."""
    measures = {"shared_memory": 40 * 1024, "registers": 128, **more}
    return Compiled(job.kernel, job.architecture, True, matrix={"mma.sync bf16": 1}, **measures)


def test_candidates_that_spill_or_do_not_fit_are_left_out_and_the_others_know_how_many_are_resident() -> None:
    results = {job.kernel: compiled(job) for job in attention.jobs("sm_89", ["v4"])}
    spilling, large, tight = choice.CANDIDATES[:3]
    for chosen, more in (
        (spilling, {"spills": 8}),
        (large, {"shared_memory": 102_400}),
        (tight, {"registers": 255}),
    ):
        job = Job(attention.MODULE, candidates.name_of("v4", chosen, True), "sm_89", True)
        results[job.kernel] = compiled(job, **more)
    said: list[str] = []
    found = attention.fitting(CARD, "v4", results, said.append)
    assert len(found) == len(choice.CANDIDATES) - 2
    assert "spills 8 bytes of registers a thread" in said[0] and "102,400 bytes of shared memory" in said[1]
    by_label = {each.full_label(): each.resident for each in found}
    assert by_label[tight.full_label()] == 1  # 8 warps of 255 registers fill the register file
    assert by_label["heads16/block16/warps4/stages2"] == 2  # 4 warps of 128: shared memory is for two


def test_every_candidate_is_a_variant_of_its_own_name() -> None:
    named = {variant.name for variant in candidates.variants(CARD)}
    assert named == {job.kernel for job in attention.jobs("sm_89", candidates.LAYOUTS)}
    assert len(named) == 2 * len(candidates.LAYOUTS) * len(choice.CANDIDATES)
    for layout in candidates.LAYOUTS:  # what runs today on cards without a table is among them
        default = choice._DEFAULT[layout][0]
        assert default.full_label() in {each.full_label() for each in choice.CANDIDATES}


def test_the_verb_writes_a_table_that_launches_then_read(
    wrong: set[Choice], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    version = hardware.triton_version()
    monkeypatch.setattr(run, "require_gpu", lambda: None)
    monkeypatch.setattr(hardware, "of_device", lambda device: CARD)
    monkeypatch.setattr(hardware, "multiprocessors", lambda device: MULTIPROCESSORS)
    monkeypatch.setattr(records, "gpu_stamp", lambda commit, command: {"gpu": "NVIDIA L4", "triton": version})
    monkeypatch.setattr(records, "machine", lambda stamp: stamp["gpu"])
    monkeypatch.setattr(suite, "compile_all", lambda work: [compiled(job) for job in work])
    monkeypatch.setattr(verb, "GraphClock", FakeClock)
    folder = tmp_path / "tables"
    assert verb.main(Namespace(out=folder, layout="v4")) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "NVIDIA L4" and said[-1] == f"{folder}/sparse_mla.sm_89.json: written; " + (
        f"THALWEG_TABLES={folder} makes launches read it"
    )
    assert json.loads((folder / "sparse_mla.sm_89.json").read_text())["gpu"] == "NVIDIA L4"
    assert choice.all_choices(CARD, "v4") == choice._DEFAULT["v4"]
    monkeypatch.setenv(tables.VARIABLE, str(folder))
    chosen = choice.all_choices(CARD, "v4")
    assert [each.heads for each in chosen] == [16, 64] and chosen != choice._DEFAULT["v4"]
    assert choice.choose(CARD, "v4", 64) is chosen[1] and choice.choose(CARD, "v4", 8) is chosen[0]
    assert choice.all_choices(CARD, "v32") == choice._DEFAULT["v32"]  # not tuned


def test_what_cannot_be_tuned_is_said_before_the_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--layout 'exact': there are candidates for v4, v32"):
        verb.main(Namespace(out=tmp_path, layout="exact"))
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written to"):
        verb.make_folder(tmp_path / "file")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_verb_says_so_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="finds no CUDA device here; run it where there is one"):
        verb.main(Namespace(out=tmp_path / "tables", layout="v4"))
    assert not (tmp_path / "tables").exists()
