"""Whether a model fits, decided before a weight is read."""

import math
import os
from pathlib import Path

import torch

from thalweg.errors import UserError
from thalweg.models.weights.expected import Expected, Kind

_CGROUP = Path("/sys/fs/cgroup")
GIB = 1 << 30


def bytes_needed(tensors: dict[str, Expected], dtype: torch.dtype) -> int:
    """Bytes of the tensors in `dtype`, and of the work space of loading: three float32 copies of the largest one."""
    item = {Kind.COMPUTE: dtype.itemsize, Kind.FLOAT32: 4, Kind.INTEGER: 8}
    sizes = [(math.prod(tensor.shape), item[tensor.kind]) for tensor in tensors.values()]
    return sum(count * size for count, size in sizes) + max((12 * count for count, _ in sizes), default=0)


def available_bytes(device: torch.device) -> int:
    """Bytes that can be allocated on `device` now; on the host, what the system and its container both allow."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return int(min(_system_bytes(), _container_bytes()))


def check_memory(source: object, tensors: dict[str, Expected], dtype: torch.dtype, device: torch.device) -> None:
    """Raises UserError, one line, where the model does not fit."""
    needed, available = bytes_needed(tensors, dtype), available_bytes(device)
    if needed > available:
        where = "machine" if device.type == "cpu" else str(device)
        smaller = "" if dtype.itemsize <= 2 else ", load it as bfloat16 (--dtype bfloat16)"
        raise UserError(
            f"{source}: model needs {needed / GIB:.2f} GiB as {str(dtype).removeprefix('torch.')}, "
            f"{where} has {available / GIB:.2f} GiB available; free memory{smaller} or take a smaller checkpoint"
        )


def _system_bytes() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # no Linux: the physical memory is the nearest that the system tells
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _container_bytes() -> float:
    """What the control group leaves, infinite without a limit; file cache that can be dropped counts as free."""
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        if limit == "max":
            return math.inf
        used = int((_CGROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        return int(limit) - used + int(stat.get("inactive_file", 0))
    except OSError:
        return math.inf  # no control group of the second version: no limit to be read
