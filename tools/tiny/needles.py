"""Documents with planted lines and questions about them (`thalweg.engine.needle`), for training and for evaluation."""

import math
import random
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from thalweg.engine.needle import DIGITS, QUESTION_BYTES, SPAN_BYTES, draw, free_place, weave
from tools.tiny.training_data import SEPARATOR_BYTE, TokenStream

SHORTEST = 64  # distance in bytes from the line's begin to the question's
TOKENS_PER_QUESTION = 128  # a document of so many tokens asks one question; the half of it is lines
MOST_QUESTIONS = 64
UNASKED = 4  # lines in every document that nobody asks for
EVALUATION_OFFSETS = 256  # in front of the line stand so many different numbers of bytes
ANSWER = 1 + QUESTION_BYTES  # where in a span, that begins with a line break, the value begins


@dataclass(frozen=True)
class NeedleBatch:
    """ids int64 [rows, length]; three masks bool [rows, length] over them, True at

    answers: value bytes of questions, which the text foretells; unknown: value bytes of planted lines, which nothing
    foretells; question_lines: all bytes of questions, answers included.
    """

    ids: Tensor
    answers: Tensor
    unknown: Tensor
    question_lines: Tensor

    def to(self, device: torch.device) -> "NeedleBatch":
        parts = (self.ids, self.answers, self.unknown, self.question_lines)
        if device.type == "cuda":  # from pinned memory the copy does not wait for the steps under way
            parts = tuple(part.pin_memory() for part in parts)
        return NeedleBatch(*(part.to(device, non_blocking=True) for part in parts))


@dataclass(frozen=True)
class Document:
    """Bytes (SEPARATOR_BYTE for the beginning-of-text token), where planted lines begin, and question -> asked line."""

    content: bytes
    lines: tuple[int, ...]
    questions: dict[int, int]


def training_document(haystack: bytes, size: int, generator: random.Random) -> Document:
    """A document of `size` bytes with as many questions as fit, up to one per TOKENS_PER_QUESTION and MOST_QUESTIONS.

    Each asks for another line, log-uniformly SHORTEST to size - SPAN_BYTES - 1 bytes before it, and each value is there to be
    read in that line alone. haystack: at least `size` bytes, of which the first stays the first.
    """
    wanted = min(size // TOKENS_PER_QUESTION, MOST_QUESTIONS)
    needles = draw(generator, wanted + UNASKED, reserved=False)
    spans: dict[int, bytes] = {}
    lines, questions = [], {}
    longest = size - SPAN_BYTES - 1
    for needle in needles[:wanted]:
        for _ in range(20):
            distance = log_uniform(generator, SHORTEST, longest)
            line = generator.randrange(1, longest - distance + 2)
            question = line + distance
            if all(abs(place - taken) >= SPAN_BYTES for taken in spans for place in (line, question)):
                spans[line] = spans[question] = needle.span
                lines.append(line)
                questions[question] = line
                break
    for needle in needles[wanted:]:
        place = free_place(generator, list(spans), 1, longest + 2)
        if place is not None:
            spans[place] = needle.span
            lines.append(place)
    return Document(weave(haystack, spans, size), tuple(lines), questions)


def evaluation_document(haystack: bytes, distance: int, generator: random.Random) -> Document:
    """A document that ends with the one question, `distance` bytes after the line it asks for; keys kept from training."""
    asked, *others = draw(generator, 1 + UNASKED, reserved=True)
    line = 1 + UNASKED * SPAN_BYTES + generator.randrange(EVALUATION_OFFSETS)
    question = line + distance
    spans = {line: asked.span, question: asked.span}
    lines = [line]
    for other in others:
        place = free_place(generator, list(spans), 1, question)
        if place is not None:
            spans[place] = other.span
            lines.append(place)
    return Document(weave(haystack, spans, question + SPAN_BYTES), tuple(lines), {question: line})


def log_uniform(generator: random.Random, low: int, high: int) -> int:
    """A whole number in [low, high] whose logarithm is spread evenly."""
    return min(high, int(math.exp(generator.uniform(math.log(low), math.log(high + 1)))))


class NeedleStream:
    """Batches of such documents, haystacks drawn from a corpus; the same for the same seed and step."""

    def __init__(self, stream: TokenStream) -> None:
        self.content = stream.content.cpu().numpy()
        self.bos = stream.bos

    def training_batch(self, seed: int, step: int, rows: int, length: int) -> NeedleBatch:
        """Training documents, [rows, length]."""
        generator = random.Random(f"train {seed} {step}")
        return self._batch(
            [training_document(self._haystack(generator, length), length, generator) for _ in range(rows)]
        )

    def evaluation_batch(self, seed: int, first: int, rows: int, distance: int) -> NeedleBatch:
        """Evaluation documents first .. first + rows - 1 of a distance, padded at their ends to the longest."""
        documents = []
        for number in range(first, first + rows):
            generator = random.Random(f"evaluate {seed} {distance} {number}")
            haystack = self._haystack(generator, evaluation_length(distance))
            documents.append(evaluation_document(haystack, distance, generator))
        return self._batch(documents)

    def _haystack(self, generator: random.Random, size: int) -> bytes:
        start = generator.randrange(len(self.content) - size)
        return bytes([SEPARATOR_BYTE]) + self.content[start : start + size].tobytes()

    def _batch(self, documents: list[Document]) -> NeedleBatch:
        length = max(len(document.content) for document in documents)
        ids = np.full((len(documents), length), SEPARATOR_BYTE, dtype=np.int64)
        answers, unknown, asked = (np.zeros(ids.shape, dtype=bool) for _ in range(3))
        for row, document in enumerate(documents):
            ids[row, : len(document.content)] = np.frombuffer(document.content, dtype=np.uint8)
            for place in document.lines:
                unknown[row, place + ANSWER : place + ANSWER + DIGITS] = True
            for place in document.questions:
                answers[row, place + ANSWER : place + ANSWER + DIGITS] = True
                asked[row, place : place + SPAN_BYTES] = True
        ids[ids == SEPARATOR_BYTE] = self.bos
        return NeedleBatch(*(torch.from_numpy(array) for array in (ids, answers, unknown, asked)))


def evaluation_length(distance: int) -> int:
    """Bytes of the longest evaluation document of a distance."""
    return 1 + UNASKED * SPAN_BYTES + EVALUATION_OFFSETS + distance + SPAN_BYTES
