"""Documents with planted lines: what is asked for is there to be read, once, as far back as was asked for."""

import random
import re

import pytest
import torch

from tests.heldout import GENCOL, PTY
from thalweg.engine.needle import DIGITS, SPAN_BYTES, WORDS, is_reserved
from tools.tiny.needles import (
    SHORTEST,
    TOKENS_PER_QUESTION,
    NeedleBatch,
    NeedleStream,
    evaluation_document,
    evaluation_length,
    log_uniform,
    training_document,
)
from tools.tiny.training_data import TokenStream

LINE = re.compile(rb"\nThe code of ([a-z]{5}-[a-z]{5}) is (\d{5})\.\n")
HAYSTACK = (PTY + GENCOL) * 8


def found(content: bytes) -> list[tuple[int, bytes, bytes]]:
    """(place, key, value) of every planted line and every question, read from the text alone."""
    return [(match.start(), *match.groups()) for match in LINE.finditer(content)]


def needle_stream() -> NeedleStream:
    content = b"\xff".join((PTY, GENCOL)) + b"\xff"
    return NeedleStream(TokenStream(torch.frombuffer(bytearray(content), dtype=torch.uint8), 256, torch.device("cpu")))


def keys(batch: NeedleBatch) -> set[str]:
    return {key.decode() for row in batch.ids for _, key, _ in found(bytes(min(t, 255) for t in row.tolist()))}


def test_words_make_lines_of_one_length() -> None:
    assert len(set(WORDS)) == len(WORDS) > 100
    assert all(re.fullmatch("[a-z]{5}", word) for word in WORDS)


@pytest.mark.parametrize("size", [256, 1026, 4098])
def test_a_training_document_answers_each_of_its_questions_once(size: int) -> None:
    for seed in range(20):
        document = training_document(HAYSTACK, size, random.Random(seed))
        assert len(document.content) == size
        read = found(document.content)
        places: dict[bytes, list[int]] = {}
        for place, key, value in read:
            places.setdefault(key + value, []).append(place)
        assert len(places) == len({key for _, key, _ in read}), "a key has one value"
        assert sorted(len(of_key) for of_key in places.values()).count(1) == len(document.lines) - len(
            document.questions
        )
        asked = {question: line for line, question in (p for p in places.values() if len(p) == 2)}
        assert asked == document.questions, "line first, question later, nothing else"
        assert all(SHORTEST <= question - line < size - SPAN_BYTES for question, line in asked.items())
        assert 0 < len(asked) <= size // TOKENS_PER_QUESTION


def test_the_haystack_runs_on_around_the_lines() -> None:
    document = training_document(HAYSTACK, 2048, random.Random(3))
    rest = LINE.sub(b"", document.content)
    assert len(rest) > 500 and HAYSTACK.startswith(rest)


def test_distances_are_spread_evenly_over_their_logarithms() -> None:
    generator = random.Random(1)
    drawn = [log_uniform(generator, 64, 16384) for _ in range(4000)]
    assert min(drawn) >= 64 and max(drawn) <= 16384
    for octave in range(8):
        share = sum(64 << octave <= distance < 128 << octave for distance in drawn) / len(drawn)
        assert share == pytest.approx(1 / 8, abs=0.03)


@pytest.mark.parametrize("distance", [64, 1024, 5000])
def test_an_evaluation_document_ends_with_a_question_that_far_from_its_line(distance: int) -> None:
    begins = set()
    for seed in range(20):
        content = evaluation_document(HAYSTACK, distance, random.Random(seed)).content
        read = found(content)
        last, key, value = read[-1]
        assert last + SPAN_BYTES == len(content) <= evaluation_length(distance)
        (line,) = (place for place, other, _ in read[:-1] if other == key)
        assert dict(read_pairs(read))[key] == value and last - line == distance
        assert len(read) > 2 and len({other for _, other, _ in read}) == len(read) - 1, "other lines, other keys"
        begins.add(line % 128)
    assert len(begins) > 10, "the line begins anywhere in a group of entries"


def read_pairs(read: list[tuple[int, bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    return [(key, value) for _, key, value in read]


def test_training_and_evaluation_share_no_key() -> None:
    stream = needle_stream()
    training = set().union(*(keys(stream.training_batch(1, step, 8, 1026)) for step in range(8)))
    evaluation = set().union(*(keys(stream.evaluation_batch(1, 8 * i, 8, 256)) for i in range(4)))
    assert len(training) > 400 and len(evaluation) > 100
    assert not any(map(is_reserved, training)) and all(map(is_reserved, evaluation))


def test_masks_mark_values_and_questions() -> None:
    batch = needle_stream().training_batch(1, 0, 4, 1026)
    for row in range(4):
        content = bytes(min(token, 255) for token in batch.ids[row].tolist())
        read = found(content)
        seen: set[bytes] = set()
        answers, unknown, questions = b"", b"", b""
        for place, key, value in read:
            if key in seen:
                answers += value
                questions += content[place : place + SPAN_BYTES]
            else:
                unknown += value
            seen.add(key)
        masked = [
            bytes(batch.ids[row][mask[row]].tolist()) for mask in (batch.answers, batch.unknown, batch.question_lines)
        ]
        assert masked == [answers, unknown, questions]
        assert len(answers) % DIGITS == 0 and answers


def test_batches_depend_on_seed_and_step_alone() -> None:
    a, b, c, d = (needle_stream().training_batch(seed, step, 2, 514) for seed, step in ((1, 5), (1, 5), (1, 6), (2, 5)))
    assert torch.equal(a.ids, b.ids) and torch.equal(a.answers, b.answers)
    assert not torch.equal(a.ids, c.ids) and not torch.equal(a.ids, d.ids)
    assert bool((a.ids[:, 0] == 256).all()), "a document begins as a prompt does"
