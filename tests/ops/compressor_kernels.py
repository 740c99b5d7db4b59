"""What the tests of the compressor kernel share. They run on the GPU where there is one, else interpreted on the CPU."""

from dataclasses import dataclass

import torch

from tests.ops.attention_kernels import DEVICE, there_of
from tests.ops.builders import NAN, frequencies, randn, seeded
from tests.ops.store_kernels import again, allocate
from thalweg.layouts.registry import layout_of
from thalweg.ops import CompressPlan, compress

DIMENSIONS = {"v4": 512, "v32": 576, "index_fp8": 128, "mla_bf16": 576, "exact": 96}


@dataclass
class Requests:
    """Requests in one pool of states and one cache; the kernel's and the reference's copies side by side."""

    ratio: int
    layout: str
    dtype: torch.dtype = torch.float32
    hadamard: bool = False
    d: int = 0
    states: int = 9
    slots: int = 200
    page_slots: int = 4
    integers: torch.dtype = torch.int64
    seed: int = 0

    def __post_init__(self) -> None:
        self.d = self.d or DIMENSIONS[self.layout]
        self.generator = seeded(self.seed + self.ratio)
        self.width, ring = (2 * self.d, 8) if self.ratio == 4 else (self.d, 128)
        self.ape = randn(self.generator, self.ratio, self.width)
        self.norm = randn(self.generator, self.d)
        cache = allocate(self.layout, self.slots, self.page_slots, self.d)
        self.caches = {name: again(cache) for name in ("triton", "reference")}
        state = torch.full((self.states, ring, 2, self.width), NAN, device=DEVICE)
        self.state = {name: state.clone() for name in ("triton", "reference")}
        self.at = [0] * self.states  # how many tokens each request has

    def step(self, *parts: tuple[int, int], padding: int = 0, store: bool = True, kv: float | None = None) -> None:
        """A call with `parts` of (request, rows) in this order, `padding` rows of NaN around each; both implementations."""
        columns: list[list[torch.Tensor]] = [[], [], [], [], []]
        for request, rows in parts:
            self._pad(columns, padding)
            positions = torch.arange(self.at[request], self.at[request] + rows)
            self.at[request] += rows
            entry = self.page_slots + request * (self.slots // self.states) + positions // self.ratio
            complete = (positions % self.ratio == self.ratio - 1) & store
            values = randn(self.generator, 2, rows, self.width).to(self.dtype)
            if kv is not None:
                values[0] = kv
            new = (values[0], 2 * values[1], positions, torch.full((rows,), request), torch.where(complete, entry, -1))
            for column, part in zip(columns, new, strict=True):
                column.append(part)
        self._pad(columns, padding)
        self.call(*(torch.cat(column) for column in columns))

    def _pad(self, columns: list[list[torch.Tensor]], rows: int) -> None:
        none = torch.full((rows,), -1)
        nan = torch.full((rows, self.width), NAN, dtype=self.dtype)
        for column, part in zip(columns, (nan, nan, torch.zeros_like(none), none, none), strict=True):
            column.append(part)

    def call(self, kv: torch.Tensor, gate: torch.Tensor, *plan: torch.Tensor) -> None:
        for name in ("triton", "reference"):
            where = CompressPlan(*(there_of(part.to(self.integers)) for part in plan))
            compress(
                there_of(kv), there_of(gate), self.state[name], there_of(self.ape), where, there_of(self.norm),
                there_of(frequencies()), self.caches[name],
                ratio=self.ratio, hadamard=self.hadamard, implementation=name,
            )  # fmt: skip

    def check(self) -> torch.Tensor:
        """The same state, bit for bit; the same slots written, with the same values but for a step; these values."""
        ours, theirs = self.state["triton"], self.state["reference"]
        assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32))
        ours, theirs = (self.caches[name] for name in ("triton", "reference"))
        written = [self._bytes(each) != 0x11 for each in (ours, theirs)]
        layout = layout_of(ours)
        every = torch.arange(ours.shape[0] * ours.shape[1], device=DEVICE)
        got, want = (layout.read(each, every).double() for each in (ours, theirs))
        empty = layout.read(again(allocate(self.layout, self.slots, self.page_slots, self.d)), every).double()
        changed = (want != empty).any(1) | want.isnan().any(1)
        assert torch.equal(got[~changed], empty[~changed])
        assert written[0].sum() >= 0.9 * written[1].sum() and written[0].sum() < 1.1 * written[1].sum() + 1
        a, b = got[changed], want[changed]
        assert torch.equal(a.isnan(), b.isnan())
        a, b = a.nan_to_num(), b.nan_to_num()
        if len(b) == 0:
            return got
        largest = b.abs().amax(1, keepdim=True)
        if self.layout == "exact":
            assert ((a - b).abs() <= 1e-6 * b.abs() + 5e-6 * largest).all()
        else:
            # A step of bf16 may become one of e4m3, and move a scale of a whole group by a power of two.
            assert ((a - b).abs() <= 2.0**-3 * b.abs() + 2.0**-8 * largest).all()
            assert (a == b).double().mean() > 0.99
        return got

    @staticmethod
    def _bytes(cache: torch.Tensor) -> torch.Tensor:
        return torch.tensor([], dtype=torch.uint8, device=DEVICE).set_(cache.untyped_storage())
