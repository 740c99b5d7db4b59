"""A fact planted far back in a text and asked for at its end: the surface form that training and `--needle` share.

Every needle line and every question has the same length in bytes. An eighth of the keys is kept from training.
"""

import random
from dataclasses import dataclass
from zlib import crc32

from thalweg.errors import UserError
from thalweg.models.open import TINY

_WORDS = (
    "acorn amber anvil apple arrow aspen atlas bacon badge baker basin beach birch blade bloom board bread brick "
    "brook brush cabin cable candy canoe cargo cedar chair chalk chart chess cider cliff clock cloud clove coast "
    "comet coral crane crown daisy delta dough draft drift eagle ember fable fence fiber field flame flint flute "
    "forge frost fruit ghost glass globe grain grape grove guard guide heron honey horse hotel ivory jelly jewel "
    "juice kayak knife koala lemon level lilac linen llama lunar mango maple marsh medal melon metal mirth model "
    "moose motor mount noble north novel oasis ocean olive onion opera orbit otter panda paper pearl pedal piano "
    "pilot plant plaza plume polar prism quail radar raven ridge river robin rover sable salad scarf shell sheep "
    "shore slate snail solar spice spoon steam stone storm sugar table tempo thorn tiger torch tower trail tulip "
    "vapor vault wagon whale wheat yacht zebra"
)
WORDS = tuple(_WORDS.split())
DIGITS = 5
QUESTION_BYTES = len("The code of amber-river is ")
SPAN_BYTES = QUESTION_BYTES + DIGITS + len("\n.\n")
ANSWER_TOKENS = 2 * DIGITS  # no tokenizer needs more for a value and its full stop
_DISTRACTORS = 3
_BEFORE = 256  # bytes of text in front of the first line that can be asked for, where the text is our own


@dataclass(frozen=True)
class Needle:
    """A key of two words and a value of DIGITS digits."""

    key: str
    value: str

    @property
    def question(self) -> str:
        """What the text ends with; the value is the answer."""
        return f"The code of {self.key} is "

    @property
    def span(self) -> bytes:
        """The fact as it stands in the text, on a line of its own: SPAN_BYTES bytes."""
        return f"\n{self.question}{self.value}.\n".encode()


def is_reserved(key: str) -> bool:
    """Whether a key is one of those that training never sees."""
    return crc32(key.encode()) % 8 == 0


def draw(generator: random.Random, count: int, reserved: bool) -> list[Needle]:
    """`count` needles with different keys, all kept from training (reserved) or none of them, and random values."""
    found: dict[str, Needle] = {}
    while len(found) < count:
        key = "-".join(generator.sample(WORDS, 2))
        if is_reserved(key) == reserved and key not in found:
            found[key] = Needle(key, f"{generator.randrange(10**DIGITS):0{DIGITS}}")
    return list(found.values())


def free_place(generator: random.Random, taken: list[int], low: int, high: int, tries: int = 20) -> int | None:
    """A place in [low, high) for a span that overlaps none of the spans that begin at `taken`; None where none was found."""
    for _ in range(tries):
        place = generator.randrange(low, high) if low < high else low
        if low < high and all(abs(place - other) >= SPAN_BYTES for other in taken):
            return place
    return None


def weave(filler: bytes, spans: dict[int, bytes], size: int) -> bytes:
    """`size` bytes with each span at its place and the filler running on around them. Raises ValueError: filler too short."""
    pieces, at, used = [], 0, 0
    for place, span in sorted(spans.items()):
        pieces += [filler[used : used + place - at], span]
        used, at = used + place - at, place + len(span)
    pieces.append(filler[used : used + size - at])
    if used + size - at > len(filler):
        raise ValueError(f"{len(filler)} bytes of filler, {used + size - at} are needed")
    return b"".join(pieces)


def built_in_text(size: int) -> bytes:
    """`size` bytes of ASCII text: the bundled checkpoint's card and notices, from the start again where they end."""
    text = b"".join((TINY / name).read_bytes() for name in ("README.md", "NOTICE")).decode().encode("ascii", "ignore")
    return (text * (size // len(text) + 1))[:size]


def plant(distance: int, seed: int, text: str | None) -> tuple[str, Needle]:
    """A prompt that ends with a question, and the needle whose line begins `distance` bytes before the question's.

    Up to three lines with other keys stand elsewhere. text: what the lines are planted into, its end nearest to the
    question; None: built-in text. A character that a line would split becomes question marks, so that distances hold.

    Raises:
        UserError: a distance too short for the line itself, or longer than the text.
    """
    if distance < SPAN_BYTES:
        raise UserError(f"needle is {distance}; possible is {SPAN_BYTES} bytes (the line itself) or more")
    generator = random.Random(f"needle {seed}")
    asked, *others = draw(generator, 1 + _DISTRACTORS, reserved=True)
    filler = built_in_text(_BEFORE + distance - SPAN_BYTES) if text is None else text.encode()
    if len(filler) < distance - SPAN_BYTES:
        raise UserError(
            f"a needle {distance:,} bytes back needs {distance - SPAN_BYTES:,} bytes of text behind it; given were "
            f"{len(filler):,}: give a longer text, a smaller --needle, or none for the built-in text"
        )
    end = len(filler) + SPAN_BYTES
    spans = {end - distance: asked.span}
    for other in others:
        place = free_place(generator, list(spans), 0, end - SPAN_BYTES)
        if place is not None:
            spans[place] = other.span
    filler = filler[SPAN_BYTES * (len(spans) - 1) :]  # the other lines stand for as much of the text's beginning
    prompt = weave(filler, spans, end) + f"\n{asked.question}".encode()
    while True:
        try:
            return prompt.decode(), asked
        except UnicodeDecodeError as error:
            prompt = prompt[: error.start] + b"?" * (error.end - error.start) + prompt[error.end :]
