"""The byte tokenizer: ids are byte values, and any text comes back as it was."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from thalweg.models.config import read_config
from thalweg.models.open import TINY
from tools.tiny.make_tokenizer import SPECIAL, TOKENIZER_PATH, VOCABULARY, build

TOKENIZER = Tokenizer.from_file(str(TINY / "tokenizer.json"))
SPECIAL_NAMES = {*SPECIAL, *(f"<|reserved_{number}|>" for number in range(263, 272))}


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


@given(st.text().filter(lambda text: not any(name in text for name in SPECIAL_NAMES)))
@example("")
@example(" leading, trailing ")
@example("\r\n\t\x00\x7f")
@example("日本語, emoji \U0001f30a, combining e\u0301, BOM \ufeff, \u2028")
def test_ids_are_the_bytes_and_the_text_comes_back(text: str) -> None:
    ids = ids_of(text)
    assert ids == list(text.encode())
    assert TOKENIZER.decode(ids) == text


def test_every_byte_value_has_its_own_token() -> None:
    assert sorted(TOKENIZER.get_vocab().values()) == list(range(VOCABULARY))
    assert len({TOKENIZER.id_to_token(byte) for byte in range(256)}) == 256


@pytest.mark.parametrize(("name", "number"), [*zip(SPECIAL, range(256, 263), strict=True), ("<|reserved_271|>", 271)])
def test_special_tokens_are_one_id_and_no_text(name: str, number: int) -> None:
    assert ids_of(f"a{name}b") == [ord("a"), number, ord("b")]
    assert TOKENIZER.decode([ord("a"), number, ord("b")]) == "ab"
    assert TOKENIZER.decode([number], skip_special_tokens=False) == name


def test_the_config_names_the_special_tokens() -> None:
    config = read_config(TINY)
    assert config.vocab_size == VOCABULARY
    assert (config.bos_token_id, config.eos_token_ids, config.pad_token_id) == (256, (257,), 258)
    assert [TOKENIZER.id_to_token(number) for number in (256, 257, 258)] == ["<|bos|>", "<|eos|>", "<|pad|>"]


def test_the_file_is_what_the_script_writes() -> None:
    assert build().to_str(pretty=True) == TOKENIZER_PATH.read_text()
    assert TOKENIZER_PATH.read_text() == (TINY / "tokenizer.json").read_text()
