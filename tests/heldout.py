"""A few kilobytes of text that the bundled checkpoint has not seen in training; data/heldout/README.md says whence."""

from pathlib import Path

import torch

FOLDER = Path(__file__).parent / "data" / "heldout"
BOS = 256


def document(name: str) -> bytes:
    return (FOLDER / f"{name}.txt").read_bytes()


TITUS, GENCOL, PTY = (document(n) for n in ("titus_andronicus_act2_scene4", "sqlite_gencol", "python_pty"))


def token_ids(documents: list[bytes]) -> torch.Tensor:
    """int64: the documents in a row as the model was trained on them, each begun by the beginning-of-text token."""
    return torch.tensor([token for content in documents for token in (BOS, *content)])
