"""`thalweg kernels compile` passes kernels that are as they should be, and names what is wrong with the others."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.kernels import crafted
from thalweg.cli import main
from thalweg.kernels import compiler, rooms
from thalweg.kernels.compiler import Compiled, matrix_instructions
from thalweg.ops import cuda, hardware

# Another process: in this one kernels are interpreted. The workers import the crafted room by its name. Two calls, one start.
PROGRAM = """
import contextlib, pathlib, sys
from thalweg.cli import main
from thalweg.kernels import rooms
rooms.kernel_modules = lambda: ["tests.kernels.crafted"]
folder = pathlib.Path(sys.argv[1])
for name, arguments in (
    ("representative", ["--arch", "sm_80, sm_120,gfx942"]),
    ("everything", ["--all", "--arch", "sm_86,sm_90,gfx942"]),
):
    with open(folder / f"{name}.txt", "w") as file, contextlib.redirect_stdout(file):
        code = main(["kernels", "compile", *arguments, "--json", str(folder / f"{name}.json")])
    (folder / f"{name}.code").write_text(str(code))
"""


@dataclass
class Run:
    code: int
    lines: list[str]
    records: dict[tuple[str, str], dict[str, Any]]

    def failures(self, kernel: str) -> list[str]:
        return [line for line in self.lines if line.startswith(f"FAILED: {kernel} ")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where both runs of the command have left what they printed and wrote."""
    folder = tmp_path_factory.mktemp("runs")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(folder)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def read(folder: Path, name: str) -> Run:
    records = json.loads((folder / f"{name}.json").read_text())["results"]
    return Run(
        int((folder / f"{name}.code").read_text()),
        (folder / f"{name}.txt").read_text().splitlines(),
        {(record["kernel"], record["architecture"]): record for record in records},
    )


@pytest.fixture(scope="module")
def representative(folder: Path) -> Run:
    return read(folder, "representative")


@pytest.fixture(scope="module")
def everything(folder: Path) -> Run:
    return read(folder, "everything")


def test_kernels_that_are_as_they_should_be_pass(representative: Run) -> None:
    assert representative.code == 0
    assert len(representative.records) == 6 and not any(
        record["problems"] for record in representative.records.values()
    )
    assert representative.lines[-1].startswith("2 kernel variants on 3 architectures, 6 compilations by triton ")
    assert representative.lines[-1].endswith(", AMD compiled and not measured: no problem")


def test_matrix_products_are_recognised_on_every_kind_of_tensor_core(representative: Run, everything: Run) -> None:
    found = {
        architecture: list(run.records["product/f16", architecture]["matrix"])
        for run, architecture in ((representative, "sm_80"), (representative, "gfx942"), (everything, "sm_90"))
    }
    assert found == {"sm_80": ["mma.sync f16"], "gfx942": ["mfma f16"], "sm_90": ["wgmma f16"]}
    assert list(everything.records["product/fp8", "sm_90"]["matrix"]) == ["wgmma e4m3"]
    assert ("product/fp8", "sm_86") not in everything.records  # no such variant there


def test_registers_are_measured_for_both_makers(representative: Run) -> None:
    for architecture in ("sm_80", "gfx942"):
        assert 16 <= representative.records["product/f16", architecture]["registers"] <= 255


def test_too_much_shared_memory_fails_where_it_is_too_much_and_names_the_limit(everything: Run) -> None:
    assert everything.code == 1
    assert everything.failures("wide") == [
        "FAILED: wide on sm_86 needs 131,072 bytes of shared memory, the limit is 101,376"
    ]
    assert everything.records["wide", "sm_90"]["problems"] == []


def test_spilled_registers_fail(everything: Run) -> None:
    (line,) = everything.failures("spilling")
    assert "spills" in line and everything.records["spilling", "sm_86"]["spills"] > 0
    assert everything.records["spilling", "sm_86"]["registers"] == 255


