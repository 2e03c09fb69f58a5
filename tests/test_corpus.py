"""tools/corpus.py: which texts it makes of packages, and under what licences they are."""

from __future__ import annotations

import gzip
import json
import random
from email.message import Message
from pathlib import Path

import pytest

from llmq.data.tokens import open_token_files
from tools.corpus import (
    Deduplicated,
    Package,
    _is_documentation,
    _licence_in,
    _licence_of,
    _plain,
    gather,
    make,
    texts_of,
)

WORDS = "the order of texts does not depend on what a disk says of files and their folders".split()


def prose(seed: int, lines: int = 30) -> str:
    """Lines of words and a number that no other text has."""
    rng = random.Random(seed)
    return "\n".join(
        " ".join([*rng.choices(WORDS, k=9), f"{chr(97 + seed)}{n}"]) for n in range(lines)
    )


@pytest.fixture
def packages(tmp_path):
    """Two packages of five texts; the second has one of the first's, and one nearly so."""
    made = []
    for name, seeds in (("python:a", (0, 1, 2)), ("python:b", (0, 3, 4))):
        folder = tmp_path / name.partition(":")[2]
        folder.mkdir()
        for seed in seeds:
            (folder / f"{seed}.py").write_text(prose(seed) + "\n" * seed)
        (folder / "copy.py").write_text(prose(1).replace("order", "sequence", 2))
        (folder / "data.py").write_text("1234567890, " * 100)
        files = tuple(sorted(folder.iterdir()))
        made.append(Package(name=name, version="1", licence="MIT", files=files))
    return made


def test_texts_are_new_and_in_an_order_of_their_own(packages):
    found = gather(packages, 1e9, workers=1)
    assert {Path(text.path).name for text in found} == {f"{n}.py" for n in range(5)}
    assert gather(packages[::-1], 1e9, workers=1) == found
    assert [t.path for t in found] != sorted(t.path for t in found)
    half = gather(packages, sum(len(t.text) for t in found) / 2, workers=1)
    assert 0 < len(half) < len(found) and half == found[: len(half)]


def test_a_corpus_has_its_sources_and_is_divided_by_document(packages, tmp_path):
    out = tmp_path / "out"
    make(packages, out, tokens=1e6, vocab_size=300, eval_fraction=0.4, workers=1)
    sources = [json.loads(line) for line in (out / "sources.jsonl").read_text().splitlines()]
    assert [(s["package"], s["licence"], s["texts"]) for s in sources] == [
        ("python:a", "MIT", 3),
        ("python:b", "MIT", 2),
    ]
    held_out = open_token_files([f"{out}/eval*.bin"])
    trained = open_token_files([f"{out}/train*.bin"])
    documents = sum(len(path.read_text().splitlines()) for path in out.glob("text/*.jsonl"))
    assert documents == 5 and held_out and trained
    before = {path.name: path.read_bytes() for path in out.glob("*.bin")}
    make(packages[::-1], out, tokens=1e6, vocab_size=300, eval_fraction=0.4, workers=1)
    assert {path.name: path.read_bytes() for path in out.glob("*.bin")} == before


def test_copies_with_changes_are_known_again():
    seen, text = Deduplicated(), prose(7, 200)
    assert seen.is_new(text)
    assert not seen.is_new(text.replace("\n", "\n\n   "))
    assert not seen.is_new(text.replace("g3 ", "h3 ") + "\nand a line")
    assert seen.is_new(prose(8, 200))


def test_manuals_and_pages_become_plain_text():
    body = "\n".join(f"Some words of a page, {n}." for n in range(20))
    manual = f'.TH LS 1\n.\\" by hand\n.SH "NAME"\nls \\- list \\fBnames\\fR\n.PP\n{body}\n'
    text = _plain("/usr/share/man/man1/ls.1.gz", gzip.compress(manual.encode()))
    assert text.startswith("NAME\n\nls - list names\n") and "TH" not in text
    page = f"<html><head><title>x</title></head><nav>menu</nav><p>A &lt;b&gt;</p><pre>{body}</pre>"
    assert _plain("/usr/share/doc/x/a.html", page.encode()) == f"A <b>\n\n{body}"


@pytest.mark.parametrize(
    "text", ["short", "x" * 5000, "0123456789 " * 90, prose(1) + "\0", b"\xff" * 500]
)
def test_what_is_no_text_is_left_out(text):
    assert _plain("/a.py", text if isinstance(text, bytes) else text.encode()) is None


def test_which_files_are_documentation():
    assert _is_documentation("/usr/share/man/man3/printf.3.gz")
    assert _is_documentation("/usr/share/doc/x/html/a.html")
    for path in ("/usr/share/man/de/man1/ls.1.gz", "/usr/share/doc/x/a.png", "/usr/bin/ls.txt"):
        assert not _is_documentation(path)


def test_licences_are_those_that_packages_state():
    stated = Message()
    stated["License"] = "BSD 3-Clause\nRedistribution and use …"
    assert _licence_of(stated) == "BSD 3-Clause"
    stated["Classifier"] = "License :: OSI Approved :: MIT License"
    assert _licence_of(stated) == "MIT License"
    stated["License-Expression"] = "Apache-2.0"
    assert _licence_of(stated) == "Apache-2.0"
    assert _licence_of(Message()) == "not stated"
    assert _licence_in(b"Files: *\nLicense: GPL-2+\n text\n\nLicense: GPL-2+\n") == "GPL-2+"
    assert _licence_in(b"see /usr/share/common-licenses/LGPL-2.1.\n") == "LGPL-2.1"
    assert _licence_in(b"") == "see its copyright file"


def test_no_package_is_more_than_its_part(packages):
    assert len(texts_of(packages[0], len(prose(0)) + 1)) == 2
