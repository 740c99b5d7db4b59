"""The requests that /v1/completions and /v1/chat/completions take: OpenAI's names, and vLLM's for what OpenAI has not.

A parameter that is not served is an error unless its value asks for nothing. Ranges are the engine's (`engine.params`).
"""

import secrets
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from thalweg.engine.params import MAX_LOGPROBS, Params, Sampling
from thalweg.server.errors import refused

MAX_CHOICES = 128
_MAX_STOP = 16
_SEEDS = 2**64  # what torch's generators take


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PydanticCustomError("text", "Text with half a surrogate pair is no Unicode") from error
    return text


_Text = Annotated[str, AfterValidator(_encodable)]
_Stop = Annotated[str, StringConstraints(min_length=1), AfterValidator(_encodable)]
_Number = Annotated[float, Field(allow_inf_nan=False)]

_ASKS_FOR_NOTHING: dict[str, tuple[Any, ...]] = {
    "echo": (False,),
    "suffix": ("",),
    "logit_bias": ({},),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "store": (False,),
    "service_tier": ("auto", "default"),
}
_FOR_THE_RECORD = {"user", "metadata", "safety_identifier", "prompt_cache_key"}  # say who asks, not what


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    @model_validator(mode="after")
    def _nothing_unserved(self) -> "_Strict":
        for name, value in (self.model_extra or {}).items():
            if value is None or name in _FOR_THE_RECORD or value in _ASKS_FOR_NOTHING.get(name, ()):
                continue
            raise refused(name, f"parameter {name!r} is not supported by this server")
        return self


class StreamOptions(_Strict):
    """include_usage: one more chunk at the end, without choices, with the counts."""

    include_usage: bool | None = None


class _Request(_Strict):
    model: _Text
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: _Stop | Annotated[list[_Stop], Field(max_length=_MAX_STOP)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    temperature: Annotated[_Number, Field(ge=0)] | None = None
    top_p: Annotated[_Number, Field(gt=0, le=1)] | None = None
    presence_penalty: Annotated[_Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[_Number, Field(ge=-2, le=2)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[_Number, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[_Number, Field(gt=0)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[Annotated[int, Field(ge=0)]] | None = None

    @model_validator(mode="after")
    def _only_streamed(self) -> "_Request":
        if self.stream_options is not None and not self.stream:
            raise refused("stream_options", "stream_options is only allowed with stream: true")
        return self

    @property
    def choices(self) -> int:
        """How many texts for each prompt."""
        return self.n or 1

    @property
    def with_usage(self) -> bool:
        """Whether a stream ends with the counts."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def _params(self, max_tokens: int, logprobs: int | None) -> list[Params]:
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        seed = self.seed if self.seed is not None else secrets.randbits(63)
        return [
            Params(
                Sampling(
                    temperature=_or(self.temperature, 1.0),
                    top_k=max(_or(self.top_k, 0), 0),  # -1, as some clients write it, is all
                    top_p=_or(self.top_p, 1.0),
                    min_p=_or(self.min_p, 0.0),
                    repetition_penalty=_or(self.repetition_penalty, 1.0),
                    presence_penalty=_or(self.presence_penalty, 0.0),
                    frequency_penalty=_or(self.frequency_penalty, 0.0),
                    seed=(seed + choice) % _SEEDS,
                ),
                max_tokens=max_tokens,
                stop=tuple(stop),
                stop_token_ids=tuple(self.stop_token_ids or ()),
                ignore_eos=bool(self.ignore_eos),
                logprobs=logprobs,
            )
            for choice in range(self.choices)
        ]


class CompletionRequest(_Request):
    """Prompts: a string, token ids, or a list of either. max_tokens is 16 unless given, as in OpenAI's API."""

    prompt: _Text | list[_Text] | list[int] | list[list[int]]
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    best_of: int | None = None

    @model_validator(mode="after")
    def _possible(self) -> "CompletionRequest":
        if self.prompt == []:
            raise refused("prompt", "prompt is an empty list; give at least one prompt")
        if self.best_of is not None and self.best_of != self.choices:
            raise refused("best_of", f"best_of is {self.best_of}; possible is n, which is {self.choices}")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, one or many."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)

    def params(self, room: int) -> list[Params]:
        """One for each choice; seeds count up from the request's. room: tokens that the context has left."""
        return self._params(_or(self.max_tokens, min(16, room)), self.logprobs)


class TextPart(_Strict):
    """A piece of a message."""

    type: Literal["text"]
    text: _Text


class Message(_Strict):
    """One turn. A content in parts is joined."""

    role: Literal["system", "developer", "user", "assistant"]
    content: _Text | list[TextPart] | None = None
    name: _Text | None = None

    @model_validator(mode="after")
    def _says_something(self) -> "Message":
        if self.content is None and self.role != "assistant":
            raise refused("messages", f"a message of role {self.role} has no content")
        return self

    def for_template(self) -> dict[str, Any]:
        """role, content and name as chat templates expect them."""
        parts = self.content or ""
        content = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": content} | ({"name": self.name} if self.name is not None else {})


class ChatRequest(_Request):
    """max_tokens is what the context has left unless given."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise refused("top_logprobs", "top_logprobs is only allowed with logprobs: true")
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise refused("max_tokens", "max_tokens and max_completion_tokens differ; give one of them")
        return self

    def params(self, room: int) -> list[Params]:
        """One for each choice; seeds count up from the request's. room: tokens that the context has left."""
        asked = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        return self._params(_or(asked, room), _or(self.top_logprobs, 0) if self.logprobs else None)


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
