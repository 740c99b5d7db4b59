"""`thalweg kernels tune`: writes the table of this card."""

import argparse
import json
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from thalweg.errors import UserError
from thalweg.kernels import suite
from thalweg.kernels.bench import records, run
from thalweg.kernels.bench.clock import GraphClock
from thalweg.kernels.bench.verb import commit_here
from thalweg.kernels.tune import attention
from thalweg.ops import hardware, tables
from thalweg.ops.sparse_mla import candidates, choice


def main(options: argparse.Namespace) -> int:
    """Runs the verb: `options.out` (a folder), `options.layout`. Returns 0, or 1 where no candidate was right for a layout."""
    layouts = layouts_of(options.layout)
    run.require_gpu()
    device = torch.device("cuda")
    card = hardware.of_device(device)
    stamp = records.gpu_stamp(commit_here(), f"thalweg kernels tune --layout {','.join(layouts)}")
    print(records.machine(stamp))
    file = make_folder(options.out) / tables.file_name(choice.ROOM, card.name)
    chosen: dict[str, Any] = {}
    work = attention.jobs(card.name, layouts)
    print(f"compiling {len(work)} kernels for {card.name}", flush=True)
    compiled = {result.kernel: result for result in suite.compile_all(work)}
    for layout in layouts:
        found = attention.fitting(card, layout, compiled, print)
        best = tuned(layout, found, hardware.multiprocessors(device))
        if best:
            chosen[layout] = choice.as_table(best)
    if not chosen:
        print("no candidate gave a right result: no table was written")
        return 1
    file.write_text(
        json.dumps({"room": choice.ROOM, "architecture": card.name, **stamp, "choices": chosen}, indent=1) + "\n"
    )
    print(f"{file}: written; {tables.VARIABLE}={options.out} makes launches read it")
    return 0 if len(chosen) == len(layouts) else 1


def tuned(layout: str, found: Sequence[choice.Choice], multiprocessors: int) -> tuple[choice.Choice, ...]:
    """Times the candidates for a layout, prints the table and what is chosen, and returns that."""
    times: attention.Times = {each: {} for each in found}
    for heads in (attention.FEW_HEADS, attention.MANY_HEADS):
        cases = attention.points(layout, heads)
        some = attention.measure(found, cases, GraphClock(), secrets.randbelow(2**31), print) if found else {}
        for each, measured in some.items():
            times[each] |= measured
        print(f"{layout}, {attention.ENTRIES} entries")
        print("\n".join(attention.lines(times, cases) if found else ["no candidate fits this card"]), flush=True)
    best = attention.table(times, layout, multiprocessors) if found else ()
    for each in best:
        print(f"chosen: {each.full_label()}, {each.resident} a multiprocessor")
    return best


def layouts_of(text: str) -> list[str]:
    """The layouts named in `v4,v32`. Raises UserError for one without candidates."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in candidates.LAYOUTS:
            raise UserError(f"--layout {name!r}: there are candidates for {', '.join(candidates.LAYOUTS)}")
    return list(dict.fromkeys(names))


def make_folder(folder: Path) -> Path:
    """Makes it: a place that cannot be written to is better known before the work."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".write").touch()
        (folder / ".write").unlink()
    except OSError as error:
        raise UserError(f"--out {folder}: cannot be written to: {error.strerror}") from None
    return folder
