"""Holding whole documents out of a corpus, and keeping what resembles them out of training."""

import hashlib
import re
from collections import defaultdict
from dataclasses import dataclass

SHINGLE_WORDS = 8
RESEMBLANCE = 0.2  # a training document that shares this part of its, or of a held-out document's, shingles is dropped
PARAGRAPH_BYTES = 160  # paragraphs at least this long are also compared one by one


@dataclass(frozen=True)
class Entry:
    """A document of one source."""

    source: str
    name: str
    text: str

    @property
    def size(self) -> int:
        return len(self.text.encode())


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def words_of(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def shingles(text: str) -> set[int]:
    """Hashes of all runs of SHINGLE_WORDS words, letter case and punctuation aside."""
    words = words_of(text)
    runs = (" ".join(words[i : i + SHINGLE_WORDS]) for i in range(max(1, len(words) - SHINGLE_WORDS + 1)))
    return {int.from_bytes(hashlib.blake2b(run.encode(), digest_size=8).digest(), "little") for run in runs}


def drop_exact_duplicates(entries: list[Entry]) -> list[Entry]:
    """Keeps the first of the documents whose words are the same."""
    seen: set[str] = set()
    kept = []
    for entry in entries:
        key = digest(" ".join(words_of(entry.text)))
        if key not in seen:
            seen.add(key)
            kept.append(entry)
    return kept


def hold_out(entries: list[Entry], total_bytes: int) -> tuple[list[Entry], list[Entry]]:
    """(training, held out): of each source its share of total_bytes in whole documents, in the order of their hashes.

    A document that would overshoot the source's share by more than half of it is passed over.
    """
    by_source: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        by_source[entry.source].append(entry)
    everything = sum(entry.size for entry in entries)
    held: list[Entry] = []
    for members in by_source.values():
        share = total_bytes * sum(entry.size for entry in members) / everything
        taken = 0
        for entry in sorted(members, key=lambda entry: digest("held out " + entry.source + entry.name)):
            if taken < share and taken + entry.size < 1.5 * share:
                held.append(entry)
                taken += entry.size
    names = {(entry.source, entry.name) for entry in held}
    return [entry for entry in entries if (entry.source, entry.name) not in names], held


def drop_resembling(training: list[Entry], held: list[Entry]) -> tuple[list[Entry], list[tuple[str, str, float]]]:
    """Training documents that are near-duplicates of no held-out document, and what was dropped, with the resemblance.

    Resemblance is the shared part of the smaller document's shingles.
    """
    owners: dict[int, list[int]] = defaultdict(list)
    sizes = []
    for index, entry in enumerate(held):
        marks = shingles(entry.text)
        sizes.append(len(marks))
        for mark in marks:
            owners[mark].append(index)
    kept, dropped = [], []
    for entry in training:
        marks = shingles(entry.text)
        shared: dict[int, int] = defaultdict(int)
        for mark in marks:
            for index in owners.get(mark, ()):
                shared[index] += 1
        parts = [(count / min(len(marks), sizes[index]), index) for index, count in shared.items()]
        worst, other = max(parts, default=(0.0, 0))
        if worst >= RESEMBLANCE:
            dropped.append((f"{entry.source}/{entry.name}", f"{held[other].source}/{held[other].name}", worst))
        else:
            kept.append(entry)
    return kept, dropped


def paragraph_key(paragraph: str) -> str:
    return digest(" ".join(paragraph.split()))


def drop_shared_paragraphs(training: list[Entry], held: list[Entry]) -> tuple[list[Entry], int]:
    """Removes from training the longer paragraphs that also stand in a held-out document; counts the characters."""
    known = {
        paragraph_key(paragraph)
        for entry in held
        for paragraph in re.split(r"\n\s*\n", entry.text)
        if len(paragraph) >= PARAGRAPH_BYTES
    }
    cleaned, removed = [], 0
    for entry in training:
        pieces = re.split(r"(\n\s*\n)", entry.text)
        stay = [p for p in pieces if len(p) < PARAGRAPH_BYTES or paragraph_key(p) not in known]
        text = "".join(stay)
        removed += len(entry.text) - len(text)
        cleaned.append(Entry(entry.source, entry.name, text))
    return cleaned, removed


def shared_part(training: list[Entry], held: list[Entry]) -> float:
    """The part of the held-out shingles that still occurs somewhere in training: what is left after the removals."""
    wanted: set[int] = set()
    for entry in held:
        wanted |= shingles(entry.text)
    found: set[int] = set()
    for entry in training:
        found |= shingles(entry.text) & wanted
    return len(found) / len(wanted)
