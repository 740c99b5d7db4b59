"""What kernels may use on an architecture, and whether they can run on a device at all."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import triton

from thalweg.ops import hardware

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _facts_are_read_again(monkeypatch: pytest.MonkeyPatch):
    cached = (hardware.by_architecture, hardware._properties, hardware._architecture, hardware._triton_missing)
    for function in cached:
        function.cache_clear()
    yield
    monkeypatch.undo()
    for function in cached:
        function.cache_clear()


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, hip: str | None = None, **properties: object) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(**properties))


@pytest.mark.parametrize(
    ("name", "shared_memory"),
    [("sm_80", 166_912), ("sm_90", 232_448), ("sm_100", 232_448), ("gfx942", 65_536), ("gfx950", 163_840)]
    + [(name, 101_376) for name in ("sm_86", "sm_89", "sm_120", "sm_121")],
)
def test_a_block_has_the_shared_memory_that_the_vendor_documents(name: str, shared_memory: int) -> None:
    assert hardware.by_architecture(name).shared_memory == shared_memory
    assert hardware.by_architecture(name).name == name


def test_e4m3_is_decoded_by_instructions_from_sm_89_on_and_by_moving_bits_elsewhere() -> None:
    ways = {name: hardware.by_architecture(name).e4m3_to_f16 for name in hardware.NVIDIA}
    assert ways == {name: "packed" if name in ("sm_80", "sm_86") else "hardware" for name in hardware.NVIDIA}
    assert hardware.by_architecture("gfx942").e4m3_to_f16 == "arithmetic"  # it reads no PTX


@pytest.mark.parametrize(("version", "native"), [("3.6.0", False), ("3.7.1", False), ("3.8.0", True), ("3.10.0", True)])
def test_fp8_products_on_sm_121_depend_on_the_version_of_triton(
    monkeypatch: pytest.MonkeyPatch, version: str, native: bool
) -> None:
    monkeypatch.setattr(triton, "__version__", version)
    assert hardware.by_architecture("sm_121").fp8_dot is native
    assert hardware.by_architecture("sm_90").fp8_dot and not hardware.by_architecture("sm_86").fp8_dot


def test_an_unknown_architecture_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"sm_75.*sm_80.*sm_121.*gfx950"):
        hardware.by_architecture("sm_75")


def test_a_card_is_recognised_and_one_without_kernels_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch, major=12, minor=0, multi_processor_count=170)
    assert hardware.of_device(CUDA).name == "sm_120"
    assert hardware.multiprocessors(CUDA) == 170
    hardware._architecture.cache_clear()
    hardware._properties.cache_clear()
    pretend_gpu(monkeypatch, major=7, minor=5)
    reason = hardware.triton_unsupported(CUDA)
    assert reason is not None and "sm_75" in reason and "sm_80" in reason
    with pytest.raises(ValueError, match=r"cuda:0.*sm_75"):
        hardware.of_device(CUDA)


def test_a_rocm_card_is_recognised_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch, hip="6.4", gcnArchName="gfx942:sramecc+:xnack-", major=9, minor=4)
    found = hardware.of_device(CUDA)
    assert (found.name, found.backend, found.capability, found.warp_size) == ("gfx942", "hip", (9, 4), 64)


def test_the_cpu_runs_kernels_only_interpreted_and_then_only_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert hardware.triton_unsupported(CPU) == "needs a GPU"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert hardware.triton_unsupported(CPU) is None
    assert "forced" in str(hardware.triton_avoided(CPU)) and hardware.triton_avoided(CUDA) is None
    assert hardware.of_device(CPU).name == "sm_90"
    monkeypatch.setattr(hardware, "INTERPRETED_AS", "sm_80")
    assert hardware.of_device(CPU).name == "sm_80"


def test_without_triton_the_operations_import_and_give_the_reason() -> None:
    # A None in sys.modules is what an import finds where nothing is installed.
    program = """
import sys
sys.modules["triton"] = None
import torch
from thalweg.ops import explain, hardware, topk
assert topk(torch.tensor([[1.0, 3.0, 2.0]]), torch.tensor([3]), 1).tolist() == [[1]]
assert "triton cannot be imported" in hardware.triton_unsupported(torch.device("cpu"))
try:
    hardware.by_architecture("sm_90")
except ValueError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("architecture sm_90: triton cannot be imported")
