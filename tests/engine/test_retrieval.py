"""What stands far back in a text is found through paged fp8 caches, and only because the indexer chooses it."""

import random

import pytest

from tests.engine.conftest import MakeEngine, alone
from tests.heldout import GENCOL, PTY
from tests.random_entries import random_entries
from thalweg.engine.needle import DIGITS, draw, weave
from thalweg.engine.params import Params
from thalweg.engine.text import Text
from thalweg.layouts import index_fp8, v4
from thalweg.layouts.registry import layout_of
from thalweg.models.deepseek_v4 import indexer
from thalweg.models.deepseek_v4.model import DeepseekV4Model

DISTANCES = (1024, 2048, 4096)  # bytes, here also tokens, from the line's begin to that of the line which asks for it
BEFORE = 4256  # bytes in front of the question


def answers(make_engine: MakeEngine, text: Text) -> dict[int, tuple[str, str]]:
    """By distance: the value, and what the model writes for it, greedily, each question by itself after the same text.

    A line stands at each distance in text that the model has not seen, its key kept from training, and three more around.
    """
    generator = random.Random(0)
    asked, others = draw(generator, 3, reserved=True), draw(generator, 3, reserved=False)
    spans = {BEFORE - distance: needle.span for distance, needle in zip(DISTANCES, asked, strict=True)}
    spans |= {600 + 1100 * number: needle.span for number, needle in enumerate(others)}
    before = weave(PTY + GENCOL, spans, BEFORE).decode()
    engine = make_engine(context=4352, kv_tokens=5120)  # the text is read once: its pages are reused
    assert {layout_of(layer.window) for layer in engine.pools.caches} == {v4}
    assert {layout_of(layer.index_keys) for layer in engine.pools.caches if layer.index_keys is not None} == {index_fp8}
    found = {}
    for distance, needle in zip(DISTANCES, asked, strict=True):
        written = alone(engine, text.encode(f"{before}\n{needle.question}"), Params(max_tokens=DIGITS))
        found[distance] = needle.value, bytes(written).decode(errors="replace")
    return found


def test_a_line_1k_2k_and_4k_bytes_back_is_found_exactly(make_engine: MakeEngine, text: Text) -> None:
    for distance, (value, written) in answers(make_engine, text).items():
        assert written == value, f"{distance} bytes back"


def test_none_is_found_among_random_entries(
    make_engine: MakeEngine, text: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexer, "index_topk", random_entries(seed=0))
    for distance, (value, written) in answers(make_engine, text).items():
        assert written != value, f"{distance} bytes back"


def test_none_is_found_with_the_hadamard_rotation_on_one_side_only(
    make_engine: MakeEngine, text: Text, tiny: DeepseekV4Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Field case 13. No configuration can ask for it (tests/ops/test_hadamard.py): here the model is broken on purpose."""
    indexers = [block.attention.indexer for block in tiny.blocks if block.attention.indexer is not None]
    assert len(indexers) == 2
    for one in indexers:
        assert one.hadamard and one.compressor.hadamard
        monkeypatch.setattr(one, "hadamard", False)  # the queries' side; keys are still rotated
    for distance, (value, written) in answers(make_engine, text).items():
        assert written != value, f"{distance} bytes back"
