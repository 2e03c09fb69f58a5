"""Make a corpus without a hub: sources of Python packages and Debian's documentation, tokenized.

python tools/corpus.py OUT [--tokens 200e6] [--vocab-size 8192] [--no-download] [--no-debian]

It takes the sources of all Python packages that are installed here and of Python itself, manual
pages and documentation of all Debian packages that are installed, and those of DOWNLOADS, which
`apt-get download` brings and nothing installs. OUT/sources.jsonl says of each package how much was
taken and under which licence it is; texts in OUT/text keep the name of their package. A part of
them trains OUT/tokenizer; OUT/train-*.bin and OUT/eval-*.bin are what `llmq train` reads, divided
by document. The same packages give the same files, in whatever order a disk lists them.

All texts are in memory at once: 200 million tokens take about 2 GB.
"""

from __future__ import annotations

import gzip
import importlib.metadata
import json
import lzma
import platform
import re
import subprocess
import sysconfig
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from html.parser import HTMLParser
from multiprocessing import Pool
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
import xxhash

from llmq.base.files import write_file
from llmq.data.tokenize import tokenize
from llmq.data.train_tokenizer import train_tokenizer

DOWNLOADS = (
    "linux-doc-6.1 openjdk-17-doc rust-doc postgresql-doc-15 perl-doc erlang-doc ghc-doc "
    "libstdc++-12-doc libboost1.81-doc python3.11-doc python-django-doc python-sqlalchemy-doc "
    "python-scipy-doc qtbase5-doc-html libgtk-4-doc libglib2.0-doc llvm-14-doc cmake-doc "
    "nodejs-doc git-doc octave-doc sqlite3-doc apache2-doc bind9-doc debian-handbook debian- "
    "reference-en debian-policy developers-reference manpages manpages-dev lilypond-doc-html "
    "gimp-help-en gap-doc r-doc-html python3-sympy python3-pandas python3-scipy python3-sklearn "
    "python3-astropy python3-django python3-twisted python3-networkx python3-statsmodels "
    "python3-biopython ansible python3-nova python3-neutron python3-cinder python3-nltk calibre "
    "python3-sage mercurial-common python3-pymatgen python3-numba python3-dask python3-mne "
    "python3-yt python3-botocore python3-heat python3-plotly"
).split()
"""Documentation, and Python packages whose sources are large, of Debian 12."""

SOURCE_SUFFIXES = (".py", ".pyi", ".pyx", ".pxd", ".rst", ".md")
DOC_SUFFIXES = (".html", ".htm", ".txt", ".md", ".rst", ".adoc", ".texi", ".info")
MANUAL = re.compile(r"/man/man\d[a-z]*/[^/]+\.\d[\w+]*$")  # other languages are in a folder before
LEAST, MOST = 256, 1 << 20  # bytes of a text
MOST_OF_PACKAGE = 48_000_000  # bytes: no package is more than a twelfth
PROSE_LINE = 400  # characters: what has longer lines on average is data or was minified
DIGITS = 0.25  # of the characters: what has more is a table
BYTES_PER_TOKEN = 3.4  # of 8,192 tokens
SHARD_BYTES = 64_000_000
PATIENCE = 300.0  # seconds for a text: nobody has made these to keep a tokenizer busy
SAMPLED = 8  # one line of so many tells whether a text was there before
KNOWN = 0.7  # of its sampled lines: then a text is a copy with changes


