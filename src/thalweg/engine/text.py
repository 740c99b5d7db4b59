"""Text to token ids and back, as it streams: bytes of an unfinished character wait for the rest."""

from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from thalweg.errors import UserError


class Text:
    """The tokenizer.json of a checkpoint folder. Raises UserError where it is missing or damaged."""

    def __init__(self, folder: str | Path, bos_token_id: int | None) -> None:
        file = Path(folder) / "tokenizer.json"
        if not file.is_file():
            raise UserError(f"{folder}: no tokenizer.json; give a checkpoint folder that has one")
        try:
            self.tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise UserError(f"{file}: not a tokenizer: {error}") from None
        self.bos_token_id = bos_token_id

    def encode(self, text: str) -> list[int]:
        """Token ids, after the begin-of-text token if the model has one."""
        start = [] if self.bos_token_id is None else [self.bos_token_id]
        return start + self.tokenizer.encode(text, add_special_tokens=False).ids

    def stream(self) -> "TextStream":
        return TextStream(self.tokenizer)


class TextStream:
    """Text of one growing token sequence; special tokens give none."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)

    def add(self, token: int) -> str:
        """The text that `token` completes, "" if it completes none."""
        return self._stream.step(self._tokenizer, token) or ""
