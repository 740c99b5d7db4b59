"""e4m3, ue8m0 and bf16 from their definitions, in NumPy: what the tests compare bytes with. No torch, no thalweg."""

import math

import numpy as np


def e4m3_value(code: int) -> float:
    """Sign, four exponent bits with bias 7, three mantissa bits; exponent 0 is subnormal; 0x7F and 0xFF are NaN."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 0xF, code & 0x7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


E4M3 = np.array([e4m3_value(code) for code in range(256)])
_POSITIVE = E4M3[:127]


def e4m3_codes(values: np.ndarray) -> np.ndarray:
    """The nearest e4m3, ties to the even code, saturating at 448."""
    size = np.minimum(np.abs(values.astype(np.float64)), 448.0)
    below = np.searchsorted(_POSITIVE, size, side="right") - 1
    above = np.minimum(below + 1, 126)
    middle = (_POSITIVE[below] + _POSITIVE[above]) / 2
    up = (size > middle) | ((size == middle) & (below % 2 == 1))
    return (np.where(up, above, below) + 0x80 * np.signbit(values)).astype(np.uint8)


def bf16(values: np.ndarray) -> np.ndarray:
    """Rounded to 8 significant bits, ties to even, as float64; below 2^-126 the step stays 2^-133."""
    wide = values.astype(np.float64)
    step = np.maximum(np.frexp(wide)[1] - 8, -133)
    return np.ldexp(np.rint(np.ldexp(wide, -step)), step)


def bf16_bytes(values: np.ndarray) -> np.ndarray:
    """Little endian bytes [..., 2 n] of values [..., n]: the upper half of the float32 of the rounded value."""
    upper = np.ascontiguousarray(bf16(values).astype("<f4")).view("<u4") >> 16
    return upper.astype("<u2").view(np.uint8)


def power_of_two_at_least(value: float) -> int:
    """The smallest e with 2^e >= value > 0."""
    fraction, exponent = math.frexp(value)
    return exponent - 1 if fraction == 0.5 else exponent


def v4_slot(row: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(576 data bytes, 8 scale bytes) of a float row [512]: 7 groups of 64 with ue8m0 scales, 64 bf16."""
    row = row.astype(np.float32)
    codes, scales = [], []
    for group in row[:448].reshape(7, 64):
        exponent = power_of_two_at_least(max(float(np.abs(group).max()), float(np.float32(1e-4))) / 448)
        scales.append(127 + exponent)
        codes.append(e4m3_codes(group.astype(np.float64) * 2.0**-exponent))
    data = np.concatenate([*codes, bf16_bytes(row[448:])])
    return data, np.array([*scales, 0], dtype=np.uint8)


def v4_values(row: np.ndarray) -> np.ndarray:
    """What a v4 slot gives back for a float row [512], float64."""
    data, scales = v4_slot(row)
    scale = np.repeat(2.0 ** (scales[:7].astype(int) - 127.0), 64)
    return np.concatenate([E4M3[data[:448]] * scale, bf16(row.astype(np.float32)[448:])])


def index_key(key: np.ndarray) -> tuple[np.ndarray, np.float32]:
    """(128 codes, float32 scale) of an index key: scale max(amax, 1e-4) / 448 in float32, not rounded to a power."""
    key = key.astype(np.float32)
    scale = np.maximum(np.abs(key).max(), np.float32(1e-4)) / np.float32(448)
    return e4m3_codes(key / scale), scale
