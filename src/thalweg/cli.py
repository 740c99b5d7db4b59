"""The command line: verbs only. A person's mistake is one line on stderr and exit code 2."""

import argparse
import difflib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from thalweg import __version__, cli_streams
from thalweg.errors import UserError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a verb; returns the exit code: 0, 2 for a mistake, 130 after Ctrl-C."""
    cli_streams.open_missing_stderr()
    _let_idle_threads_sleep()
    parser = _parser()
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.exit(
            2, f"thalweg {arguments.verb}: {_unknown(unknown, arguments)} (see thalweg {arguments.verb} --help)\n"
        )
    try:
        cli_streams.check_stdout()
        return arguments.run(arguments)
    except UserError as error:
        # A path or a tensor's name can hold a line break.
        print(f"thalweg {arguments.verb}: {' '.join(str(error).splitlines())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:
        cli_streams.drop_stdout()  # the reader left (`| head`)
        return 0


def _let_idle_threads_sleep() -> None:
    """Shortens the time that OpenMP's threads spin before they sleep, unless the environment says how they shall wait.

    On cores that do other work too, threads that spin hold up the ones they wait for: decoding on two such cores was seen to
    slow down 8 to 60 times. Read by the library when torch is imported, so it must come first.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "1000"


def _unknown(unknown: list[str], arguments: argparse.Namespace) -> str:
    """What is wrong with the arguments that no option took; the likely cause is a misspelt option."""
    options = [word.partition("=")[0] for word in unknown if word.startswith("-")]
    if not options:
        return f"unexpected argument {unknown[0]!r}"
    known = [f"--{name.replace('_', '-')}" for name in vars(arguments)]
    near = difflib.get_close_matches(options[0], known, n=1)
    return f"unknown option {options[0]}" + (f"; did you mean {near[0]}?" if near else "")


class _Parser(argparse.ArgumentParser):
    """A mistake among the options is one line too, not the whole usage in front of it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    # Imported here: `thalweg --version` and later verbs need no torch.
    from thalweg import cli_explain, cli_generate, cli_kernels, cli_serve

    parser = _Parser(prog="thalweg", description="Long-context serving of sparse-attention models.")
    parser.add_argument("--version", action="version", version=f"thalweg {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    cli_generate.add(verbs)
    cli_serve.add(verbs)
    cli_explain.add(verbs)
    cli_kernels.add(verbs)
    return parser
