"""Token ids and what they stand for, for the HTTP process: text that is data, control tokens, bytes of a token."""

import json
import re
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer


class Vocabulary:
    """A checkpoint folder's tokenizer.json, once whole and once without its added tokens.

    Added tokens (`<|user|>` and the like) are control: a tokenizer finds them in any text. The second tokenizer does not,
    and so what a user wrote stays text, whatever it spells.
    """

    def __init__(self, folder: str | Path) -> None:
        source = json.loads((Path(folder) / "tokenizer.json").read_text(encoding="utf-8"))
        self.added = {token["content"]: token["id"] for token in source["added_tokens"]}
        self._all = Tokenizer.from_str(json.dumps(source))
        self._plain = Tokenizer.from_str(json.dumps(source | {"added_tokens": [], "post_processor": None}))
        self._byte_level = "ByteLevel" in json.dumps(source.get("decoder"))
        self._names = {id: content for content, id in self.added.items()}
        longest_first = sorted(self.added, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def encode_data(self, text: str) -> list[int]:
        """Ids of text in which nothing is control."""
        return self._plain.encode(text, add_special_tokens=False).ids

    def encode_marked(self, text: str, mark: str) -> list[int]:
        """Ids of text in which an added token is control unless `mark` stands before it; marks are not part of the text."""
        ids, data, at = [], "", 0
        for found in self._control.finditer(text):
            data += text[at : found.start()]
            at = found.end()
            if text[found.start() - 1 : found.start()] == mark:
                data += found[0]
                continue
            ids += [*self.encode_data(data.replace(mark, "")), self.added[found[0]]]
            data = ""
        return ids + self.encode_data((data + text[at:]).replace(mark, ""))

    def mark_data(self, text: str, mark: str) -> str:
        """The text with `mark` before every character that could begin an added token."""
        first = {content[0] for content in self.added}
        return "".join(mark + character if character in first else character for character in text)

    def name(self, id: int | None) -> str:
        """The added token of that id as templates write it; "" if it is none."""
        return self._names.get(id, "") if id is not None else ""

    def token_bytes(self, id: int) -> bytes:
        """What the token adds to a text, which may be part of a character."""
        if id in self._names:
            return self._names[id].encode()
        token = self._all.id_to_token(id)
        if token is not None and self._byte_level:
            return bytes(_bytes_of_characters()[character] for character in token)
        return self._all.decode([id]).encode()


@cache
def _bytes_of_characters() -> dict[str, int]:
    """GPT-2's alphabet of printable stand-ins for the 256 bytes: printable Latin-1 for itself, the rest from U+0100 on."""
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in itself]
    return {chr(byte): byte for byte in itself} | {chr(0x100 + index): byte for index, byte in enumerate(others)}
