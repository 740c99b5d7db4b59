"""The tests of the kernels, with the code that Ampere or Ada would run, on a Hopper GPU: `pytest --foreign DIR/sm_80`.

There `implementation="triton"` and `"triton_f16"` mean thalweg@sm_80: chosen as on that card, launched from the bundle.
"""

from pathlib import Path
from typing import Any

import pytest

from thalweg.errors import UserError

HELP = "runs the tests of kernels from a bundle that `python -m tools.foreign` made: DIR/sm_80 (needs a Hopper GPU)"
MISSING_HELP = "adds the kernels that the bundle has not to this file, for `python -m tools.foreign --want FILE`"
COMPILE_HELP = "compiles what the bundle has not, by the triton that is here, instead of failing"
LAUNCHER = pytest.StashKey[Any]()
HEADER = pytest.StashKey[str]()
# Forces a way of decoding that the card would not choose: no code of that card.
_NOT_OF_THE_CARD = "test_codes_decoded_without_hardware_conversion_give_the_same_bits_on_a_gpu"


def install(config: pytest.Config) -> None:
    """Patches launches until the end of the run. Raises UsageError where that is not possible."""
    from tools.foreign.bundle import Bundle
    from tools.foreign.launch import Launcher, installed

    try:
        bundle = Bundle(config.getoption("--foreign"))
        compiles = config.getoption("--foreign-compile")
        launcher = Launcher(bundle, config.getoption("--foreign-missing"), compiles)
        patches = installed(launcher)
        patches.__enter__()
    except UserError as error:
        raise pytest.UsageError(f"--foreign {error}") from None
    config.add_cleanup(lambda: patches.__exit__(None, None, None))
    config.stash[LAUNCHER] = launcher
    more = ", others compiled here" if compiles else ""
    config.stash[HEADER] = (
        f"triton means {launcher.name}: {len(bundle)} kernels of {bundle.folder}, by triton {bundle.triton}{more}"
    )


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves the tests whose kernels come from the bundle: others would show nothing of it."""
    left = [item for item in items if not _of_the_bundle(item)]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if _of_the_bundle(item)]


def _of_the_bundle(item: pytest.Item) -> bool:
    file = Path(item.path)
    parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    return (
        file.parent.name == "ops"
        and file.name.endswith("_kernels.py")
        and parameters.get("implementation") != "hopper"
        and getattr(item, "originalname", item.name) != _NOT_OF_THE_CARD
    )
