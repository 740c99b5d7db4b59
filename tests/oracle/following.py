"""The naive oracle led by a paged run, so that quantisation cannot blow rounding errors up from layer to layer.

Left alone, two right implementations drift apart: an error of 1e-7 now and then crosses the middle between two e4m3 codes,
which moves that value by 6 to 12%, which makes more codes cross in the next layer. So this oracle computes each cache row
itself, checks that the value found in the cache is a right rounding of it, and goes on with the value found; likewise with
the indexer's choice. What remains is float32 against float64.
"""

from dataclasses import replace

import torch

from tests.oracle.naive_v4 import NaiveV4, Switches
from tests.oracle.transformers_v4 import PagedRun
from thalweg.layouts.registry import layout_of
from thalweg.models.config import DeepseekV4Config


class Follower(NaiveV4):
    def __init__(
        self,
        config: DeepseekV4Config,
        weights: dict[str, torch.Tensor],
        switches: Switches,
        run: PagedRun,
        choices: list[torch.Tensor],
    ) -> None:
        """run: request 0 has been fed. choices: int [T, k] of each CSA layer, the entries that its indexer chose."""
        super().__init__(config, weights, replace(switches, quantised=True))
        self.run, self.choices = run, list(choices)
        self.values = 0
        """compared so far"""
        self.crossed = 0
        """values whose code is not the naive one"""
        self.worst_crossing = 0.0
        """by how much further from the naive value than the naive rounding, relative to the row's largest value"""
        self.worst_choice = 0.0
        """by how much the best entry left out beats the worst one chosen, relative to the row's highest score"""
        self.other_choices = 0
        """rows whose chosen set is not the naive one"""

    def cached(self, rows: torch.Tensor, part: str) -> torch.Tensor:
        own, found = super().cached(rows, part), self._read(part, len(rows))
        crossed = (own - found).abs() > 1e-6 * own.abs()
        self.values += own.numel()
        self.crossed += int(crossed.sum())
        further = (found - rows).abs() - (own - rows).abs()
        if not part.endswith("window"):
            further -= rows.abs() * 2**-7  # the first rounding may have gone to the other bf16 neighbour
        relative = (further / rows.abs().amax(dim=1, keepdim=True))[crossed]
        self.worst_crossing = max([self.worst_crossing, *relative.tolist()])
        return found

    def choose(self, scores: torch.Tensor) -> list[list[int]]:
        own = super().choose(scores)
        found = [row[row >= 0].tolist() for row in self.choices.pop(0)]
        for t, (mine, theirs) in enumerate(zip(own, found, strict=True)):
            visible = (t + 1) // 4
            assert len(set(theirs)) == len(theirs) == len(mine) and all(entry < visible for entry in theirs), (
                t,
                theirs,
            )
            if set(mine) == set(theirs):
                continue
            self.other_choices += 1
            left_out = sorted(set(range(visible)) - set(theirs))
            beaten_by = scores[t, left_out].max() - scores[t, theirs].min()
            self.worst_choice = max(self.worst_choice, float(beaten_by / scores[t, :visible].abs().max()))
        return found

    def assert_right_roundings(self) -> None:
        """Few values have another code than the naive one, and those lie where float32 cannot tell the codes apart."""
        assert self.crossed < 5e-4 * self.values, f"{self.crossed} of {self.values} cached values have another code"
        assert self.worst_crossing < 1e-5
        assert self.other_choices <= 5 and self.worst_choice < 1e-3

    def _read(self, part: str, count: int) -> torch.Tensor:
        """The first `count` rows of one of request 0's caches, float64."""
        kind, number, _, *_, name = part.split(".")
        layer = int(number) + (self.config.num_layers if kind == "mtp" else 0)
        caches = self.run.caches[layer]
        cache = {"window": caches.window, "compressed": caches.compressed, "index_keys": caches.index_keys}[name]
        assert cache is not None
        table = (self.run.window_table if name == "window" else self.run.page_table)[0]
        entry, slots = torch.arange(count), cache.shape[1]
        return layout_of(cache).read(cache, table[entry // slots] * slots + entry % slots).double()
