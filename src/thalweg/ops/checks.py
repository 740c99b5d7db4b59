"""Argument checks that the public functions of the operations share: what was given, what is needed."""

import os

import torch

from thalweg.errors import UserError

CHECK_VARIABLE = "THALWEG_CHECK"
FLOATING = (torch.float32, torch.bfloat16, torch.float16)


def require(condition: bool, message: str) -> None:
    """Raises ValueError(message) unless `condition`."""
    if not condition:
        raise ValueError(message)


def check_tensor(
    name: str, tensor: torch.Tensor, shape: tuple[int | None, ...], dtypes: tuple[torch.dtype, ...] | None = None
) -> None:
    """Raises ValueError unless `tensor` has `shape` (None = any size) and one of `dtypes` (None = any)."""
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{name}: got {type(tensor).__name__}, needs a tensor")
    fits = tensor.dim() == len(shape) and all(
        want is None or have == want for have, want in zip(tensor.shape, shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name}: got shape {list(tensor.shape)}, needs [{wanted}]")
    if dtypes is not None and tensor.dtype not in dtypes:
        raise ValueError(f"{name}: got {tensor.dtype}, needs {' or '.join(map(str, dtypes))}")


def check_inverse_frequencies(inverse_frequencies: torch.Tensor, width: int) -> None:
    """Raises ValueError unless they are float32 [n] for rows of at least 2n channels."""
    check_tensor("inverse_frequencies", inverse_frequencies, (None,), (torch.float32,))
    pairs = inverse_frequencies.numel()
    require(2 * pairs <= width, f"inverse_frequencies: got {pairs}, rows of {width} channels have {width // 2} pairs")


def check_same_device(**tensors: torch.Tensor | None) -> None:
    """Raises ValueError unless every tensor given lies on one device."""
    devices = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
    if len(set(devices.values())) > 1:
        raise ValueError(f"arguments lie on different devices: {devices}")


def debug_checks() -> bool:
    """Whether THALWEG_CHECK=1: an active index outside its pool then raises instead of being masked."""
    value = os.environ.get(CHECK_VARIABLE, "0")
    if value not in ("0", "1", ""):
        raise UserError(f"{CHECK_VARIABLE}={value}: needs 0 or 1")
    return value == "1"


def in_pool(what: str, index: torch.Tensor, active: torch.Tensor, size: int) -> torch.Tensor:
    """Which of the `active` indices lie in [0, size). With THALWEG_CHECK=1 one that does not raises IndexError.

    -1 is the mark for "none" and never an error.
    """
    inside = active & (index >= 0) & (index < size)
    if debug_checks():
        wrong = active & (index != -1) & ~inside
        if bool(wrong.any()):
            first = int(index[wrong][0])
            raise IndexError(
                f"{what}: {int(wrong.sum())} active indices outside the pool of {size}, the first is {first}"
            )
    return inside
