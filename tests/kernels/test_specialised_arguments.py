"""Kernels compile for what a launch makes of its arguments: integers that are 1 become constants, and indices may have 64 bits.

The front end only, where such an argument fails; `thalweg kernels compile` goes all the way with general ones.
"""

import os
import subprocess
import sys

PROGRAM = """
import dataclasses, importlib, sys, tempfile
from triton.compiler import ASTSource
from thalweg.kernels import compiler, rooms
from thalweg.ops.hardware import by_architecture

class Done(Exception):
    pass

build = ASTSource.make_ir

def only_build(*arguments):
    build(*arguments)
    raise Done

ASTSource.make_ir = only_build
compiler.use_cache(tempfile.mkdtemp())
hardware, kernels, failed = by_architecture("sm_90"), set(), []
for module in (each for each in rooms.kernel_modules() if each.endswith(".triton")):
    for variant in rooms.variants(module, hardware).values():
        name = variant.kernel.fn.__name__
        if not variant.representative or name in kernels:
            continue
        kernels.add(name)
        integers = {n for n, kind in variant.signature.items() if kind in ("i32", "i64")}
        names = ("lengths", "pages", "row_to_request", "starts", "ends", "indices", "extra_indices", "extra_lengths")
        names += ("positions", "slots", "state_slots", "cache_slots")
        inputs = {n for n in names if n in variant.signature}
        for ones in (*({n} for n in sorted(integers)), integers, set()):
            general = {n: "*i64" if n in inputs and not ones else kind for n, kind in variant.signature.items()}
            special = dataclasses.replace(
                variant,
                signature={n: kind for n, kind in general.items() if n not in ones},
                constexprs=dict(variant.constexprs) | dict.fromkeys(ones, 1),
                divisible_by_16=tuple(n for n in variant.divisible_by_16 if n not in ones),
            )
            try:
                compiler.compile_triton(special, hardware)
            except Done:
                continue
            except Exception as error:
                failed.append(f"{name} with {sorted(ones) or 'int64 inputs'}: {error!r}")
print(len(kernels), *failed, sep="\\n")
"""


def test_integers_that_are_one_and_inputs_of_64_bits_compile() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    count, *failed = done.stdout.splitlines()
    assert int(count) >= 7 and failed == []
