"""`python -m tools.foreign DIR`: the kernels of Ampere and Ada as machine code for a Hopper GPU. Needs no GPU.

python -m tools.foreign build/foreign                              representative variants for sm_80 and sm_89
python -m tools.foreign build/foreign --all --arch sm_80           every variant that the rooms can choose there
python -m tools.foreign build/foreign --all --want missing.jsonl   and what a run of the tests has missed
"""

import argparse
import sys
import time
from pathlib import Path

from thalweg.errors import UserError
from thalweg.ops import hardware
from tools.foreign import build, bundle
from tools.foreign.assemble import FOREIGN, RUNS_ON, architecture_of


def main(arguments: list[str] | None = None) -> int:
    """Writes a bundle an architecture; exit code 2 for a mistake in the command."""
    parser = argparse.ArgumentParser(prog="python -m tools.foreign", description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, metavar="DIR", help="where the bundles go: DIR/sm_80, DIR/sm_89")
    parser.add_argument("--arch", default="sm_80,sm_89", help=f"of {', '.join(FOREIGN)} (default: sm_80,sm_89)")
    parser.add_argument("--all", action="store_true", help="every variant (default: the representative ones)")
    parser.add_argument("--kernel", default="", metavar="TEXT", help="only kernels whose name contains this")
    parser.add_argument("--want", type=Path, metavar="FILE", help="and the kernels that a run missed and listed there")
    options = parser.parse_args(arguments)
    try:
        for architecture in (name.strip() for name in options.arch.split(",")):
            _build(options, architecture)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _build(options: argparse.Namespace, architecture: str) -> None:
    if architecture not in FOREIGN:
        raise UserError(f"--arch {architecture}: its code cannot run on {RUNS_ON}; possible: {', '.join(FOREIGN)}")
    if hardware.interpreting():
        raise UserError("TRITON_INTERPRET=1 is set: kernels would be interpreted, not compiled; unset it")
    chosen = build.choose(architecture, options.all, options.kernel)
    if options.want is not None:
        listed = build.read_list(options.want, architecture)
        chosen = list({(each.configuration, each.assumed): each for each in (*chosen, *listed)}.values())
    if not chosen:
        raise UserError(f"no kernel to compile for {architecture}")
    begin, entries = time.perf_counter(), []
    for each, made in zip(chosen, build.assemble_all(chosen), strict=True):
        if architecture_of(made.code) != RUNS_ON:
            raise RuntimeError(f"{each.name}: code for {architecture_of(made.code)}, not for {RUNS_ON}")
        matrix = ", ".join(f"{count} {kind}" for kind, count in made.matrix.items()) or "-"
        how = "aligned" if each.assumed else "any"
        print(
            f"{architecture}  {each.name}  {how}  {made.shared_memory:,} B shared  {made.report}  {matrix}", flush=True
        )
        entries.append(bundle.Entry(each, made))
    size = bundle.write(options.folder, architecture, entries, {"triton": hardware.triton_version()})
    seconds = time.perf_counter() - begin
    print(
        f"{options.folder / architecture}: {len(entries)} kernels for {RUNS_ON}, {size / 2**20:.1f} MiB, {seconds:.0f} s"
    )


if __name__ == "__main__":
    sys.exit(main())
