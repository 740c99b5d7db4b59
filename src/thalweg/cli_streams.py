"""The process's streams as a user may leave them: closed, full, of another encoding. What cannot work is a UserError."""

import errno
import io
import os
import sys

from thalweg.errors import UserError


def open_missing_stderr() -> None:
    """Gives a process that was started without stderr one that goes nowhere: print would write to stdout instead."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (lives as long as the process)


def check_stdout() -> None:
    """Raises UserError where there is no stdout; makes characters that its encoding lacks question marks."""
    if sys.stdout is None:
        raise UserError("stdout is closed: there is nowhere to write to")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def write(text: str) -> None:
    """Writes `text` to stdout at once. Raises UserError where that fails, BrokenPipeError where the reader left."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        drop_stdout()
        raise UserError(f"stdout: cannot be written: {os.strerror(error.errno or errno.EIO)}") from None


def drop_stdout() -> None:
    """Sends what is still buffered, and all that follows, nowhere: Python would complain again while it flushes at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