class Text(NamedTuple):
    """One document: the package that it is of, its path there, and its text."""

    package: str
    path: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A source of texts. files: paths on the disk; archive: or the .deb that they are in."""

    name: str
    version: str
    licence: str
    files: tuple[Path, ...] = ()
    archive: Path | None = None


# ------------------------------------------------------------------------------------------------
# Packages that there are


def python_packages() -> Iterator[Package]:
    """Installed distributions that have sources, and the standard library."""
    library = Path(sysconfig.get_path("stdlib"))
    files = (p for p in library.rglob("*.py") if "site-packages" not in p.parts)
    version = platform.python_version()
    yield Package(name="python", version=version, licence="PSF-2.0", files=tuple(sorted(files)))
    for dist in importlib.metadata.distributions():
        found = [Path(dist.locate_file(f)) for f in dist.files or () if f.suffix in SOURCE_SUFFIXES]
        name, licence = dist.metadata["Name"], _licence_of(dist.metadata)
        if found and name:
            files = tuple(sorted({path for path in found if path.is_file()}))
            yield Package(name=f"python:{name}", version=dist.version, licence=licence, files=files)


def _licence_of(metadata: importlib.metadata.PackageMetadata) -> str:
    """The licence that a distribution states: as an expression, by its classifiers, in words."""
    if expression := metadata.get("License-Expression"):
        return expression
    classifiers = metadata.get_all("Classifier") or []
    stated = [c.rpartition(" :: ")[2] for c in classifiers if c.startswith("License ::")]
    words = (metadata.get("License") or "").strip().splitlines()
    return "; ".join(stated) or (words[0][:80] if words else "not stated")


def debian_packages() -> Iterator[Package]:
    """The documentation of installed packages."""
    form = "${binary:Package}\t${Version}\n"
    listed = subprocess.run(["dpkg-query", "-W", "-f", form], capture_output=True, text=True)
    for line in sorted(listed.stdout.splitlines()):
        name, version = line.split("\t")
        listing = subprocess.run(["dpkg-query", "-L", name], capture_output=True, text=True)
        paths = [Path(p) for p in listing.stdout.splitlines() if _is_documentation(p)]
        plain = name.partition(":")[0]
        notes = Path("/usr/share/doc", plain, "copyright")
        licence = _licence_in(notes.read_bytes() if notes.is_file() else b"")
        files = tuple(sorted(path for path in paths if path.is_file()))
        if files:
            yield Package(name=f"debian:{plain}", version=version, licence=licence, files=files)


def downloaded_packages(folder: Path) -> Iterator[Package]:
    """Those of DOWNLOADS; what the archive does not have any more is left out, and said."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in DOWNLOADS:
        pattern = f"{name}_*.deb"
        if not sorted(folder.glob(pattern)):
            command = ["apt-get", "download", "-q", name]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
            if done.returncode:
                print(f"{name} is left out: {done.stderr.strip().splitlines()[-1]}")
                continue
        archive = sorted(folder.glob(pattern))[-1]
        version = archive.name.split("_")[1].replace("%3a", ":")
        notes = next((data for path, data in _members(archive) if path.endswith("copyright")), b"")
        licence = _licence_in(notes)
        yield Package(name=f"debian:{name}", version=version, licence=licence, archive=archive)


def _is_documentation(path: str) -> bool:
    plain = path.removesuffix(".gz").removesuffix(".xz")
    in_docs = "/usr/share/doc/" in path or "/usr/share/info/" in path
    return bool(MANUAL.search(plain)) or (in_docs and plain.endswith(DOC_SUFFIXES))


def _licence_in(notes: bytes) -> str:
    """The licences that Debian's copyright file names, each once; else where it is to be read."""
    text = notes.decode("utf-8", "replace")
    named = re.findall(r"^License:[ \t]*(\S[^\n]*)", text, re.MULTILINE)
    common = re.findall(r"/usr/share/common-licenses/([\w.-]*\w)", text)
    return "; ".join(dict.fromkeys(named or common)) or "see its copyright file"


# ------------------------------------------------------------------------------------------------
# Files become texts


def texts_of(package: Package, most: int = MOST_OF_PACKAGE) -> list[Text]:
    """The texts of a package, in the order of their paths, until they are so many bytes."""
    found, left = [], most
    for path, data in _members(package.archive) if package.archive else _read(package.files):
        text = _plain(path, data)
        if text is not None and left > 0:
            found.append(Text(package.name, path, text))
            left -= len(text.encode())
    return found


def _read(files: tuple[Path, ...]) -> Iterator[tuple[str, bytes]]:
    for path in files:
        yield str(path), path.read_bytes()


