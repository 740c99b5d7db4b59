"""Builds the training corpus of the tiny checkpoint from packages with permissive licences.

    python -m tools.tiny_corpus --out .local/corpus

Writes train.bin and heldout.bin (UTF-8 documents, each ended by the byte 0xFF, which no UTF-8 text contains),
heldout.txt (the held-out documents alone, the file that xz is compared on), corpus.tar.xz (both .bin files and the
manifest, to carry to a training machine) and manifest.json. The same package versions give the same bytes.
"""

import argparse
import hashlib
import json
import lzma
import random
import tarfile
from pathlib import Path

from tools.tiny.corpus_sources import SOURCES, Source, download, says, tidy, unpack
from tools.tiny.corpus_split import (
    Entry,
    drop_exact_duplicates,
    drop_resembling,
    drop_shared_paragraphs,
    hold_out,
    shared_part,
)

SEPARATOR = b"\xff"
SMALLEST_DOCUMENT = 400  # bytes of UTF-8
HELD_OUT_BYTES = 1_400_000
SEED = 2024


def collect(source: Source, downloads: Path) -> tuple[list[Entry], dict]:
    """The source's documents and its entry in the manifest.

    Raises:
        ValueError: the package's licence file does not say what the source quotes.
    """
    root = downloads / "unpacked" / source.name
    archives = [download(package, downloads) for package in source.packages]
    for archive in archives:
        unpack(archive, root)
    licence = (root / source.licence_file).read_bytes()
    if not says(licence.decode(), source.licence_wording):
        raise ValueError(f"{source.name}: {source.licence_file} does not say {source.licence_wording!r}")
    entries = [Entry(source.name, name, tidy(text)) for name, text in source.documents(root)]
    entries = [entry for entry in entries if entry.size >= SMALLEST_DOCUMENT]
    record = {
        "name": source.name,
        "packages": [
            {"package": package, "file": archive.name, "sha256": hashlib.sha256(archive.read_bytes()).hexdigest()}
            for package, archive in zip(source.packages, archives, strict=True)
        ],
        "licence": source.licence,
        "licence_file": source.licence_file,
        "licence_file_sha256": hashlib.sha256(licence).hexdigest(),
        "licence_wording": source.licence_wording,
    }
    return entries, record


def join(entries: list[Entry]) -> bytes:
    return b"".join(entry.text.encode() + SEPARATOR for entry in entries)


def add_file(archive: tarfile.TarFile, path: Path) -> None:
    """Adds a file without owner or time, so that the archive's bytes depend on the content alone."""
    info = tarfile.TarInfo(path.name)
    info.size = path.stat().st_size
    with path.open("rb") as stream:
        archive.addfile(info, stream)


def build(out: Path, downloads: Path) -> dict:
    """Builds everything into out and returns the manifest."""
    out.mkdir(parents=True, exist_ok=True)
    downloads.mkdir(parents=True, exist_ok=True)
    entries, records = [], []
    for source in SOURCES:
        found, record = collect(source, downloads)
        entries += found
        records.append(record)
    distinct = drop_exact_duplicates(entries)
    training, held = hold_out(distinct, HELD_OUT_BYTES)
    training, dropped = drop_resembling(training, held)
    training, removed_bytes = drop_shared_paragraphs(training, held)
    random.Random(SEED).shuffle(training)
    random.Random(SEED).shuffle(held)

    held_text = b"".join(entry.text.encode() for entry in held)
    (out / "train.bin").write_bytes(join(training))
    (out / "heldout.bin").write_bytes(join(held))
    (out / "heldout.txt").write_bytes(held_text)
    compressed = len(lzma.compress(held_text, preset=9))
    train_bytes = sum(entry.size for entry in training)
    for record in records:
        for label, part, total in (("train", training, train_bytes), ("heldout", held, len(held_text))):
            mine = [entry for entry in part if entry.source == record["name"]]
            size = sum(entry.size for entry in mine)
            record[label] = {"documents": len(mine), "bytes": size, "share": round(size / total, 4)}
    manifest = {
        "sources": records,
        "train_bytes": train_bytes,
        "train_documents": len(training),
        "heldout_bytes": len(held_text),
        "heldout_documents": sorted(f"{entry.source}/{entry.name}" for entry in held),
        "exact_duplicates_dropped": len(entries) - len(distinct),
        "near_duplicates_dropped": [[name, other, round(part, 3)] for name, other, part in dropped],
        "shared_paragraph_characters_removed": removed_bytes,
        "heldout_shingles_left_in_training": round(shared_part(training, held), 4),
        "xz_9_bytes": compressed,
        "xz_9_bits_per_byte": round(8 * compressed / len(held_text), 4),
        "sha256": {
            name: hashlib.sha256((out / name).read_bytes()).hexdigest()
            for name in ("train.bin", "heldout.bin", "heldout.txt")
        },
    }
    (out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    with tarfile.open(out / "corpus.tar.xz", "w:xz", preset=6) as archive:
        for name in ("manifest.json", "train.bin", "heldout.bin"):
            add_file(archive, out / name)
    return manifest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(".local/corpus"), help="default %(default)s")
    parser.add_argument(
        "--downloads", type=Path, default=Path(".local/downloads"), help="where packages are kept (default %(default)s)"
    )
    options = parser.parse_args()
    manifest = build(options.out, options.downloads)
    for record in manifest["sources"]:
        print(record["name"], record["licence"], "train", record["train"], "held out", record["heldout"])
    for key in ("train_bytes", "train_documents", "heldout_bytes", "exact_duplicates_dropped"):
        print(key, manifest[key])
    print("near duplicates dropped", len(manifest["near_duplicates_dropped"]))
    for key in ("shared_paragraph_characters_removed", "heldout_shingles_left_in_training", "xz_9_bits_per_byte"):
        print(key, manifest[key])


if __name__ == "__main__":
    main()
