"""What cases of every benchmark share: their text, and the least time that bytes and FLOP allow."""

from dataclasses import MISSING, asdict, fields
from typing import Any, ClassVar, Protocol, TypeVar

from thalweg.errors import UserError

BYTES_PER_SECOND = 4.3e12  # H200, copies
FLOP_PER_SECOND = 790e12  # H200, bf16 products


class Case(Protocol):
    """One point of a benchmark: a frozen dataclass whose fields are the `case` of its records."""

    bench: ClassVar[str]
    __dataclass_fields__: ClassVar[dict[str, Any]]

    def floor_us(self, op: str, flop_per_second: float = ...) -> float:
        """The least time of `op` in microseconds, with products at `flop_per_second`."""
        ...


Kind = TypeVar("Kind", bound=Case)


def floor_us(bytes_moved: int, flop: int, flop_per_second: float) -> float:
    """The larger of the two times, in microseconds."""
    return max(bytes_moved / BYTES_PER_SECOND, flop / flop_per_second) * 1e6


def label(case: Case) -> str:
    """A case as `--case` takes it."""
    return ",".join(f"{name}={value}" for name, value in asdict(case).items())


def pairs(text: str) -> dict[str, str]:
    """`a=1,b=x` as a dictionary."""
    return {name.strip(): value.strip() for name, _, value in (part.partition("=") for part in text.split(","))}


def parse(text: str, kind: type[Kind]) -> Kind:
    """`batch=64,keys=32768` as a case of `kind`; fields with a default may be left out. Raises UserError."""
    known = {field.name: field for field in fields(kind)}
    values: dict[str, int | str] = {}
    for name, value in pairs(text).items():
        if name not in known:
            raise UserError(f"case: no {name!r}; there are: {', '.join(known)}")
        if known[name].type in (str, "str"):
            values[name] = value
        elif value.isdecimal():
            values[name] = int(value)
        else:
            raise UserError(f"case: {name}={value!r}, needs a whole number")
    missing = [name for name, field in known.items() if field.default is MISSING and name not in values]
    if missing:
        raise UserError(f"case: got {text!r}, needs also {', '.join(sorted(missing))}")
    return kind(**values)


def require_positive(case: Case) -> None:
    """Raises UserError where a number of the case is below 1."""
    for name, value in asdict(case).items():
        if isinstance(value, int) and value < 1:
            raise UserError(f"case: {name}={value}, needs at least 1")
