"""How the tests of kernels bend what they run: small grids, small sizes, another choice."""

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from thalweg.ops import dispatch, hardware
from thalweg.ops.topk.scratch import Scratch, scratch


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small grids where kernels are interpreted: a program costs milliseconds there."""
    monkeypatch.setattr(hardware, "INTERPRETED_MULTIPROCESSORS", 1)


@pytest.fixture
def kernels_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted kernels are chosen as on a GPU: where nobody forces another implementation."""
    for operation, known in dispatch._operations.items():
        unavoided = [
            dispatch.Implementation(one.name, one.function, one.unsupported, dispatch.anywhere, one.rejects)
            for one in known
        ]
        monkeypatch.setitem(dispatch._operations, operation, unavoided)


@pytest.fixture
def small_selection(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every level of the selection within rows of a few hundred entries: 64 candidates for 4096, 512 keys for 32,768."""
    from thalweg.ops.index_topk import triton as fused
    from thalweg.ops.topk import triton as alone

    sizes = {"CAPACITY": 64, "SIZE": 16, "DENSE": 512, "ROWS_AT_ONCE": 8}
    for name, value in sizes.items():
        monkeypatch.setattr(fused, name, value)
        monkeypatch.setattr(alone, name, value)
    monkeypatch.setattr(alone, "_TILE", 256)
    cached = (fused.keys_variant, fused.select_variant, alone.maxima_variant, alone.topk_variant)
    for variant in cached:
        variant.cache_clear()
    yield
    for variant in cached:
        variant.cache_clear()


@pytest.fixture
def spoiled_scratch(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """All scratch that a selection takes holds the highest keys there are, and indices that are none; returns its tensors."""
    from thalweg.ops.index_topk import triton as fused
    from thalweg.ops.topk import triton as alone

    taken: list[torch.Tensor] = []

    def spoiled(device: torch.device, rows: int) -> Scratch:
        memory = scratch(device, rows)
        for tensor in vars(memory).values():
            tensor.fill_(-2)  # as a key the highest that a score can have
            taken.append(tensor)
        return memory

    monkeypatch.setattr(fused, "scratch", spoiled)
    monkeypatch.setattr(alone, "scratch", spoiled)
    return taken


@pytest.fixture
def splits(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Forces the number of splits of attention: splits["of"] = 3."""
    from thalweg.ops.sparse_mla import choice

    forced: dict[str, int] = {}
    chosen = choice.splits_of
    monkeypatch.setattr(choice, "splits_of", lambda *args: forced.get("of") or chosen(*args))
    return forced


@pytest.fixture
def spoiled_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """What attention allocates, results and scratch, holds NaN before it is written."""
    from thalweg.ops.sparse_mla import triton as kernels

    spoil(monkeypatch, kernels)


@pytest.fixture
def spoiled_mhc(monkeypatch: pytest.MonkeyPatch) -> None:
    """What hyper-connections allocate, results and partial products, holds NaN before it is written."""
    from thalweg.ops.mhc import triton as kernels

    spoil(monkeypatch, kernels)


def spoil(monkeypatch: pytest.MonkeyPatch, kernels: ModuleType) -> None:
    """What `kernels` allocates by torch.empty holds NaN."""

    class Torch:
        def __getattr__(self, name: str) -> object:
            return spoiled if name == "empty" else getattr(torch, name)

    def spoiled(*shape, **kwargs) -> torch.Tensor:
        return torch.empty(*shape, **kwargs).fill_(float("nan"))

    monkeypatch.setattr(kernels, "torch", Torch())


@pytest.fixture
def spoiled_norm_rope(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernels of queries allocate holds NaN before it is written."""
    from thalweg.ops.norm_rope_store import triton as kernels

    spoil(monkeypatch, kernels)
