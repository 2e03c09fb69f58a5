#!/usr/bin/env python3
"""Find sentences of docstrings and comments that have no main clause.

    python tools/prose.py [PATH...]

The tool looks at sentences that begin with Of, What, Where, Which or As, in the Python files at
PATH (llmq/ if none is given), and prints those without a main clause, with their places. Its exit
status is 1 if there are any. A clause of place or manner may come first if a comma and the main
clause follow ("Where nothing is given, the default holds.").
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

FIRST = re.compile(r"(Of|What|Where|Which|As)\b")
END = re.compile(r"(?<=[.!?])[)\"`]*\s+(?=[A-Z`\"(])")
# Words that continue the first clause behind a comma: no main clause begins with them.
CONTINUING = {
    "and", "as", "but", "by", "for", "from", "if", "in", "of", "or", "that", "what", "where",
    "which", "whose", "with", "without",
}  # fmt: skip


class Sentence(NamedTuple):
    """A sentence, and the first line of its paragraph in the file."""

    line: int
    text: str


def is_fragment(sentence: str) -> bool:
    """True if a sentence begins with one of the words, and no main clause follows."""
    first = FIRST.match(sentence)
    if not first:
        return False
    if first[1] not in ("Where", "As"):
        return True
    clauses = re.split(r"[:;]\s", sentence)[0].split(", ")
    return not any(clause.split()[0].lower() not in CONTINUING for clause in clauses[1:] if clause)


def paragraphs(source: str) -> Iterator[Sentence]:
    """Yield the paragraphs of all docstrings, and all comments, each in one line."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for inner in node.body:
                match inner:
                    case ast.Expr(value=ast.Constant(value=str(text))):
                        yield from _blocks(text, inner.lineno)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    found = [token for token in tokens if token.type == tokenize.COMMENT]
    block: list[tokenize.TokenInfo] = found[:1]
    for before, token in pairwise(found):
        inline = not token.line.lstrip().startswith("#")
        if inline or (before.start[0] + 1, before.start[1]) != token.start:
            yield _comment(block)
            block = []
        block.append(token)
    if block:
        yield _comment(block)


def _comment(block: list[tokenize.TokenInfo]) -> Sentence:
    text = " ".join(token.string.lstrip("# ") for token in block)
    return Sentence(block[0].start[0], text)


def _blocks(text: str, line: int) -> Iterator[Sentence]:
    for block in re.split(r"(\n\s*\n)", text):
        yield Sentence(line + block[: len(block) - len(block.lstrip())].count("\n"), block.strip())
        line += block.count("\n")


def fragments(path: Path) -> list[Sentence]:
    """Return the sentences of a Python file that are only a clause."""
    source = path.read_text()
    if not re.search(rf"\b{FIRST.pattern}", source):
        return []  # most files have none, and parsing takes seconds
    return [
        Sentence(line, sentence)
        for line, text in paragraphs(source)
        for sentence in END.split(" ".join(text.split()))
        if is_fragment(sentence)
    ]


def main(names: list[str]) -> int:
    """Print the fragments of all files below the paths; return the exit status."""
    given = [Path(name) for name in names or ["llmq"]]
    files = [file for p in given for file in ([p] if p.is_file() else sorted(p.rglob("*.py")))]
    found = [(file, sentence) for file in files for sentence in fragments(file)]
    for file, sentence in found:
        print(f"{file}:{sentence.line}: {sentence.text}")
    print(f"{len(found)} in {len(files)} files", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
