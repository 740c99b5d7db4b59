"""GPU tests run where a CUDA device is; elsewhere they are deselected, the run says how many, and kernels are interpreted."""

import platform
from pathlib import Path

import pytest
import torch

from tests import foreign, interpreter

if platform.system() != "Linux":  # there is no triton; on Linux a missing one is a failure
    collect_ignore = ["kernels", "ops/device", "ops/test_hardware.py", "test_interpreter.py"]
    collect_ignore_glob = ["ops/test_*_kernels.py"]
elif not torch.cuda.is_available():
    interpreter.interpret()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--foreign", type=Path, metavar="DIR", help=foreign.HELP)
    parser.addoption("--foreign-compile", action="store_true", help=foreign.COMPILE_HELP)
    parser.addoption("--foreign-missing", type=Path, metavar="FILE", help=foreign.MISSING_HELP)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--foreign") is not None:
        foreign.install(config)


def pytest_report_header(config: pytest.Config) -> str | None:
    return config.stash.get(foreign.HEADER, None)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if foreign.LAUNCHER in config.stash:
        terminalreporter.write_line(config.stash[foreign.LAUNCHER].summary())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if foreign.HEADER in config.stash:
        foreign.select(config, items)
    if torch.cuda.is_available():
        return
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu:
        config.hook.pytest_deselected(items=gpu)
        items[:] = [item for item in items if item not in gpu]
