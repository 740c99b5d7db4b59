"""The device that an option names, and the number format that suits it."""

import torch

from thalweg.errors import UserError


def choose_device(name: str | None) -> torch.device:
    """The device of that name; without one, cuda if there is any, else cpu. Raises UserError."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"device {name}: possible are cpu, cuda and cuda:N") from None
    if device.type not in ("cpu", "cuda") or (device.type == "cpu" and device.index):
        raise UserError(f"device {name}: possible are cpu, cuda and cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"device {name}: torch sees {torch.cuda.device_count()} CUDA devices here; possible is cpu"
            + "".join(f", cuda:{number}" for number in range(torch.cuda.device_count()))
        )
    return device


def choose_dtype(name: str | None, device: torch.device) -> torch.dtype:
    """The activations' type of that name (float32 or bfloat16); without one, float32 on the CPU, else bfloat16."""
    if name is None:
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name not in ("float32", "bfloat16"):
        raise UserError(f"dtype {name}: possible are float32 and bfloat16")
    return getattr(torch, name)
