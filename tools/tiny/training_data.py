"""The corpus as token ids, and which pieces of it each training step sees."""

import tarfile
from pathlib import Path

import torch
from torch import Tensor

SEPARATOR_BYTE = 0xFF  # ends every document in the .bin files; becomes the beginning-of-text token


def read_corpus(folder: Path, name: str) -> Tensor:
    """The bytes of folder/NAME.bin, or of NAME.bin inside folder/corpus.tar.xz, uint8 [bytes]."""
    path = folder / f"{name}.bin"
    if path.exists():
        content = path.read_bytes()
    else:
        with tarfile.open(folder / "corpus.tar.xz") as archive:
            member = archive.extractfile(f"{name}.bin")
            if member is None:
                raise FileNotFoundError(f"{folder}/corpus.tar.xz holds no {name}.bin")
            content = member.read()
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


class TokenStream:
    """A corpus on one device: documents in a row, each begun by the beginning-of-text token."""

    def __init__(self, content: Tensor, bos: int, device: torch.device) -> None:
        start = torch.tensor([SEPARATOR_BYTE], dtype=torch.uint8)
        self.content = torch.cat((start, content)).to(device)
        self.bos = bos

    def __len__(self) -> int:
        return self.content.numel()

    @property
    def num_text_bytes(self) -> int:
        """Bytes of the documents themselves, separators left out."""
        return int((self.content != SEPARATOR_BYTE).sum())

    def windows(self, starts: Tensor, length: int) -> Tensor:
        """Token ids int64 [len(starts), length] that begin at the given places; past the end comes the bos token."""
        places = starts.to(self.content.device)[:, None] + torch.arange(length, device=self.content.device)
        ids = self.content[places.clamp_max(len(self) - 1)].long()
        ids[ids == SEPARATOR_BYTE] = self.bos
        return ids

    def batch(self, seed: int, step: int, rows: int, length: int) -> Tensor:
        """The batch of a step, int64 [rows, length]: places drawn evenly, the same for the same seed and step."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        return self.windows(torch.randint(0, len(self) - length, (rows,), generator=generator), length)
