"""`thalweg generate --needle N`: a question whose answer stands N bytes back, and a verdict, right or wrong."""

import re

import pytest

from thalweg.cli import main
from thalweg.engine import needle
from thalweg.engine.needle import SPAN_BYTES, plant

QUESTION = re.compile(r"\nThe code of ([a-z]{5}-[a-z]{5}) is $")


@pytest.mark.parametrize("distance", [SPAN_BYTES, 64, 1000, 16384, 100_000])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_line_begins_so_many_bytes_before_the_question(distance: int, seed: int) -> None:
    prompt, asked = plant(distance, seed, None)
    key = QUESTION.search(prompt)
    assert key is not None and key.group(1) == asked.key
    assert prompt.count(f"The code of {asked.key} is") == 2 and prompt.count(asked.value) == 1
    assert key.start() - prompt.index(f"\nThe code of {asked.key} is {asked.value}.\n") == distance


def test_other_lines_stand_beside_it() -> None:
    prompt, _ = plant(1000, 0, None)
    assert len(set(re.findall(r"\nThe code of (\S+) is \d{5}\.\n", prompt))) == 4


def test_a_seed_fixes_the_prompt() -> None:
    assert plant(500, 3, None) == plant(500, 3, None) != plant(500, 4, None)


@pytest.mark.parametrize("text", ["ä" * 400, "漢字" * 150, "a😀" * 200])
def test_distances_are_bytes_in_any_script(text: str) -> None:
    for seed in range(8):
        prompt, asked = plant(300, seed, text)
        content = prompt.encode()
        question = content.rindex(b"\nThe code of")
        assert question - content.index(f"\nThe code of {asked.key} is {asked.value}.\n".encode()) == 300
        assert len(content) == len(text.encode()) + SPAN_BYTES + len(f"\n{asked.question}")
        assert prompt.count("?") <= 3 * 8, "only characters that a line split are lost"


def test_a_right_answer_is_called_right(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's own answer, made the expected one."""
    assert main(["generate", "--needle", "64", "--seed", "1"]) == 0
    captured = capsys.readouterr()
    given = captured.out.removesuffix("\n")
    _, asked = plant(64, 1, None)
    assert (
        captured.err == f"{'right' if given == asked.value else 'wrong'}: expected {asked.value!r}, given {given!r}\n"
    )
    for value, verdict in ((given, "right"), ("x" + given, "wrong")):
        told = needle.Needle(asked.key, value)
        monkeypatch.setattr(needle, "plant", lambda *arguments, told=told: (plant(*arguments)[0], told))
        assert main(["generate", "--needle", "64", "--seed", "1"]) == 0
        assert capsys.readouterr().err.startswith(f"{verdict}: expected {value!r}")


def test_text_may_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--needle", "64", "--max-tokens", "3", "The river bed is deepest where " * 4]) == 0
    captured = capsys.readouterr()
    assert len(captured.out) <= 4 and re.fullmatch(r"(right|wrong): expected '\d{5}', given '.*'\n", captured.err)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--needle", "10"], f"needle is 10; possible is {SPAN_BYTES} bytes (the line itself) or more"),
        (["--needle", "1000", "short"], "needs 965 bytes of text behind it; given were 5"),
        (["--needle", "2000000"], "exceed this model's 1,048,576"),
    ],
)
def test_impossible_needles(capsys: pytest.CaptureFixture[str], argv: list[str], message: str) -> None:
    assert main(["generate", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and message in captured.err
