import json
import os
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parent / "autotuned_program.py"


def test_every_configuration_that_compiles_is_compiled_none_is_launched_and_autotuners_are_as_before() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run([sys.executable, str(PROGRAM)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "compiled": 2,  # of three, one of which does not compile
        "chosen": 0,
        "untouched": True,
        "raised": True,
        "restored": True,
    }
