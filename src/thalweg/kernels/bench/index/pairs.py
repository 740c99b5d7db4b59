"""Records of the index benchmark: what ran, and each peer's scoring with each peer's selection."""

from typing import Any

from thalweg.kernels.bench.cases import FLOP_PER_SECOND
from thalweg.kernels.bench.index.cases import Case
from thalweg.kernels.bench.records import Record, record
from thalweg.kernels.bench.records import records_of as single_records_of

SCORERS = ("deepgemm", "tilelang")
# A point needs one of these: torch.topk is no GPU top-k that anybody serves with.
SELECTORS = ("sglang-topk", "flashinfer")


def records_of(case: Case, results: list[dict[str, Any]], stamp: Record, flop_per_second: float | None) -> list[Record]:
    """Records of what ran at one case: each result, then each pair of a peer's scoring and a peer's selection."""
    made = single_records_of(case, results, stamp, flop_per_second)
    rate = flop_per_second or FLOP_PER_SECOND
    by_impl = {result["impl"]: result for result in results}
    for scorer in filter(by_impl.__contains__, SCORERS):
        for selector in filter(by_impl.__contains__, (*SELECTORS, "torch")):
            pair = by_impl[scorer], by_impl[selector]
            parts = {part["op"]: round(part["us"], 3) for part in pair}
            us, error = sum(part["us"] for part in pair), max(part["error"] for part in pair)
            made.append(record(case, "index_topk", f"{scorer}+{selector}", us, error, rate, {"parts": parts}, stamp))
    return made
