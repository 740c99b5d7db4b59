"""What a checkpoint folder holds, from safetensors headers alone: no weight is read, no torch is needed.

Format (safetensors): 8 bytes little-endian header length, a JSON object {name: {dtype, shape, data_offsets}}, data.
"""

import json
import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from thalweg.errors import UserError

ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the format's own limit


@dataclass(frozen=True)
class TensorHeader:
    """One stored tensor: safetensors dtype name, shape in elements, and where its bytes begin in `file`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def read_headers(folder: str | Path) -> dict[str, TensorHeader]:
    """Every tensor of a checkpoint folder, by its stored name.

    Looks for `model.safetensors.index.json` and the shards it lists, else `model.safetensors`, else every
    `*.safetensors`. Raises UserError, one line, for a missing, corrupt or truncated file.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(
            f"{folder}: no such folder; give the folder of a checkpoint, with config.json and *.safetensors"
        )
    listed: dict[str, str] = {}
    if (folder / INDEX).exists():
        listed = _read_index(folder / INDEX)
        files = [folder / name for name in sorted(set(listed.values()))]
        # Compared with the folder's own names: asking for a name that is too long would be an error of its own.
        present = {file.name for file in folder.iterdir()}
        absent = [file.name for file in files if file.name not in present]
        if absent:
            raise UserError(
                f"{folder}: {len(absent)} of {len(files)} shards that {INDEX} lists are absent{_few(absent)}"
            )
    elif (folder / "model.safetensors").exists():
        files = [folder / "model.safetensors"]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"{folder}: no *.safetensors; give the folder of a checkpoint with its weights")
    headers: dict[str, TensorHeader] = {}
    for file in files:
        for name, header in read_header(file).items():
            if name in headers:
                raise UserError(f"{folder}: {name} stands in {headers[name].file.name} and in {file.name}")
            headers[name] = header
    lost = [name for name in listed if name not in headers]
    if lost:
        raise UserError(f"{folder}: {len(lost)} tensors that {INDEX} lists stand in no shard{_few(lost)}")
    return headers


def read_header(file: Path) -> dict[str, TensorHeader]:
    """The tensors of one safetensors file; UserError where it is no such file or shorter than its header says."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            first = stream.read(8)
            if first == b"version ":
                raise UserError(f"{file}: a Git LFS pointer, not the weights; fetch the file itself")
            length = int.from_bytes(first, "little")
            if len(first) < 8 or length > MAX_HEADER_BYTES or length < 2:
                raise UserError(f"{file}: not a safetensors file, or truncated inside its header")
            if size < 8 + length:
                raise UserError(f"{file}: truncated inside its header: {size} bytes of at least {8 + length}")
            text = stream.read(length)
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}") from None
    try:
        entries = json.loads(text)
        entries.pop("__metadata__", None)
        headers = {name: _tensor(name, entry, file, 8 + length) for name, entry in entries.items()}
    except UserError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise UserError(f"{file}: corrupt safetensors header") from None
    _check_apart(file, headers)
    end = max((header.offset + header.nbytes for header in headers.values()), default=0)
    if end > size:
        raise UserError(f"{file}: truncated: {size} bytes, its header says {end}; fetch the file again")
    return headers


def _check_apart(file: Path, headers: dict[str, TensorHeader]) -> None:
    """UserError where two tensors share bytes: the format forbids it, and one of them would be read wrong."""
    ordered = sorted((header for header in headers.values() if header.nbytes), key=lambda header: header.offset)
    for one, after in pairwise(ordered):
        if after.offset < one.offset + one.nbytes:
            raise UserError(f"{file}: corrupt safetensors header: {one.name} and {after.name} share bytes")


def _tensor(name: str, entry: dict[str, Any], file: Path, data: int) -> TensorHeader:
    begin, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if not all(type(number) is int for number in (begin, end, *shape)):
        raise ValueError(name)
    if entry["dtype"] not in ITEM_BYTES:
        raise UserError(f"{file}: {name} is stored as {entry['dtype']}; possible are {', '.join(ITEM_BYTES)}")
    header = TensorHeader(name, entry["dtype"], shape, file, data + begin)
    if begin < 0 or min(shape, default=0) < 0 or end - begin != header.nbytes:
        raise ValueError(name)
    return header


def _read_index(file: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, RecursionError):
        raise UserError(f"{file}: no JSON object with a weight_map") from None
    if not isinstance(weight_map, dict) or not all(
        isinstance(shard, str) and shard and Path(shard).name == shard for shard in weight_map.values()
    ):
        raise UserError(f"{file}: weight_map is no table of tensor names and file names in the same folder")
    return weight_map


def _few(names: list[str]) -> str:
    return ", for example " + ", ".join(names[:3])
