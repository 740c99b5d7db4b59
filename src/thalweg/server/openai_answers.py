"""The answers: OpenAI's objects for completions and chat, whole or in chunks, with log probabilities and usage."""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from thalweg.server.messages import Token, Tokens
from thalweg.server.vocabulary import Vocabulary


@dataclass
class Choice:
    """One of the texts that a request asked for, as far as it has come."""

    index: int
    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    finish: str | None = None
    last: Tokens | None = None

    def add(self, tokens: Tokens) -> None:
        """What a step gave."""
        self.text += tokens.text
        self.tokens += tokens.tokens
        self.finish, self.last = tokens.finish, tokens


class Answers(Protocol):
    """What the two endpoints answer differently. Chunks are choices of a stream's events."""

    kind: str
    chunk_kind: str
    prefix: str

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        """What a stream says of a choice before its first token."""

    def chunk(self, choice: Choice, tokens: Tokens) -> dict[str, Any]:
        """The choice's entry for what a step gave."""

    def whole(self, choice: Choice) -> dict[str, Any]:
        """The choice's entry in an answer that is not streamed."""


class CompletionAnswers:
    """/v1/completions. logprobs: whether they were asked for."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def __init__(self, vocabulary: Vocabulary, logprobs: bool) -> None:
        self._vocabulary, self._with_logprobs = vocabulary, logprobs
        self._offsets: dict[int, _Offset] = {}

    def opening(self, choice: Choice) -> None:
        return None

    def chunk(self, choice: Choice, tokens: Tokens) -> dict[str, Any]:
        return self._entry(choice.index, tokens.text, tokens.tokens, tokens.finish)

    def whole(self, choice: Choice) -> dict[str, Any]:
        return self._entry(choice.index, choice.text, choice.tokens, choice.finish)

    def _entry(self, index: int, text: str, tokens: Sequence[Token], finish: str | None) -> dict[str, Any]:
        logprobs = self._logprobs(index, tokens) if self._with_logprobs else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def _logprobs(self, index: int, tokens: Sequence[Token]) -> dict[str, Any]:
        offset = self._offsets.setdefault(index, _Offset())
        pieces = [self._vocabulary.token_bytes(token.id) for token in tokens]
        return {
            "tokens": [_legacy_text(piece) for piece in pieces],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [self._top(token) for token in tokens],
            "text_offset": [offset.step(piece) for piece in pieces],
        }

    def _top(self, token: Token) -> dict[str, float]:
        # The token itself always belongs to it; two ids of one spelling keep the more probable.
        top: dict[str, float] = {}
        for id, logprob in [*token.top, (token.id, token.logprob or 0.0)]:
            top.setdefault(_legacy_text(self._vocabulary.token_bytes(id)), logprob)
        return top


class ChatAnswers:
    """/v1/chat/completions. logprobs: whether they were asked for."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, vocabulary: Vocabulary, logprobs: bool) -> None:
        self._vocabulary, self._with_logprobs = vocabulary, logprobs

    def opening(self, choice: Choice) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        return {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}

    def chunk(self, choice: Choice, tokens: Tokens) -> dict[str, Any]:
        delta = {"content": tokens.text} if tokens.text else {}
        return self._entry(choice.index, {"delta": delta}, tokens.tokens, tokens.finish)

    def whole(self, choice: Choice) -> dict[str, Any]:
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        return self._entry(choice.index, {"message": message}, choice.tokens, choice.finish)

    def _entry(self, index: int, said: dict, tokens: Sequence[Token], finish: str | None) -> dict[str, Any]:
        logprobs = {"content": [self._logprob(token) for token in tokens]} if self._with_logprobs else None
        return {"index": index, **said, "logprobs": logprobs, "finish_reason": finish}

    def _logprob(self, token: Token) -> dict[str, Any]:
        top = [self._candidate(id, logprob) for id, logprob in token.top]
        return {**self._candidate(token.id, token.logprob), "top_logprobs": top}

    def _candidate(self, id: int, logprob: float | None) -> dict[str, Any]:
        piece = self._vocabulary.token_bytes(id)
        return {"token": piece.decode(errors="replace"), "logprob": logprob, "bytes": list(piece)}


def usage(choices: Sequence[Choice], per_prompt: int) -> dict[str, Any]:
    """The counts over all choices; a prompt counts once, however many choices it has."""
    last = [choice.last for choice in choices]
    prompt = sum(tokens.prompt_tokens for tokens in last[::per_prompt] if tokens)
    cached = sum(tokens.cached_tokens for tokens in last[::per_prompt] if tokens)
    written = sum(tokens.output_tokens for tokens in last if tokens)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class _Offset:
    """Characters before each token in the text of its choice; a token within a character stands at that character."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters = 0

    def step(self, piece: bytes) -> int:
        at = self._characters
        self._characters += len(self._decoder.decode(piece))
        return at


def _legacy_text(piece: bytes) -> str:
    """A token as the legacy shape writes it: text, or `bytes:\\xNN` where it is part of a character."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)
