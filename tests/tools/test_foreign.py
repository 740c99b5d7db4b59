"""Kernels compiled for Ampere and Ada become machine code for Hopper, and only they run where a bundle is installed."""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from thalweg.errors import UserError
from thalweg.ops import cuda, hardware
from thalweg.ops.mqa_logits.triton import fill_variant, logits_variant
from thalweg.ops.mqa_logits.triton import variants as scoring_variants
from tools.foreign import assemble, launch
from tools.foreign.bundle import Bundle, Entry
from tools.foreign.launch import Launcher
from tools.foreign.wanted import Wanted, from_json, wanted

ROOT = Path(__file__).parents[2]


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """In another process: in this one kernels are interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    words = [sys.executable, "-m", "tools.foreign", *arguments]
    return subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True)


pytestmark = pytest.mark.xdist_group("foreign")  # one bundle for all


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of each card: sm_80's scores of e4m3 and fills, sm_89's scores of one row."""
    folder = tmp_path_factory.mktemp("foreign")
    for architecture, kernel in (("sm_80", "mqa_logits/"), ("sm_89", "mqa_logits/fp8/heads64/rows1")):
        done = command(str(folder), "--arch", architecture, "--kernel", kernel)
        assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def ampere(folder: Path) -> Bundle:
    return Bundle(folder / "sm_80")


def entries(bundle: Bundle) -> list[Entry]:
    return [entry for group in bundle._entries.values() for entry in group]


def test_the_code_is_for_hopper_and_has_the_entry_it_says(folder: Path) -> None:
    for architecture in ("sm_80", "sm_89"):
        for entry in entries(Bundle(folder / architecture)):
            assert assemble.architecture_of(entry.assembled.code) == "sm_90"
            assert f".text.{entry.assembled.entry}\0".encode() in entry.assembled.code


def test_each_card_has_its_own_products_of_e4m3(folder: Path) -> None:
    for architecture, kind in (("sm_80", "mma.sync f16"), ("sm_89", "mma.sync e4m3")):
        products = [e for e in entries(Bundle(folder / architecture)) if "heads64" in e.wanted.name]
        assert products and all(list(entry.assembled.matrix) == [kind] for entry in products)


def test_a_bundle_holds_what_the_card_would_choose_once_aligned_and_once_for_any_tensor(ampere: Bundle) -> None:
    card = hardware.by_architecture("sm_80")
    chosen = [each for each in scoring_variants(card) if each.representative and each.name.startswith("mqa_logits/")]
    assert len(chosen) == 3 and len(ampere) == 6
    for variant in chosen:
        every = ampere.find(wanted(variant, "sm_80", variant.divisible_by_16))
        none = ampere.find(wanted(variant, "sm_80", ()))
        assert every is not None and every.wanted.assumed == variant.divisible_by_16
        assert none is not None and none.wanted.assumed == ()
        assert every.wanted.signature == variant.signature and every.wanted.constexprs == variant.constexprs
        assert every.assembled.threads == 32 * variant.num_warps
        assert len(every.assembled.kinds) == len(variant.signature) + every.assembled.scratch


def test_code_that_assumes_what_does_not_hold_is_not_found(ampere: Bundle) -> None:
    variant = fill_variant()
    some = ampere.find(wanted(variant, "sm_80", variant.divisible_by_16[:-1]))
    assert some is not None and some.wanted.assumed == ()


def test_a_variant_that_differs_in_a_constant_alone_is_another(ampere: Bundle) -> None:
    here = next(entry.wanted for entry in entries(ampere) if "rows1" in entry.wanted.name)
    assert ampere.find(here) is not None
    record = {**vars(here), "constexprs": {**here.constexprs, "DOT": "hardware"}}
    assert ampere.find(Wanted(**record)) is None  # of the same name


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What reaches the driver, in the place of a GPU."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(cuda, "device_of", lambda args: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(cuda, "load", lambda code, entry, shared: (code, entry))
    monkeypatch.setattr(cuda, "launch", lambda *args: calls.append(args))
    launch._loaded.cache_clear()
    return calls


def memory(*shape: int, dtype: torch.dtype = torch.float32, beside: int = 0) -> torch.Tensor:
    """A tensor that begins `beside` bytes past a multiple of 16."""
    size = torch.Size(shape).numel() * dtype.itemsize
    storage = torch.zeros(size + 64, dtype=torch.uint8)
    begin = -storage.data_ptr() % 16 + beside
    return storage[begin : begin + size].view(dtype).view(shape)


def test_a_launch_passes_arguments_in_order_and_no_scratch(ampere: Bundle, launched: list[tuple[Any, ...]]) -> None:
    out, lengths = memory(3, 32), memory(3, dtype=torch.int32)
    Launcher(ampere).launch(fill_variant(), (3, 2), (out, lengths, 32, 32))
    ((_code, entry), blocks, threads, shared, kinds, args) = launched[0]
    assert (entry, blocks, threads, shared, kinds) == ("fill_kernel", (3, 2), 128, 0, "ppilpp")
    assert args[0] is out and args[1] is lengths and args[2:] == (32, 32, None, None)


def test_a_tensor_that_is_not_aligned_runs_the_code_for_any(ampere: Bundle, launched: list[tuple[Any, ...]]) -> None:
    lengths = memory(3, dtype=torch.int32)
    for out in (memory(3, 32), memory(3, 32, beside=4)):
        Launcher(ampere).launch(fill_variant(), (3, 1), (out, lengths, 32, 32))
    aligned, any_ = (call[0][0] for call in launched)
    known = {entry.assembled.code: entry.wanted.assumed for entry in entries(ampere)}
    assert known[aligned] == fill_variant().divisible_by_16 and known[any_] == ()