def _members(archive: Path) -> Iterator[tuple[str, bytes]]:
    """The files of a .deb that may be texts, sorted by path, which links are not."""
    unpack = ["dpkg-deb", "--fsys-tarfile", str(archive)]
    with (
        subprocess.Popen(unpack, stdout=subprocess.PIPE) as process,
        tarfile.open(fileobj=process.stdout, mode="r|") as tar,
    ):
        found = {
            member.name.removeprefix("."): tar.extractfile(member).read()
            for member in tar
            if member.isfile() and member.size <= 4 * MOST and _may_be_text(member.name)
        }
    yield from sorted(found.items())


def _may_be_text(path: str) -> bool:
    return path.endswith((*SOURCE_SUFFIXES, "/copyright")) or _is_documentation(path)


def _plain(path: str, data: bytes) -> str | None:
    """The text of a file without markup of HTML and manuals; None if it is hardly one."""
    try:
        data = gzip.decompress(data) if path.endswith(".gz") else data
        data = lzma.decompress(data) if path.endswith(".xz") else data
        text = data.decode("utf-8")
    except (OSError, EOFError, lzma.LZMAError, UnicodeDecodeError):
        return None
    name = re.sub(r"\.[gx]z$", "", path)
    if MANUAL.search(name):
        text = _without_roff(text)
    elif name.endswith((".html", ".htm")):
        text = _without_tags(text)
    text = "\n".join(line.rstrip() for line in text.splitlines()).strip()
    text = re.sub(r"\n{3,}", "\n\n", text)
    size = len(text)
    if not LEAST <= len(text.encode()) <= MOST or "\0" in text or path.endswith("/copyright"):
        return None
    long_lines = size / (text.count("\n") + 1) > PROSE_LINE
    return None if long_lines or sum(map(text.count, "0123456789")) > DIGITS * size else text


def _without_roff(text: str) -> str:
    """A manual page as plain text: titles and paragraphs stay, fonts and spacing go."""
    lines = []
    for line in text.splitlines():
        if line.startswith(("'", '.\\"')):
            continue
        if title := re.match(r"\.\s*(?:SH|SS|Sh|Ss)\s+(.*)", line):
            line = f"\n{title[1].strip(chr(34))}\n"
        elif macro := re.match(r"\.\s*([A-Z]\w?)\s+(.+)", line):
            line = macro[2].replace('" "', "").replace('"', "") if macro[1] != "TH" else ""
        elif line.startswith("."):
            line = ""
        line = re.sub(r"\\f(\[\w*\]|\(..|.)|\\[&|^/,%]|\\s[-+]?\d", "", line)
        line = re.sub(r"\\\(([lr]q|aq|dq)|\\\*\([lr]q", '"', line)
        lines.append(re.sub(r"\\\((em|en|hy)|\\-", "-", line).replace("\\e", "\\"))
    return "\n".join(lines)


class _Page(HTMLParser):
    """Collects what a page says, without what all pages of a site have around it."""

    SKIPPED = ("script", "style", "nav", "header", "footer", "head", "form", "button")
    BREAKS = ("p", "div", "br", "li", "tr", "pre", "dt", "dd", "table", "section", "h1", "h2", "h3")

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self.skips = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.skips += tag in self.SKIPPED
        self.parts.append("\n" if tag in self.BREAKS else "")

    def handle_endtag(self, tag: str) -> None:
        self.skips = max(self.skips - (tag in self.SKIPPED), 0)
        self.parts.append("\n" if tag in self.BREAKS else "")

    def handle_data(self, data: str) -> None:
        if not self.skips:
            self.parts.append(data)


def _without_tags(text: str) -> str:
    page = _Page()
    page.feed(text)
    page.close()
    return re.sub(r"\n[ \t]*(?=\n)", "\n", "".join(page.parts))


# ------------------------------------------------------------------------------------------------
# Texts become a corpus


def _hash(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode())


class Deduplicated:
    """Tells texts that were there before, but for spaces, or of which most lines were.

    Only lines whose hash is a multiple of SAMPLED are noted: of what two texts have in common, both
    have noted the same ones.
    """

    def __init__(self) -> None:
        self.texts: set[int] = set()
        self.lines: set[int] = set()

    def is_new(self, text: str) -> bool:
        """Whether it is; then it is noted."""
        hashes = {_hash(line.strip()) for line in text.splitlines()}
        whole = _hash("".join(text.split()))
        sampled = {h for h in hashes if h % SAMPLED == 0}
        known = len(sampled & self.lines)
        if whole in self.texts or (len(sampled) >= 4 and known > KNOWN * len(sampled)):
            return False
        self.texts.add(whole)
        self.lines |= sampled
        return True


