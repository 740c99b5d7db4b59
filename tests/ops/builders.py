"""Small inputs that the tests of the operations share, and the formulas' pieces written out in float64 NumPy."""

import numpy as np
import torch

from tests.layouts.number_formats import E4M3, bf16, e4m3_codes, v4_values

NAN = float("nan")


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator)


def frequencies(count: int = 32, base: float = 1e4) -> torch.Tensor:
    """float32 inverse frequencies [count] of plain RoPE."""
    return (base ** (-torch.arange(count, dtype=torch.float64) / count)).float()


def turn(row: np.ndarray, position: int, inverse_frequencies: torch.Tensor) -> np.ndarray:
    """RoPE on the last channels of a float64 row, pair (2i, 2i+1) by position x f_i, angle, cos and sin in float32."""
    out = np.array(row, dtype=np.float64)
    start = len(out) - 2 * len(inverse_frequencies)
    for i, frequency in enumerate(inverse_frequencies):
        angle = torch.tensor(float(position), dtype=torch.float32) * frequency
        cos, sin = float(angle.cos()), float(angle.sin())
        a, b = row[start + 2 * i], row[start + 2 * i + 1]
        out[start + 2 * i], out[start + 2 * i + 1] = a * cos - b * sin, a * sin + b * cos
    return out


def normed(row: np.ndarray, weight: np.ndarray | None = None, eps: float = 1e-6) -> np.ndarray:
    """RMSNorm of a float64 row."""
    out = row / np.sqrt((row**2).mean() + eps)
    return out if weight is None else out * weight


def walsh(size: int) -> np.ndarray:
    """The orthonormal Hadamard matrix in natural order: entry (i, j) has the sign of the parity of i AND j."""
    return np.array([[(-1) ** bin(i & j).count("1") for j in range(size)] for i in range(size)]) / np.sqrt(size)


def wide(tensor: torch.Tensor) -> np.ndarray:
    """float64 NumPy of any tensor."""
    return tensor.double().numpy()


def stored_value(name: str, row: np.ndarray) -> np.ndarray:
    """What a cache of a layout gives back for a float row, float64."""
    if name == "exact":
        return row.astype(np.float32).astype(np.float64)
    if name == "mla_bf16":
        return bf16(row)
    if name == "v32":
        values = [bf16(row.astype(np.float32)[512:])]
        for group in reversed(row.astype(np.float32)[:512].reshape(4, 128)):
            scale = np.maximum(np.abs(group).max(), np.float32(1e-4)) / np.float32(448)
            values.insert(0, (E4M3[e4m3_codes(group / scale)] * np.float64(scale)).astype(np.float32))
        return np.concatenate(values).astype(np.float64)
    return v4_values(row)


def page_table(generator: torch.Generator, requests: int, pages: int, width: int, pool: int) -> torch.Tensor:
    """int32 [requests, width]: `pages` distinct page ids >= 1 a request, beyond them ids that are in no pool."""
    ids = torch.randperm(pool - 1, generator=generator)[: requests * pages] + 1
    table = torch.full((requests, width), 2**31 - 1, dtype=torch.int32)
    table[:, :pages] = ids.view(requests, pages).int()
    return table