def test_indices_of_64_bits_are_narrowed_with_their_strides(ampere: Bundle, launched: list[tuple[Any, ...]]) -> None:
    wide = torch.tensor([[1, 9], [2**40, 9], [-3, 9]])[:, 0]
    Launcher(ampere).launch(fill_variant(), (3, 1), (memory(3, 32), wide, 32, 32))
    narrow = launched[0][5][1]
    assert narrow.dtype == torch.int32 and narrow.stride() == (2,) and narrow.tolist() == [1, 2**31 - 1, -3]


def test_arguments_of_other_types_are_refused(ampere: Bundle, launched: list[tuple[Any, ...]]) -> None:
    lengths = memory(3, dtype=torch.int32)
    with pytest.raises(TypeError, match=r"mqa_logits/fill: out is \*bf16, its signature says \*fp32"):
        Launcher(ampere).launch(fill_variant(), (1,), (memory(3, 8, dtype=torch.bfloat16), lengths, 8, 8))
    assert not launched


def test_a_kernel_that_is_missing_fails_and_is_listed_for_the_next_bundle(
    ampere: Bundle, launched: list[tuple[Any, ...]], tmp_path: Path
) -> None:
    first = next(entry.wanted for entry in entries(ampere) if "rows1" in entry.wanted.name)
    choice = next(iter(hardware_choices()))
    variant = logits_variant(choice, True, 16, 16)
    sizes = {"*u8": torch.uint8, "*fp32": torch.float32, "*i32": torch.int32}
    args = [memory(4, dtype=sizes[kind]) if kind[0] == "*" else 16 for kind in variant.signature.values()]
    with pytest.raises(launch.Missing, match=f"{variant.name}.*not in"):
        Launcher(ampere, tmp_path / "missing.jsonl").launch(variant, (1,), tuple(args))
    assert not launched
    (line,) = (tmp_path / "missing.jsonl").read_text().splitlines()
    listed = from_json(json.loads(line))
    assert listed.name == variant.name and listed.configuration != first.configuration
    assert listed.variant().constexprs == variant.constexprs and listed.assumed == variant.divisible_by_16


def test_on_request_what_is_missing_is_compiled_where_it_is_launched(
    folder: Path, launched: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once; the compiler stands in: in this process kernels are interpreted."""
    bundle = Bundle(folder / "sm_80")
    code = entries(bundle)[0].assembled
    assembled: list[Wanted] = []
    monkeypatch.setattr(launch, "assemble", lambda want: assembled.append(want) or code)
    variant = dataclasses.replace(fill_variant(), constexprs={"BLOCK": 128})
    launcher = Launcher(bundle, compiles=True)
    for _ in range(2):
        launcher.launch(variant, (3, 1), (memory(3, 32), memory(3, dtype=torch.int32), 32, 32))
    assert [want.constexprs for want in assembled] == [{"BLOCK": 128}] and len(launched) == 2
    assert launcher.summary() == "thalweg@sm_80: 2 launches of 1 kernel variants, 1 compiled here"


def hardware_choices() -> list[Any]:
    from thalweg.ops.mqa_logits import choice

    return choice.all_choices(hardware.by_architecture("sm_80"))


def test_what_a_run_missed_is_compiled_on_request(tmp_path: Path) -> None:
    want = wanted(fill_variant(), "sm_80", ())
    other = Wanted(**{**vars(want), "constexprs": {"BLOCK": 64}, "name": "mqa_logits/fill of 64"})
    (tmp_path / "missing.jsonl").write_text(2 * (json.dumps(vars(other)) + "\n"))
    done = command(str(tmp_path), "--arch", "sm_80", "--kernel", "fill", "--want", str(tmp_path / "missing.jsonl"))
    assert done.returncode == 0, done.stderr
    bundle = Bundle(tmp_path / "sm_80")
    assert len(bundle) == 3 and bundle.find(other) is not None


def test_a_bundle_of_other_sources_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.foreign.bundle.sources", lambda: "others")
    with pytest.raises(UserError, match="made from other sources"):
        Bundle(folder / "sm_80")
    with pytest.raises(UserError, match="no bundle of kernels"):
        Bundle(folder / "sm_86")


def test_code_that_hopper_cannot_run_is_refused(tmp_path: Path) -> None:
    done = command(str(tmp_path), "--arch", "sm_120")
    assert done.returncode == 2 and "sm_120: its code cannot run on sm_90" in done.stderr


def test_where_it_is_installed_the_card_chooses_and_the_gpus_own_kernels_are_refused(
    ampere: Bundle, launched: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = hardware.of_device, type(fill_variant()).launch, cuda.CudaVariant.launch
    monkeypatch.setattr(cuda, "unsupported", lambda device, architecture: None)
    launcher = Launcher(ampere)
    with launch.installed(launcher):
        card = hardware.of_device(torch.device("cuda"))
        assert card.name == "sm_80" and card.e4m3_to_f16 == "packed" and not card.fp8_dot
        fill_variant().launch((3, 1), memory(3, 32), memory(3, dtype=torch.int32), 32, 32)
        with pytest.raises(AssertionError, match="CUDA C\\+\\+ for another card than sm_80"):
            cuda.CudaVariant.launch(SimpleNamespace(name="a kernel"), 1)  # type: ignore[arg-type]
    assert len(launched) == 1
    assert launcher.summary() == "thalweg@sm_80: 1 launches of 1 kernel variants"
    assert (hardware.of_device, type(fill_variant()).launch, cuda.CudaVariant.launch) == theirs


def test_without_a_hopper_gpu_a_run_from_a_bundle_is_refused(ampere: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "unsupported", lambda device, architecture: "this is sm_86")
    with pytest.raises(UserError, match="machine code for sm_90: this is sm_86"), launch.installed(Launcher(ampere)):
        pass