def test_a_matrix_product_that_reaches_no_tensor_core_fails(everything: Run) -> None:
    assert [line.split(" on ")[1] for line in everything.failures("scalar")] == [
        f"{name} has a matrix product and no tensor-core instruction" for name in ("sm_86", "sm_90")
    ]


def test_what_does_not_compile_is_one_line_and_does_not_stop_the_rest(everything: Run) -> None:
    for kernel, reason in (
        ("broken", "CompilationError: "),
        (
            "incomplete",
            "parameters without a type or value: ['BLOCK', 'HOW', 'count', 'values']; unknown to the kernel: none",
        ),
        ("crashing", "the compiler crashed"),
        ("foreign", "could not allocate input reg"),
    ):
        lines = everything.failures(kernel)
        assert lines and all("does not compile" in line and reason in line for line in lines)
    assert everything.lines[-1].endswith(": 10 problems")
    assert everything.records["decode", "sm_86"]["problems"] == []


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["kernels", "compile", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    return captured.err


def test_an_unknown_architecture_names_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, "--arch", "sm_80,sm_75")
    assert "'sm_75'" in line and "sm_80, sm_86, sm_89, sm_90, sm_100, sm_120, sm_121, gfx942, gfx950" in line


def test_interpreted_kernels_are_not_taken_for_compiled_ones(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "TRITON_INTERPRET=1" in refused(capsys)


def test_nothing_to_compile_is_no_success(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(rooms, "kernel_modules", lambda: ["tests.kernels.crafted"])
    assert "'sparse'" in refused(capsys, "--kernel", "sparse")


def test_a_place_that_cannot_be_written_to_is_refused_before_the_work(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(rooms, "kernel_modules", lambda: ["tests.kernels.crafted"])
    assert "No such file or directory" in refused(capsys, "--json", str(tmp_path / "missing" / "results.json"))


def test_two_variants_of_one_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    once = list(crafted.variants(hardware.by_architecture("sm_89")))
    monkeypatch.setattr(crafted, "variants", lambda hardware: once + once[:1])
    rooms.variants.cache_clear()
    with pytest.raises(ValueError, match="sm_89 are named 'decode'"):
        rooms.variants("tests.kernels.crafted", hardware.by_architecture("sm_89"))


def test_every_room_with_kernels_is_found() -> None:
    folder = Path(rooms.__file__).parents[1] / "ops"
    files = [file for name in ("hopper", "triton") for file in folder.glob(f"*/{name}.py")]
    assert rooms.kernel_modules() == sorted(f"thalweg.ops.{file.parent.name}.{file.stem}" for file in files)


def test_cuda_kernels_are_measured_and_what_is_wrong_with_them_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Registers, spills, matrix instructions and the first error of a source, as of Triton's kernels."""
    (tmp_path / "some.cu").write_text(
        """
extern "C" __global__ void __launch_bounds__(1024, 2) some(float* out) {
#ifdef WRONG
    out[0] = nothing;
#endif
    float held[LIVE];
    for (int i = 0; i < LIVE; ++i) held[i] = out[i];
    for (int turn = 1; turn < 9; ++turn)
#pragma unroll
        for (int i = 0; i < LIVE; ++i) held[i] = held[i] * out[turn] + held[(i + 1) % LIVE];
    for (int i = 0; i < LIVE; ++i) out[i] = held[i];
}
"""
    )
    monkeypatch.setattr(cuda, "_FOLDER", tmp_path)

    def compiled(**defines: int) -> Compiled:
        variant = cuda.CudaVariant("some", "some.cu", "some", defines, {"out": "p"}, 128, 1024, matrix=True)
        return compiler._compile_cuda(variant, "sm_90")

    fine = compiled(LIVE=4)
    assert fine.error is None and fine.spills == 0 and 0 < fine.registers <= 32 and fine.shared_memory == 1024
    assert fine.problems() == ["some on sm_90 has a matrix product and no tensor-core instruction"]
    assert compiled(LIVE=64).spills > 0
    cuda.assembly_of("some.cu", (("LIVE", 4),), "sm_90")  # says nothing: an empty log
    # The bindings write over the bytes they are given; one byte would be a constant of Python's.
    assert bytes([32]) == b" "
    (wrong,) = compiled(LIVE=4, WRONG=1).problems()
    assert "does not compile" in wrong and 'identifier "nothing" is undefined' in wrong


def test_products_that_the_assembler_makes_wait_for_one_another_are_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums that are touched while products run; seen: attention on Hopper lost a fifth of its speed to such a wait, silently."""
    (tmp_path / "some.cu").write_text(
        """
extern "C" __global__ void some(float* out, unsigned long long a) {
    float s[4] = {out[0], out[1], out[2], out[3]};
    for (int turn = 0; turn < 4; ++turn) {
        asm volatile("wgmma.fence.sync.aligned;\\n"
                     "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %4, 1, 1, 1, 0, 0;"
                     : "+f"(s[0]), "+f"(s[1]), "+f"(s[2]), "+f"(s[3]) : "l"(a));
        if (TOUCHED) s[1] *= 2.0f;
        asm volatile("wgmma.commit_group.sync.aligned;\\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
    }
    for (int i = 0; i < 4; ++i) out[threadIdx.x * 4 + i] = s[i];
}
"""
    )
    monkeypatch.setattr(cuda, "_FOLDER", tmp_path)

    def problems(touched: int) -> list[str]:
        variant = cuda.CudaVariant(
            "some", "some.cu", "some", {"TOUCHED": touched}, {"out": "p", "a": "l"}, 128, 0, matrix=True
        )
        return compiler._compile_cuda(variant, "sm_90").problems()

    assert problems(0) == []
    (problem,) = problems(1)
    assert problem.startswith("some on sm_90: wgmma.mma_async instructions are serialized")


def test_cuda_kernels_of_every_room_compile_for_hopper_alone() -> None:
    on_hopper, elsewhere = hardware.by_architecture("sm_90"), hardware.by_architecture("sm_120")
    modules = [module for module in rooms.kernel_modules() if module.endswith(".hopper")]
    for module in modules:
        assert not rooms.variants(module, elsewhere)
        for name, variant in rooms.variants(module, on_hopper).items():
            if variant.representative:
                result = compiler.compile_variant(module, name, "sm_90")
                assert result.problems() == []
                assert not variant.matrix or set(result.matrix) in ({"wgmma e4m3"}, {"wgmma bf16"})
    assert len(modules) == 4


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 { %r1, %r2", {"mma.sync e4m3": 1}),
        ("mma.sync.aligned.m16n8k32.row.col.kind::f8f6f4.f32.e4m3.e4m3.f32 {", {"mma.sync e4m3": 1}),
        ("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%r1", {"wgmma bf16": 1}),
        ("@%p3 tcgen05.mma.cta_group::1.kind::f16 [ %r9 + 0 ],", {"tcgen05 f16": 1}),
        ("v_mfma_f32_16x16x16_bf16 v[0:3], v[8:9], v[4:5], 0", {"mfma bf16": 1}),
        ("v_mfma_f32_32x32x16_fp8_fp8 a[0:15]", {"mfma fp8_fp8": 1}),
        ("fma.rn.f32 %f1, %f2, %f3, %f4; wgmma.fence.sync.aligned; tcgen05.commit", {}),
    ],
)
def test_matrix_instructions_are_told_from_others(line: str, found: dict[str, int]) -> None:
    assert matrix_instructions(line) == found


def test_an_assembler_that_says_nothing_is_an_error_and_no_zero() -> None:
    with pytest.raises(RuntimeError, match="named no registers"):
        compiler._of_ptxas("ptxas info    : 0 bytes gmem")
    with pytest.raises(RuntimeError, match="names no vector registers"):
        compiler._of_amdgcn(".sgpr_count: 3")


def test_a_result_with_an_error_has_that_one_problem() -> None:
    result = Compiled("topk", "sm_80", matrix_wanted=True, error="CompilationError: why")
    assert result.problems() == ["topk on sm_80 does not compile: CompilationError: why"]
