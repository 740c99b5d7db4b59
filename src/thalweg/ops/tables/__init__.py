"""Measured tables of configurations as files: `<room>.<architecture>.json`, here or in the folder that THALWEG_TABLES names.

`thalweg kernels tune` writes them. A room reads its table when it first chooses on a card; a card without one has the room's
stated default. Nothing is tuned while serving.
"""

import json
import os
import warnings
from pathlib import Path
from typing import Any

from thalweg.errors import UserError

VARIABLE = "THALWEG_TABLES"
_FOLDER = Path(__file__).parent


def folder() -> str:
    """The folder that THALWEG_TABLES names, "" where it is not set."""
    return os.environ.get(VARIABLE, "")


def load(room: str, architecture: str, triton: str, folder: str) -> dict[str, Any] | None:
    """The choices of a room's table for an architecture, as the file has them, or None where there is no file.

    `folder`, where it is not "", goes before the one here. A table made with another minor version of triton than `triton` is
    not used, with a warning: what it chose may spill or not fit. Raises UserError where folder or table cannot be read.
    """
    folders = [_FOLDER]
    if folder:
        if not Path(folder).is_dir():
            raise UserError(f"{VARIABLE}={folder}: no such folder; `thalweg kernels tune --out FOLDER` makes one")
        folders.insert(0, Path(folder))
    for place in folders:
        file = place / file_name(room, architecture)
        if not file.exists():
            continue
        try:
            table = json.loads(file.read_text())
            made_with, choices = table["triton"], table["choices"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise UserError(f"{file}: not a table of `thalweg kernels tune` ({reason})") from None
        if made_with.split(".")[:2] == triton.split(".")[:2]:
            return choices
        line = f"{file}: made with triton {made_with}, this is {triton}: not used; run `thalweg kernels tune` again"
        warnings.warn(line, RuntimeWarning, stacklevel=2)
    return None


def file_name(room: str, architecture: str) -> str:
    """The name of a table's file."""
    return f"{room}.{architecture}.json"
