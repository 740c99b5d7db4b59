"""Which implementation of an operation runs here, and why. Rooms register; nothing falls back in silence.

A call is decided by, in this order: its own `implementation=` argument, the environment variable THALWEG_IMPLEMENTATION
(`reference` for every operation, or `sparse_mla=reference,topk=reference`), else the first registered implementation that
supports the device and is not avoided there. A choice that is impossible, or a name that is misspelt, raises and names what
is possible.
"""

import os
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from thalweg.errors import UserError

VARIABLE = "THALWEG_IMPLEMENTATION"


@dataclass(frozen=True)
class Implementation:
    """One way to run an operation.

    `unsupported(device)` gives the reason why it cannot run there, or None; `avoided(device)` the reason why it runs there only
    where somebody forces it, or None; `rejects(*arguments)` the reason why it does not take these arguments, or None.
    """

    name: str
    function: Callable[..., Any]
    unsupported: Callable[[torch.device], str | None]
    avoided: Callable[[torch.device], str | None]
    rejects: Callable[..., str | None]


@dataclass(frozen=True)
class Choice:
    """What runs for an operation on a device, and why; `calls` counts what ran in this process so far, by name."""

    operation: str
    device: str
    implementation: str
    why: str
    calls: dict[str, int]


_operations: dict[str, list[Implementation]] = {}
_calls: Counter[tuple[str, str]] = Counter()


def anywhere(device: torch.device) -> str | None:
    """For implementations without a requirement."""
    return None


def anything(*args: Any) -> str | None:
    """For implementations that take every argument the contract allows."""
    return None


def register(
    operation: str,
    name: str,
    function: Callable[..., Any],
    unsupported: Callable[[torch.device], str | None] = anywhere,
    avoided: Callable[[torch.device], str | None] = anywhere,
    rejects: Callable[..., str | None] = anything,
) -> None:
    """Adds an implementation. The earlier registered one is preferred where both support the device."""
    _operations.setdefault(operation, []).append(Implementation(name, function, unsupported, avoided, rejects))


def run(operation: str, implementation: str | None, device: torch.device, *args: Any) -> Any:
    """Runs `operation` on `device` by the implementation that `resolve` chooses."""
    chosen, _ = resolve(operation, device, implementation, args)
    _calls[operation, chosen.name] += 1
    return chosen.function(*args)


def resolve(
    operation: str, device: torch.device, forced: str | None = None, args: tuple[Any, ...] | None = None
) -> tuple[Implementation, str]:
    """(implementation, why) for `operation` on `device`, for these arguments where they are given.

    Raises UserError where the choice is impossible.
    """
    if forced is not None:
        return _named(operation, device, forced, "implementation=", args), f"forced by implementation={forced!r}"
    value = os.environ.get(VARIABLE, "")
    from_environment = _parse(value).get(operation)
    if from_environment is not None:
        return _named(operation, device, from_environment, f"{VARIABLE}={value}", args), f"forced by {VARIABLE}={value}"
    rejected: list[str] = []
    refused = False  # some candidate refused the arguments, not the device
    for candidate in _operations[operation]:
        if reason := candidate.unsupported(device):
            rejected.append(f"{candidate.name} cannot: {reason}")
        elif reason := candidate.avoided(device):
            rejected.append(f"{candidate.name} avoided: {reason}")
        elif args is not None and (reason := candidate.rejects(*args)):
            rejected.append(f"{candidate.name} cannot: {reason}")
            refused = True
        else:
            if refused:  # what explain() says of the device does not hold for this call
                line = f"{operation} runs by {candidate.name}: {'; '.join(rejected)}"
                warnings.warn(line, RuntimeWarning, stacklevel=2)
            return candidate, "; ".join(rejected) if rejected else _preferred(operation)
    raise UserError(f"{operation} cannot run on {device}: {'; '.join(rejected)}")


def explain(device: torch.device | str | None = None) -> list[Choice]:
    """One `Choice` per operation, sorted by name, for `device` (default: the CUDA device if there is one, else the CPU)."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    choices = []
    for operation in sorted(_operations):
        chosen, why = resolve(operation, device)
        calls = {name: count for (called, name), count in _calls.items() if called == operation}
        choices.append(Choice(operation, str(device), chosen.name, why, calls))
    return choices


def _preferred(operation: str) -> str:
    return "the only implementation" if len(_operations[operation]) == 1 else "the preferred implementation here"


def _named(operation: str, device: torch.device, name: str, given: str, args: tuple[Any, ...] | None) -> Implementation:
    known = {candidate.name: candidate for candidate in _operations[operation]}
    if name not in known:
        raise UserError(f"{given}: {operation} has no implementation {name!r}; it has: {', '.join(known)}")
    reason = known[name].unsupported(device)
    if reason is not None:
        raise UserError(f"{given}: {operation} by {name} cannot run on {device}: {reason}")
    if args is not None and (reason := known[name].rejects(*args)):
        raise UserError(f"{given}: {operation} by {name} cannot run: {reason}")
    return known[name]


def _parse(value: str) -> dict[str, str]:
    """The environment variable as {operation: implementation}; every name is checked at every call."""
    chosen: dict[str, str] = {}
    for part in filter(None, (piece.strip() for piece in value.split(","))):
        operation, equals, name = part.partition("=")
        if not equals:
            names = {candidate.name for candidates in _operations.values() for candidate in candidates}
            if part not in names:
                raise UserError(
                    f"{VARIABLE}={value}: no implementation {part!r}; there are: {', '.join(sorted(names))}"
                )
            chosen.update(dict.fromkeys(_operations, part))
        elif operation not in _operations:
            raise UserError(
                f"{VARIABLE}={value}: no operation {operation!r}; there are: {', '.join(sorted(_operations))}"
            )
        else:
            _check_name(value, operation, name)
            chosen[operation] = name
    return chosen


def _check_name(value: str, operation: str, name: str) -> None:
    names = [candidate.name for candidate in _operations[operation]]
    if name not in names:
        raise UserError(f"{VARIABLE}={value}: {operation} has no implementation {name!r}; it has: {', '.join(names)}")
