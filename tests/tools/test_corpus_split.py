"""Holding out on synthetic documents: whole documents, each source's share, nothing that resembles them in training."""

import random

import pytest

from tools.tiny.corpus_split import (
    PARAGRAPH_BYTES,
    Entry,
    drop_exact_duplicates,
    drop_resembling,
    drop_shared_paragraphs,
    hold_out,
    shared_part,
)

WORDS = [f"{first}{second}" for first in "bdfgklmnprst" for second in ("ado", "eri", "ilu", "ono", "upa", "yxe")]


def prose(seed: int, words: int) -> str:
    generator = random.Random(seed)
    return " ".join(generator.choice(WORDS) for _ in range(words))


def corpus() -> list[Entry]:
    """Two sources, one three times as large as the other: 60 documents of 100 words, 20 of 100."""
    sources = {"large": 60, "small": 20}
    return [
        Entry(source, f"document-{number}", prose(1000 * place + number, 100))
        for place, (source, count) in enumerate(sources.items())
        for number in range(count)
    ]


def test_documents_are_held_out_whole_and_in_proportion() -> None:
    entries = corpus()
    everything = sum(entry.size for entry in entries)
    training, held = hold_out(entries, everything // 10)
    assert sorted(training + held, key=repr) == sorted(entries, key=repr)
    by_source = {source: sum(e.size for e in held if e.source == source) for source in ("large", "small")}
    assert sum(by_source.values()) == pytest.approx(everything / 10, rel=0.35)
    assert by_source["large"] / sum(by_source.values()) == pytest.approx(0.75, abs=0.1)


def test_the_choice_depends_on_names_alone() -> None:
    entries = corpus()
    _, held = hold_out(entries, 5_000)
    shuffled = random.Random(5).sample(entries, len(entries))
    _, again = hold_out(shuffled, 5_000)
    assert {(e.source, e.name) for e in held} == {(e.source, e.name) for e in again}
    _, others = hold_out([Entry(e.source, "new " + e.name, e.text) for e in entries], 5_000)
    assert {f"new {e.name}" for e in held} != {e.name for e in others}


def test_a_document_far_larger_than_the_share_is_passed_over() -> None:
    entries = [*corpus(), Entry("large", "a book", prose(1, 4_000))]
    for total in range(4_000, 9_000, 1_000):
        _, held = hold_out(entries, total)
        assert "a book" not in {entry.name for entry in held}


def test_case_spacing_and_punctuation_make_no_new_document() -> None:
    first = Entry("a", "one", "The river bed\nis deepest here.")
    same = Entry("b", "two", "the river  bed is deepest: here")
    other = Entry("b", "three", "the river bed is deepest there")
    assert drop_exact_duplicates([first, same, other]) == [first, other]


def test_training_documents_that_resemble_a_held_out_one_are_dropped() -> None:
    held = [Entry("a", "held", prose(0, 400))]
    words = held[0].text.split()
    edited = " ".join(word if number % 40 else "changed" for number, word in enumerate(words))
    contained = prose(1, 30) + " " + " ".join(words[100:160])  # a short document, most of it a quotation
    brushing = prose(2, 400) + " " + " ".join(words[:20])
    unrelated = prose(3, 400)
    training = [
        Entry("b", name, text)
        for name, text in (
            ("edited", edited),
            ("contained", contained),
            ("brushing", brushing),
            ("unrelated", unrelated),
        )
    ]
    kept, dropped = drop_resembling(training, held)
    assert [entry.name for entry in kept] == ["brushing", "unrelated"]
    assert [(mine, other) for mine, other, _ in dropped] == [("b/edited", "a/held"), ("b/contained", "a/held")]
    assert all(0.2 <= part <= 1 for *_, part in dropped)


def test_long_shared_paragraphs_are_cut_from_training_and_nothing_else_is() -> None:
    shared, short = prose(0, 60), "A line of licence."
    assert len(shared) >= PARAGRAPH_BYTES > len(short)
    held = [Entry("a", "held", f"{prose(1, 50)}\n\n{shared}\n\n{short}\n")]
    mine = Entry("b", "mine", f"{prose(2, 50)}\n\n{shared.replace(' ', '  ', 3)}\n\n{short}\n")
    (cleaned,), removed = drop_shared_paragraphs([mine], held)
    assert shared.split()[5] + " " + shared.split()[6] + " " + shared.split()[7] not in cleaned.text
    assert prose(2, 50) in cleaned.text and short in cleaned.text
    assert removed == len(mine.text) - len(cleaned.text) >= len(shared)


def test_what_is_left_is_measured_in_shingles() -> None:
    held = [Entry("a", "held", " ".join(f"w{number}" for number in range(27)))]  # 20 runs of eight words
    quoted = Entry("b", "quoting", " ".join(f"w{number}" for number in range(10)))  # three of them
    assert shared_part([quoted], held) == 3 / 20
    assert shared_part([Entry("b", "free", prose(0, 50))], held) == 0
