"""`thalweg kernels`: compiles the GPU kernels for every architecture, on a machine without a GPU, or times them on one with."""

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from thalweg import cli_kernels_bench, cli_kernels_tune
from thalweg.cli_streams import write
from thalweg.errors import UserError


def add(verbs: Any) -> None:
    """Adds the verb to the parser."""
    parser = verbs.add_parser("kernels", help="compile the GPU kernels, without a GPU, or time them on one")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    compile_ = actions.add_parser("compile", help="compile kernels for architectures and check what they need of each")
    compile_.add_argument(
        "--arch", metavar="NAMES", help="for example sm_80,sm_90 (default: all of NVIDIA; gfx942 and gfx950 on request)"
    )
    compile_.add_argument("--all", action="store_true", help="every variant (default: the representative ones)")
    compile_.add_argument("--kernel", metavar="TEXT", default="", help="only kernels whose name contains this")
    compile_.add_argument("--json", type=Path, metavar="FILE", help="write the results there as JSON, too")
    compile_.set_defaults(run=run, verb="kernels compile")
    cli_kernels_bench.add(actions)
    cli_kernels_tune.add(actions)


def run(arguments: argparse.Namespace) -> int:
    """Prints a line a kernel and architecture, then what is wrong; returns 1 if anything is, else 0."""
    from thalweg.kernels import suite
    from thalweg.ops import hardware

    names = hardware.NVIDIA if arguments.arch is None else [name.strip() for name in arguments.arch.split(",")]
    chosen = suite.jobs(names, arguments.all, arguments.kernel)
    if arguments.json is not None:
        _write_json(arguments.json, {})  # a place that cannot be written to is better known before the work
    width = max(len(job.kernel) for job in chosen)
    begin = time.perf_counter()
    write(f"{'kernel':<{width}}  arch    shared bytes  registers  spills  seconds  matrix instructions\n")
    results = []
    for result in suite.compile_all(chosen):
        results.append(result)
        write(_line(result, width) + "\n")
    seconds = time.perf_counter() - begin
    problems = [problem for result in results for problem in result.problems()]
    write("".join(f"FAILED: {problem}\n" for problem in problems))
    write(_summary(results, len(problems), seconds) + "\n")
    if arguments.json is not None:
        _write_json(
            arguments.json, {"triton": hardware.triton_version(), "results": [_record(each) for each in results]}
        )
    return 1 if problems else 0


def _line(result: Any, width: int) -> str:
    head = f"{result.kernel:<{width}}  {result.architecture:<6}"
    if result.error is not None:
        return f"{head}  FAILED"
    matrix = ", ".join(f"{count} {kind}" for kind, count in result.matrix.items()) or "-"
    notes = "".join(f"; {note}" for note in result.notes)
    measures = f"{result.shared_memory:>12,}  {result.registers:>9}  {result.spills:>6,}  {result.seconds:>7.2f}"
    return f"{head}  {measures}  {matrix}{notes}" + ("  FAILED" if result.problems() else "")


def _summary(results: list[Any], problems: int, seconds: float) -> str:
    from thalweg.ops import hardware

    kernels = len({result.kernel for result in results})
    architectures = len({result.architecture for result in results})
    amd = ", AMD compiled and not measured" if any(result.architecture in hardware.AMD for result in results) else ""
    verdict = f"{problems} problems" if problems else "no problem"
    return (
        f"{kernels} kernel variants on {architectures} architectures, {len(results)} compilations by triton "
        f"{hardware.triton_version()} in {seconds:.1f} s{amd}: {verdict}"
    )


def _record(result: Any) -> dict[str, Any]:
    return asdict(result) | {"problems": result.problems()}


def _write_json(file: Path, content: dict[str, Any]) -> None:
    try:
        file.write_text(json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise UserError(f"--json {file}: cannot be written: {error.strerror}") from None