def gather(packages: list[Package], most_bytes: float, workers: int | None = None) -> list[Text]:
    """New texts of the packages, in an order that only depends on what they say; at most so many
    bytes, of all packages alike."""
    seen, kept = Deduplicated(), []
    with Pool(workers) as pool:
        for found in pool.imap(texts_of, sorted(packages, key=lambda package: package.name)):
            kept += [text for text in found if seen.is_new(text.text)]
    kept.sort(key=lambda text: xxhash.xxh3_128_digest(text.text.encode()))
    total = 0
    for count, text in enumerate(kept):
        total += len(text.text.encode())
        if total > most_bytes:
            return kept[:count]
    return kept


def write_texts(texts: list[Text], folder: Path) -> list[Path]:
    """Files of JSON lines, of about SHARD_BYTES each."""
    folder.mkdir(parents=True, exist_ok=True)
    files: list[Path] = []
    lines, size = [], 0
    for number, text in enumerate(texts, start=1):
        lines.append(json.dumps(text._asdict(), ensure_ascii=False))
        size += len(lines[-1])
        if size > SHARD_BYTES or number == len(texts):
            files.append(folder / f"{len(files):03}.jsonl")
            write_file(files[-1], "\n".join(lines) + "\n")
            lines, size = [], 0
    return files


def write_sources(packages: list[Package], texts: list[Text], file: Path) -> None:
    """One line for each package that texts were taken of."""
    taken: dict[str, list[int]] = {}
    for text in texts:
        taken.setdefault(text.package, []).append(len(text.text.encode()))
    records = [
        {"package": p.name, "version": p.version, "licence": p.licence}
        | {"texts": len(taken[p.name]), "bytes": sum(taken[p.name])}
        for p in sorted(packages, key=lambda package: package.name)
        if p.name in taken
    ]
    write_file(file, "".join(json.dumps(record) + "\n" for record in records))


def main(
    out: Path,
    tokens: Annotated[float, typer.Option(min=1e3)] = 200e6,
    vocab_size: Annotated[int, typer.Option(min=300)] = 8192,
    eval_fraction: Annotated[float, typer.Option(min=0, max=0.5)] = 0.005,
    download: Annotated[bool, typer.Option(help="Fetch DOWNLOADS by apt-get.")] = True,
    debian: Annotated[bool, typer.Option(help="Take Debian's documentation at all.")] = True,
    workers: Annotated[int | None, typer.Option(min=1)] = None,
) -> None:
    """Gather what this machine has and can fetch, and make token files of it."""
    unique = {package.name: package for package in python_packages()}
    if debian:
        unique |= {package.name: package for package in debian_packages()}
        unique |= {p.name: p for p in downloaded_packages(out / "debs")} if download else {}
    make(list(unique.values()), out, tokens, vocab_size, eval_fraction, workers)


def make(
    packages: list[Package],
    out: Path,
    tokens: float,
    vocab_size: int,
    eval_fraction: float,
    workers: int | None = None,
) -> None:
    """Texts, their sources, a tokenizer and token files of these packages, all in `out`."""
    texts = gather(packages, BYTES_PER_TOKEN * tokens, workers)
    files = write_texts(texts, out / "text")
    write_sources(packages, texts, out / "sources.jsonl")
    say = partial(print, flush=True)
    say(f"{len(texts):,} texts of {len({t.package for t in texts})} packages in {out}/text")
    inputs, tokenizer = [str(file) for file in files], out / "tokenizer"
    made = train_tokenizer(inputs[:1], vocab_size=vocab_size, out=tokenizer, overwrite=True)
    say(made.describe())
    how = {"eval_fraction": eval_fraction, "workers": workers, "overwrite": True}
    how |= {"record_seconds": PATIENCE}
    say(tokenize(inputs, tokenizer=str(tokenizer), out=out, **how).describe())


if __name__ == "__main__":
    typer.run(main)
