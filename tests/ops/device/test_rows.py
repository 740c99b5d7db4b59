"""A persistent grid's programs do every tile of every run of rows, each exactly once, for any lengths and owners."""

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from thalweg.ops.device.rows import row_of, run_of, share_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BLOCK, SCAN, REQUESTS, SPAN = 4, 8, 5, 30


@triton.jit
def list_rows(lengths, owners, out, rows, requests, span, MAPPED: tl.constexpr, N: tl.constexpr):
    """(request, length) of the rows -1 to N - 2."""
    row = tl.arange(0, N) - 1
    request, length = row_of(row, lengths, owners, rows, requests, span, MAPPED)
    at = out + tl.arange(0, N) * 2
    tl.store(at, request)
    tl.store(at + 1, length)


@triton.jit
def list_runs(
    lengths, owners, out, rows, requests, span,
    MAPPED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """(request, rows, longest, tiles) of the runs that begin at the rows 0 to N - 1."""
    row = tl.arange(0, N)
    request, size, longest, tiles = run_of(row, lengths, owners, rows, requests, span, MAPPED, ROWS, BLOCK)
    at = out + row * 4
    tl.store(at, request)
    tl.store(at + 1, size)
    tl.store(at + 2, longest)
    tl.store(at + 3, tiles)


@triton.jit
def list_shares(
    lengths, owners, out, rows, requests, span,
    MAPPED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """(first tile, end tile, first row, its first tile) of every program."""
    first, end, row, begin = share_of(
        tl.program_id(0), tl.num_programs(0), lengths, owners, rows, requests, span, MAPPED, ROWS, BLOCK, SCAN
    )
    at = out + tl.program_id(0) * 4
    tl.store(at, first)
    tl.store(at + 1, end)
    tl.store(at + 2, row)
    tl.store(at + 3, begin)


def expected_rows(lengths: list[int], owners: list[int] | None, requests: int) -> list[tuple[int, int]]:
    """(request, length) of every row, (-1, 0) where there is no such request."""
    pairs = zip(range(len(lengths)) if owners is None else owners, lengths, strict=True)
    return [(owner, min(max(n, 0), SPAN)) if 0 <= owner < requests else (-1, 0) for owner, n in pairs]


def expected_runs(rows: list[tuple[int, int]], most: int) -> list[tuple[int, int, int, int, int]]:
    """(first row, request, rows, longest, tiles): rows of one request side by side, cut before multiples of `most`."""
    runs: list[list[int]] = []
    for row, (request, length) in enumerate(rows):
        if row % most and runs and runs[-1][1] == request:
            runs[-1][2] += 1
            runs[-1][3] = max(runs[-1][3], length)
        else:
            runs.append([row, request, 1, length])
    return [(*run, max(1, -(-run[3] // BLOCK))) for run in runs]


owners_and_lengths = st.lists(
    st.tuples(st.integers(-1, REQUESTS), st.integers(1, 3), st.integers(-2, SPAN + 9)), min_size=1, max_size=14
).map(lambda parts: [(owner, n + j) for owner, rows, n in parts for j in range(rows)])


def call(kernel, shape: tuple[int, int], grid: int, lengths: list[int], owners: list[int] | None, *constants: int):
    requests = len(lengths) if owners is None else REQUESTS
    counts = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    mapped = owners is not None
    of_rows = torch.tensor(owners, dtype=torch.int64, device=DEVICE) if mapped else counts
    out = torch.full(shape, -99, dtype=torch.int32, device=DEVICE)
    kernel[(grid,)](counts, of_rows, out, len(lengths), requests, SPAN, mapped, *constants, enable_fp_fusion=True)
    return out.tolist()


@pytest.mark.parametrize("mapped", [False, True])
@settings(max_examples=12, deadline=None, derandomize=True)
@given(owners_and_lengths)
def test_a_rows_length_is_clipped_to_the_table_and_no_request_means_no_entries(
    mapped: bool, rows: list[tuple[int, int]]
) -> None:
    owners, lengths = map(list, zip(*rows, strict=True))
    want = expected_rows(lengths, owners if mapped else None, REQUESTS if mapped else len(lengths))
    got = call(list_rows, (64, 2), 1, lengths, owners if mapped else None, 64)
    assert got == [[-1, 0], *map(list, want), *[[-1, 0]] * (63 - len(want))]


@pytest.mark.parametrize(("mapped", "most"), [(False, 1), (False, 4), (True, 1), (True, 2), (True, 4)])
@settings(max_examples=8, deadline=None, derandomize=True)
@given(owners_and_lengths)
def test_runs_are_the_rows_side_by_side_of_one_request(mapped: bool, most: int, rows: list[tuple[int, int]]) -> None:
    owners, lengths = map(list, zip(*rows, strict=True))
    pairs = expected_rows(lengths, owners if mapped else None, REQUESTS if mapped else len(lengths))
    got = call(list_runs, (64, 4), 1, lengths, owners if mapped else None, most, BLOCK, 64)
    runs = expected_runs(pairs, most)
    assert {row: tuple(run) for row, run in enumerate(got) if run[3]} == {run[0]: run[1:] for run in runs}
    assert sum(run[2] for run in runs) == len(lengths)


@pytest.mark.parametrize(("mapped", "most"), [(False, 1), (True, 1), (True, 2), (True, 4)])
@settings(max_examples=10, deadline=None, derandomize=True)
@given(owners_and_lengths, st.integers(1, 7))
def test_every_tile_of_every_run_is_one_programs(
    mapped: bool, most: int, rows: list[tuple[int, int]], programs: int
) -> None:
    owners, lengths = map(list, zip(*rows, strict=True))
    pairs = expected_rows(lengths, owners if mapped else None, REQUESTS if mapped else len(lengths))
    tiles = [(row, begun) for row, _, _, _, count in expected_runs(pairs, most) for begun in range(count)]
    shares = call(list_shares, (programs, 4), programs, lengths, owners if mapped else None, most, BLOCK, SCAN)
    done: list[tuple[int, int]] = []
    for first, end, row, begin in shares:
        assert first == len(done) or first == end
        if first < end:
            assert (row, first - begin) == tiles[first]
        done += tiles[first:end]
    assert done == tiles
    sizes = [end - first for first, end, _, _ in shares]
    assert max(sizes) - min(sizes) <= 1  # equal shares


def test_more_programs_than_tiles_leaves_the_others_without_work() -> None:
    shares = call(list_shares, (5, 4), 5, [0, 3], None, 1, BLOCK, SCAN)
    assert [end - first for first, end, _, _ in shares] == [1, 1, 0, 0, 0]
