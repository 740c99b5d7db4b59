import pytest

from thalweg.errors import UserError
from thalweg.kernels.bench.index import cases
from thalweg.kernels.bench.index.cases import Case


def test_a_case_is_read_from_its_text() -> None:
    assert cases.parse("batch=64,keys=32768,ceiling=131072,rows=2") == Case(64, 32768, 131072, rows=2, k=512)
    assert cases.parse("batch=1, keys=128, ceiling=8192") == Case(1, 128, 8192, rows=1, k=512)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("batch=64,keys=32768", "needs also ceiling"),
        ("batch=64,key=32768,ceiling=131072", "no 'key'"),
        ("batch=x,keys=128,ceiling=8192", "batch='x'"),
        ("batch=0,keys=128,ceiling=8192", "batch=0"),
        ("batch=1,keys=4096,ceiling=8192", "more than the ceiling"),
        ("batch=1,keys=128,ceiling=8000", "multiple of 256"),
    ],
)
def test_a_bad_case_is_one_line_that_says_what_is_wrong(text: str, said: str) -> None:
    with pytest.raises(UserError) as error:
        cases.parse(text)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_the_grid_holds_every_point_whose_keys_fit_under_the_ceiling() -> None:
    points = cases.grid()
    # 128 and 2,048 keys fit under all three ceilings, 32,768 under two, 262,144 under one: 9 of 12.
    assert len(points) == 9 * 5 * 3 == len(set(points))
    assert Case(128, 262144, 1048576, rows=4) in points


def test_floors_are_those_of_the_published_table() -> None:
    # 64 requests of 32,768 keys of 132 B at 4.3 TB/s: 64.4 us for the keys alone.
    case = Case(64, 32768, 131072)
    assert case.floor_us("index_topk") == pytest.approx(64.4, rel=0.01)
    assert case.floor_us("mqa_logits") - case.floor_us("index_topk") == pytest.approx(1.9, rel=0.05)
    assert case.floor_us("topk") == pytest.approx(64 * (32768 + 512) * 4 / 4.3e6, rel=1e-6)


def test_more_rows_read_no_more_keys_but_multiply_more() -> None:
    one, four = Case(64, 32768, 131072), Case(64, 32768, 131072, rows=4)
    assert four.flop("mqa_logits") == 4 * one.flop("mqa_logits") == 4 * 16384 * 64 * 32768
    assert four.floor_us("index_topk") == pytest.approx(four.flop("index_topk") / 790e6)
    assert four.floor_us("index_topk", 1580e12) == pytest.approx(four.flop("index_topk") / 1580e6)
