"""Work is counted where it happens, for whoever asks, and outside a count nothing is."""

import pytest
import torch

from thalweg.layouts import v4
from thalweg.layouts.work import Work, count, counting, is_counting


def test_reads_count_their_distinct_pages_and_rows() -> None:
    cache = v4.allocate(4, 16)
    with counting() as work:
        v4.read(cache, torch.tensor([16, 17, 63]))
        v4.read(cache, torch.tensor([16]))
        v4.write(cache, torch.tensor([16]), torch.zeros(1, 512))
    assert (work.pages_read, work.rows_read) == (3, 4)


def test_each_of_nested_counts_sees_all_work_inside_it() -> None:
    with counting() as outer:
        count(Work(keys_scored=1))
        with counting() as inner:
            count(Work(keys_scored=10, entries_attended=5))
        count(Work(keys_scored=100))
    count(Work(keys_scored=1000))
    assert inner == Work(keys_scored=10, entries_attended=5)
    assert outer == Work(keys_scored=111, entries_attended=5)


def test_a_count_ends_when_its_block_raises() -> None:
    with pytest.raises(ZeroDivisionError), counting():
        assert is_counting()
        raise ZeroDivisionError
    assert not is_counting()
