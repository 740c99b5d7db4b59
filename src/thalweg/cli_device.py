"""The --device option, the same for every verb."""

from typing import Any

from thalweg.errors import UserError


def named_device(name: str | None) -> Any:
    """The torch.device called `name`; None: the CUDA device if there is one, else the CPU. Raises UserError for another."""
    import torch

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
