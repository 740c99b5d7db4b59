"""Assembled kernels as files: DIR/<architecture>/index.json says what there is, cubins.zip holds the machine code."""

import hashlib
import json
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from thalweg.errors import UserError
from tools.foreign.assemble import RUNS_ON, Assembled
from tools.foreign.wanted import Wanted, from_json, sources

MAKE = "python -m tools.foreign DIR"
_INDEX, _CODE = "index.json", "cubins.zip"


@dataclass(frozen=True)
class Entry:
    """A kernel of a bundle: what it is, and its code (`assembled`)."""

    wanted: Wanted
    assembled: Assembled


def write(folder: Path, architecture: str, entries: Iterable[Entry], versions: Mapping[str, str]) -> int:
    """Writes the bundle of an architecture, in the place of an older one; returns its bytes."""
    target = folder / architecture
    target.mkdir(parents=True, exist_ok=True)
    records = []
    with zipfile.ZipFile(target / _CODE, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for number, entry in enumerate(entries):
            name = f"{number:04}-{entry.wanted.configuration}.cubin"
            archive.writestr(name, entry.assembled.code)
            how = {key: value for key, value in asdict(entry.assembled).items() if key != "code"}
            checksum = hashlib.sha256(entry.assembled.code).hexdigest()
            records.append({"wanted": asdict(entry.wanted), "launch": how, "file": name, "sha256": checksum})
    index = {"architecture": architecture, "runs_on": RUNS_ON, "sources": sources(), **versions, "kernels": records}
    (target / _INDEX).write_text(json.dumps(index, indent=1) + "\n")
    return sum(file.stat().st_size for file in target.iterdir())


class Bundle:
    """What `write` wrote below DIR/<architecture>, checked against the sources that are here."""

    def __init__(self, folder: Path) -> None:
        """Raises UserError where there is no bundle, or one of other sources."""
        try:
            index = json.loads((folder / _INDEX).read_text())
        except OSError as error:
            raise UserError(f"{folder}: no bundle of kernels ({error.strerror}); make one: {MAKE}") from None
        if index["sources"] != sources():
            raise UserError(f"{folder}: made from other sources of the kernels than those here; make it anew: {MAKE}")
        self.folder = folder
        self.architecture: str = index["architecture"]
        self.triton: str = index["triton"]
        self._entries: dict[str, list[Entry]] = {}
        with zipfile.ZipFile(folder / _CODE) as archive:
            for record in index["kernels"]:
                code = archive.read(record["file"])
                if hashlib.sha256(code).hexdigest() != record["sha256"]:
                    raise UserError(f"{folder}: {record['file']} is not what the index says; make it anew: {MAKE}")
                self.add(Entry(from_json(record["wanted"]), _assembled(record["launch"], code)))

    def __len__(self) -> int:
        return sum(map(len, self._entries.values()))

    def add(self, entry: Entry) -> None:
        """In this process alone."""
        self._entries.setdefault(entry.wanted.configuration, []).append(entry)

    def find(self, wanted: Wanted) -> Entry | None:
        """The code of this configuration whose assumptions hold where `wanted.assumed` do: the one that assumes most."""
        holding = [
            entry
            for entry in self._entries.get(wanted.configuration, ())
            if set(entry.wanted.assumed) <= set(wanted.assumed)
        ]
        return max(holding, key=lambda entry: len(entry.wanted.assumed), default=None)


def _assembled(record: dict[str, Any], code: bytes) -> Assembled:
    return Assembled(code=code, **{each.name: record[each.name] for each in fields(Assembled) if each.name != "code"})
