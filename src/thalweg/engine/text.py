"""Text to token ids and back, as it streams: unfinished characters and possible stop strings wait for the rest."""

from collections.abc import Sequence
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

    def stream(self, stop: Sequence[str] = ()) -> "StopText":
        """The text of one growing token sequence, ended by any of `stop`."""
        return StopText(self.tokenizer, stop)


class StopText:
    """Tokens in, text out; special tokens give none. Text that may be the beginning of a stop string is held back."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._stream = DecodeStream(skip_special_tokens=True)
        self._held = ""
        self.stopped = False
        """whether a stop string was found: the text ended before it"""

    def add(self, token: int) -> str:
        """The text that `token` completes, "" if it completes none."""
        self._held += self._stream.step(self._tokenizer, token) or ""
        found = [at for at in (self._held.find(stop) for stop in self._stop) if at >= 0]
        if found:
            text, self._held, self.stopped = self._held[: min(found)], "", True
            return text
        keep = max((_overlap(self._held, stop) for stop in self._stop), default=0)
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return text

    def flush(self) -> str:
        """What was held back, once no more tokens come."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
