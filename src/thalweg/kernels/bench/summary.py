"""Arithmetic of summaries."""

import math


def geomean(values: list[float]) -> float:
    """The geometric mean of positive values, at least one."""
    return math.exp(sum(map(math.log, values)) / len(values))
