"""What records of the index benchmark say: the ratio at every point, the points lost, the memory taken."""

from collections import defaultdict
from dataclasses import dataclass

from thalweg.kernels.bench.cases import label
from thalweg.kernels.bench.index.cases import Case
from thalweg.kernels.bench.index.pairs import SCORERS, SELECTORS
from thalweg.kernels.bench.records import Record
from thalweg.kernels.bench.summary import geomean


@dataclass(frozen=True)
class Point:
    """One case: the time of Thalweg's index_topk beside the fastest peer pair of the same run."""

    case: Case
    us: float
    peer: str
    peer_us: float

    @property
    def ratio(self) -> float:
        """Above 1 where Thalweg is faster."""
        return self.peer_us / self.us


def points(records: list[Record]) -> tuple[list[Point], list[tuple[Case, str]]]:
    """(points that count, cases that do not and why). Only times of one run are compared."""
    by_case: dict[Case, dict[str, Record]] = defaultdict(dict)
    for record in records:
        if record["bench"] == "index" and record["op"] == "index_topk":
            by_case[Case(**record["case"])][record["impl"]] = record
    pairs = [f"{scorer}+{selector}" for scorer in SCORERS for selector in SELECTORS]
    counted, left_out = [], []
    for case, times in sorted(by_case.items(), key=lambda item: (item[0].rows, item[0])):
        ours = times.get("thalweg")
        if ours is None:
            left_out.append((case, "thalweg did not run"))
            continue
        same_run = [times[pair] for pair in pairs if pair in times and times[pair].get("run") == ours.get("run")]
        if not same_run:
            left_out.append((case, "no peer that scores and no GPU top-k beside torch's ran in the same run"))
            continue
        best = min(same_run, key=lambda record: record["us"])
        counted.append(Point(case, ours["us"], best["impl"], best["us"]))
    return counted, left_out


def lines(records: list[Record]) -> list[str]:
    """The summary for people."""
    counted, left_out = points(records)
    out = [f"not counted: {label(case)}: {why}" for case, why in left_out]
    if not counted:
        return [*out, "no point counts: needs thalweg, a peer that scores and a GPU top-k beside torch's in one run"]
    lost = [point for point in counted if point.ratio < 1]
    out += [
        f"lost: {label(point.case)}: {point.us:.2f} us, {point.peer} {point.peer_us:.2f} us, {point.ratio:.3f} x"
        for point in sorted(lost, key=lambda point: point.ratio)
    ]
    ratios = [point.ratio for point in counted]
    out.append(
        f"index_topk against the fastest pair: geomean {geomean(ratios):.3f} x over {len(counted)} points, "
        f"lowest {min(ratios):.3f} x, highest {max(ratios):.3f} x, {len(lost)} lost, {len(left_out)} not counted"
    )
    return out


def scratch_table(records: list[Record]) -> list[str]:
    """Bytes that Thalweg's index_topk takes beside its results, by keys and ceiling, at the largest batch of one row."""
    ours = [
        (Case(**record["case"]), record["scratch_bytes"])
        for record in records
        if (record["op"], record["impl"]) == ("index_topk", "thalweg") and "scratch_bytes" in record
    ]
    single = [entry for entry in ours if entry[0].rows == 1]
    if not single:
        return []
    batch = max(case.batch for case, _ in single)
    taken = {(case.keys, case.ceiling): size for case, size in single if case.batch == batch}
    ceilings = sorted({ceiling for _, ceiling in taken})
    out = [f"scratch bytes of index_topk, batch {batch}, by keys (down) and ceiling (across):"]
    out.append(" " * 9 + "".join(f"{ceiling:>14,}" for ceiling in ceilings))
    for keys in sorted({keys for keys, _ in taken}):
        cells = (taken.get((keys, ceiling)) for ceiling in ceilings)
        out.append(f"{keys:>9,}" + "".join(f"{'-' if size is None else format(size, ','):>14}" for size in cells))
    return out
