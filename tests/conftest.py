"""GPU tests run where a CUDA device is; elsewhere they are deselected, the run says how many, and kernels are interpreted."""

import platform

import pytest
import torch

from tests import interpreter

if platform.system() != "Linux":  # there is no triton; on Linux a missing one is a failure
    collect_ignore = ["kernels", "ops/device", "ops/test_hardware.py", "test_interpreter.py"]
    collect_ignore_glob = ["ops/test_*_kernels.py"]
elif not torch.cuda.is_available():
    interpreter.interpret()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu:
        config.hook.pytest_deselected(items=gpu)
        items[:] = [item for item in items if item not in gpu]
