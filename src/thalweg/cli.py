"""The command line: verbs only. A person's mistake is one line on stderr and exit code 2."""

import argparse
import sys
from collections.abc import Sequence

from thalweg import __version__
from thalweg.errors import UserError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a verb; returns the exit code: 0, 2 for a mistake, 130 after Ctrl-C."""
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except UserError as error:
        print(f"thalweg {arguments.verb}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader left (`| head`). Python would complain once more while it flushes at exit.
        sys.stderr.close()
        return 0


def _parser() -> argparse.ArgumentParser:
    # Imported here: `thalweg --version` and later verbs need no torch.
    from thalweg import cli_explain, cli_generate, cli_serve

    parser = argparse.ArgumentParser(prog="thalweg", description="Long-context serving of sparse-attention models.")
    parser.add_argument("--version", action="version", version=f"thalweg {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    cli_generate.add(verbs)
    cli_serve.add(verbs)
    cli_explain.add(verbs)
    return parser
