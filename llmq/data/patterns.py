"""The files that a glob pattern names."""

from __future__ import annotations

import glob
import itertools
import os
from pathlib import Path

from llmq.data import checksums, document_file

_BESIDE = (document_file.SUFFIX, checksums.SUFFIX)  # files that lie beside a token file


def expand_pattern(pattern: str | Path) -> list[Path]:
    """The paths that a glob pattern with `~`, `{a,b}`, `*`, `?`, `[…]` names, sorted, once each.

    A name that exists is taken literally, so that special characters in it do no harm.
    """
    literal = Path(os.path.expanduser(pattern))  # pathlib's raises if there is no such user
    if literal.exists():
        return [literal]
    names: set[str] = set()
    for alternative in _expand_braces(os.fspath(pattern)):
        names.update(glob.glob(os.path.expanduser(alternative), recursive=True))
    return [Path(name) for name in sorted(names, key=os.fsencode)]


def _expand_braces(pattern: str) -> list[str]:
    """`a{b,c{d,e}}` -> [ab, acd, ace]. Braces without a partner or a comma stand for themselves."""
    start = pattern.find("{")
    while start >= 0:
        depth, commas = 0, []
        for i in range(start, len(pattern)):
            if pattern[i] == "{":
                depth += 1
            elif pattern[i] == "," and depth == 1:
                commas.append(i)
            elif pattern[i] == "}":
                depth -= 1
                if depth == 0:
                    break
        if depth == 0 and commas:
            edges = [start, *commas, i]
            parts = [pattern[a + 1 : b] for a, b in itertools.pairwise(edges)]
            return [
                expanded
                for part in parts
                for expanded in _expand_braces(pattern[:start] + part + pattern[i + 1 :])
            ]
        start = pattern.find("{", start + 1)
    return [pattern]


def find_token_files(pattern: str | Path) -> list[Path]:
    """Paths that a glob pattern names, without folders and the files beside token files."""
    found = expand_pattern(pattern)
    return [path for path in found if path.suffix not in _BESIDE and not path.is_dir()]
