import pytest

from thalweg.errors import UserError
from thalweg.kernels.bench.attention import cases
from thalweg.kernels.bench.attention.cases import Decode, Prefill
from thalweg.kernels.bench.cases import label


def test_the_keys_of_a_case_tell_decode_from_prefill() -> None:
    assert cases.parse("batch=64,heads=16,entries=640") == Decode(64, 16, 640, "v4")
    assert cases.parse("batch=1, heads=128, entries=2048, layout=v32") == Decode(1, 128, 2048, "v32")
    assert cases.parse("rows=4096,heads=64,entries=1152") == Prefill(4096, 64, 1152)


@pytest.mark.parametrize("case", [Decode(64, 16, 640), Decode(1, 64, 2048, "v32"), Prefill(4096, 64, 640)])
def test_a_label_is_what_the_option_takes(case: cases.Case) -> None:
    assert cases.parse(label(case)) == case


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("batch=64,heads=64", "needs also entries"),
        ("rows=64,heads=64", "needs also entries"),
        ("rows=64,batch=1,heads=64,entries=640", "no 'batch'"),
        ("batch=0,heads=64,entries=640", "batch=0"),
        ("batch=1,heads=129,entries=640", "heads=129, needs 1 to 128"),
        ("batch=1,heads=64,entries=650", "multiple of 64, at least 128"),
        ("batch=1,heads=64,entries=64", "at least 128"),
        ("batch=1,heads=64,entries=640,layout=v5", "layout=v5; there are: v4, v32"),
    ],
)
def test_a_bad_case_is_one_line_that_says_what_is_wrong(text: str, said: str) -> None:
    with pytest.raises(UserError) as error:
        cases.parse(text)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("batch", "us"), [(1, 0.12), (4, 0.5), (16, 1.9), (64, 7.6), (128, 15.1)])
def test_floors_are_those_of_the_published_table(batch: int, us: float) -> None:
    assert Decode(batch, 64, 640).floor_us("sparse_mla") == pytest.approx(us, rel=0.06)


def test_a_floor_counts_bytes_and_flop_as_published() -> None:
    # One row, 64 heads: 584 N + 131,072 + 4 N bytes, 131,072 N FLOP.
    case = Decode(1, 64, 1152)
    assert cases.bytes_moved(case) == 584 * 1152 + 131072 + 4 * 1152
    assert cases.flop(case) == 131072 * 1152
    assert cases.flop(Decode(64, 64, 8320)) / 790e6 == pytest.approx(Decode(64, 64, 8320).floor_us("sparse_mla"))
    v32 = Decode(2, 16, 2048, "v32")
    assert cases.bytes_moved(v32) == 2 * (656 * 2048 + 16 * (576 + 512) * 2 + 4 * 2048)
    assert cases.flop(v32) == 2 * 2 * 16 * 2048 * (576 + 512)


def test_rows_of_a_chunk_share_what_they_read() -> None:
    # 4,096 windows of 128 are 4,223 entries, and the rows' picks are among 131,072 / 4 entries, however many they are.
    assert Prefill(4096, 64, 640).distinct_entries == 4223 + 32768
    assert Prefill(4, 64, 640).distinct_entries == 131 + 4 * 512
    assert Prefill(4096, 64, 1152).distinct_entries == 4223 + 1024
    assert Prefill(4096, 64, 128).distinct_entries == 4223
    row = 64 * (512 + 512) * 2 + 4 * 1152
    assert cases.bytes_moved(Prefill(4096, 64, 1152)) == 584 * (4223 + 1024) + 4096 * row


def test_the_grid_holds_every_point_of_the_issue_once_and_begins_with_the_telling_ones() -> None:
    points = cases.grid()
    assert len(points) == len(set(points))
    decode = {(point.heads, point.batch, point.entries) for point in points if isinstance(point, Decode)}
    assert decode >= {
        (heads, batch, entries)
        for heads in (8, 16, 32, 64, 128)
        for batch in (1, 4, 16, 64, 128, 256)
        for entries in (128, 640, 1152, 8320, 2048)
    }
    assert tuple(points[: len(cases.TELLING)]) == cases.TELLING
    assert any(isinstance(point, Prefill) for point in cases.TELLING)
