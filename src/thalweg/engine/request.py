"""A request on its way from prompt to finish."""

from dataclasses import dataclass, field
from enum import Enum

from thalweg.engine.params import Params
from thalweg.engine.sampler import Drawn, Sampler
from thalweg.engine.text import StopText


class Finish(Enum):
    """Why a request ended; the values are OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(eq=False)
class Request:
    """`tokens[:computed]` have their rows in the caches. A retracted request keeps everything but its cache."""

    id: str
    prompt: list[int]
    params: Params
    number: int
    """order of arrival: who came last is retracted first"""
    text: StopText
    sampler: Sampler = field(init=False)
    output: list[int] = field(default_factory=list)
    computed: int = 0
    row: int | None = None
    """its row in the page tables while it runs"""
    cached_tokens: int = 0
    """tokens of the prompt that came from the prefix cache when it was first admitted"""
    finish: Finish | None = None

    def __post_init__(self) -> None:
        self.sampler = Sampler(self.params.sampling, self.params.logprobs)

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output

    def tokens_between(self, start: int, end: int) -> list[int]:
        """tokens[start:end] without a copy of the whole."""
        read = len(self.prompt)
        return self.prompt[start:end] + self.output[max(start - read, 0) : max(end - read, 0)]

    @property
    def pending(self) -> int:
        """Tokens without a row yet: 1 while decoding, more while the prompt (or what was retracted) is read."""
        return len(self.prompt) + len(self.output) - self.computed

    @property
    def decoding(self) -> bool:
        return self.pending == 1 and bool(self.output)


@dataclass(frozen=True)
class Output:
    """What a step gave one request: tokens, the text they complete, and at the end why it ended."""

    request_id: str
    drawn: tuple[Drawn, ...]
    text: str
    finish: Finish | None
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    error: str | None = None
    """with Finish.ERROR: what went wrong with this request"""
