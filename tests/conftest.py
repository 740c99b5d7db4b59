"""GPU tests run where a CUDA device is; elsewhere they are deselected, the run says how many, and kernels are interpreted."""

import pytest
import torch

from tests import interpreter

if not torch.cuda.is_available():
    interpreter.interpret()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu:
        config.hook.pytest_deselected(items=gpu)
        items[:] = [item for item in items if item not in gpu]
