"""What records of the attention benchmark say: the ratio to the fastest peer at every point, and the means of groups."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from thalweg.kernels.bench.attention.cases import CSA_ENTRIES, WINDOW, Case, Decode, Prefill, case_of
from thalweg.kernels.bench.cases import label
from thalweg.kernels.bench.records import Record
from thalweg.kernels.bench.summary import geomean


@dataclass(frozen=True)
class Point:
    """One case: Thalweg's time beside those of the peers of the same run."""

    case: Case
    us: float
    peers: dict[str, float]

    @property
    def best(self) -> str:
        """The fastest peer."""
        return min(self.peers, key=lambda impl: self.peers[impl])

    def ratio(self, impl: str) -> float:
        """Above 1 where Thalweg is faster than this peer."""
        return self.peers[impl] / self.us


def _is_hca(case: Case) -> bool:
    return isinstance(case, Decode) and case.layout == "v4" and case.entries > WINDOW + CSA_ENTRIES


GROUPS: dict[str, Callable[[Case], bool]] = {
    "64 heads": lambda case: isinstance(case, Decode) and case.heads == 64,
    "8 and 16 heads": lambda case: isinstance(case, Decode) and case.heads in (8, 16),
    "HCA, 64 heads": lambda case: _is_hca(case) and case.heads == 64,
    "other decode": lambda case: isinstance(case, Decode) and case.heads not in (8, 16, 64),
    "prefill": lambda case: isinstance(case, Prefill),
}


def points(records: list[Record]) -> tuple[list[Point], list[tuple[Case, str]]]:
    """(points that count, cases that do not and why). Only times of one run are compared."""
    by_case: dict[Case, dict[str, Record]] = defaultdict(dict)
    for record in records:
        if record["bench"] in (Decode.bench, Prefill.bench):
            by_case[case_of(record["case"])][record["impl"]] = record
    counted, left_out = [], []
    for case, times in by_case.items():
        ours = times.pop("thalweg", None)
        if ours is None:
            left_out.append((case, "thalweg did not run"))
            continue
        peers = {impl: one["us"] for impl, one in times.items() if one.get("run") == ours.get("run")}
        if peers:
            counted.append(Point(case, ours["us"], peers))
        else:
            left_out.append((case, "no peer ran in the same run"))
    return counted, left_out


def lines(records: list[Record]) -> list[str]:
    """The summary for people: every point, then each group against the fastest peer and against each peer."""
    counted, left_out = points(records)
    out = [
        f"{label(point.case)}: {point.us:.2f} us, best peer {point.best} {point.peers[point.best]:.2f} us, "
        f"{point.ratio(point.best):.3f} x"
        for point in counted
    ]
    out += [f"not counted: {label(case)}: {why}" for case, why in left_out]
    for name, belongs in GROUPS.items():
        group = [point for point in counted if belongs(point.case)]
        if group:
            out.append(_mean(name, "the best peer", [point.ratio(point.best) for point in group]))
            impls = dict.fromkeys(impl for point in group for impl in point.peers)
            for impl in impls:
                out.append(_mean(name, impl, [point.ratio(impl) for point in group if impl in point.peers]))
    return out or ["no point counts: needs thalweg and a peer in one run"]


def _mean(group: str, peer: str, ratios: list[float]) -> str:
    return (
        f"{group}, against {peer}: geomean {geomean(ratios):.3f} x over {len(ratios)} points, "
        f"lowest {min(ratios):.3f} x, highest {max(ratios):.3f} x"
    )
