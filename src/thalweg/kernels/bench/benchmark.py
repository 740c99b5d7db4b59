"""What the shared part asks of a benchmark. Each lives in a folder of its own, beside this file, and is named by it."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from thalweg.errors import UserError
from thalweg.kernels.bench.cases import Case
from thalweg.kernels.bench.clock import Call, Outputs
from thalweg.kernels.bench.records import Record

# Binds an operation to one set of inputs: a call for each variant, none where it cannot do this case at all.
Bind = Callable[[Any], dict[str, Call]]


class Wrong(Exception):
    """What is wrong with a result, in one line."""


@dataclass(frozen=True)
class Adapter:
    """One operation of one implementation. `load()` imports what it needs; raises whatever the import raises."""

    impl: str
    op: str
    load: Callable[[], Bind]
    install: str = ""


@dataclass(frozen=True)
class Rate:
    """What the floors take for the rate of products where a run measured it: `measure()` in FLOP a second.

    `measure` raises RuntimeError where the card has none such.
    """

    name: str
    measure: Callable[[], float]


@dataclass(frozen=True)
class Benchmark:
    """A benchmark as the shared part sees it.

    `case_of(fields)` is a record's case; `make_inputs(case, ops, device, seed)` gives as many sets of inputs as are needed for
    `ops` not to find theirs in the L2; `check(inputs, outputs, op)` gives (error, rows checked) or raises Wrong;
    `records_of(case, results, stamp, rate)` the records of one case; `summary(records)` lines for people; `telling` cases of a
    short run, the most telling first; `rate` where the card's own rate of products is measured.
    """

    name: str
    adapters: tuple[Adapter, ...]
    case_of: Callable[[dict[str, Any]], Any]
    make_inputs: Callable[[Any, list[str], torch.device, int], list[Any]]
    check: Callable[[Any, Outputs, str], tuple[float, int]]
    records_of: Callable[[Any, list[dict[str, Any]], Record, float | None], list[Record]]
    summary: Callable[[list[Record]], list[str]]
    telling: tuple[Case, ...]
    rate: Rate | None = None

    @property
    def implementations(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(adapter.impl for adapter in self.adapters))

    @property
    def ops(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(adapter.op for adapter in self.adapters))

    def adapters_of(self, impl: str) -> list[Adapter]:
        return [adapter for adapter in self.adapters if adapter.impl == impl]

    def chosen(self, text: str | None) -> list[str]:
        """Implementations named in `a,b,c`, all of them for None. Raises UserError for a name that is none."""
        if text is None:
            return list(self.implementations)
        names = [name.strip() for name in text.split(",")]
        for name in names:
            if name not in self.implementations:
                raise UserError(f"implementation {name!r} is unknown; there are: {', '.join(self.implementations)}")
        return names


def named(name: str) -> Benchmark:
    """The benchmark in the folder `name`."""
    return importlib.import_module(f"thalweg.kernels.bench.{name}").BENCHMARK


def import_first(*names: str) -> Any:
    """The first of these modules that is there; the error of the last one if none is."""
    for name in names[:-1]:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:  # it is there, and what is missing is something that it needs
                raise
    return importlib.import_module(names[-1])
