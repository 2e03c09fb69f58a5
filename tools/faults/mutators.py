"""Ways to damage a file: its bytes, what its JSON says, or what lies in its place."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2, 0.5, 1e308, float("inf"), float("nan"), 10**12, 2**63, 10**30,
    -(2**40), "", "x", "0", "-1", "nan", "../../x", "/etc/passwd", "\0", "\ud800", "é漢",
    "a" * 5000, "{{", "(" * 200, [], {}, [[]], [None], {"": ""}, [1, 2, 3], {"a": {"b": []}},
    list(range(3000)),
]  # fmt: skip
_SPECIAL = ("empty", "folder", "pipe", "loop", "zeros", "nothing", "text", "random")


def mutate(path: Path, rng: random.Random) -> str:
    """Damage a file; returns what was done."""
    is_json = path.suffix in (".json", ".jsonl")
    kinds = [_bytes] * 6 + [_special] + [_json] * (6 if is_json else 0)
    return rng.choice(kinds)(path, rng)


def _bytes(path: Path, rng: random.Random) -> str:
    data = bytearray(path.read_bytes())
    how = rng.choice(("bit", "byte", "cut", "longer", "insert", "delete", "zero", "twice", "swap"))
    at, size = rng.randrange(len(data) + 1), rng.choice((1, 2, 4, 8, 64, 512, 4096))
    if rng.random() < 0.3:  # where what describes the rest is
        at = rng.randrange(min(len(data), 64) + 1)
    stop = min(at + size, len(data))
    if how == "bit" and at < len(data):
        data[at] ^= 1 << rng.randrange(8)
    elif how == "byte" and at < len(data):
        data[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
    elif how == "cut":
        del data[at:]
    elif how == "longer":
        data += rng.choice((bytes(size), rng.randbytes(size)))
    elif how == "insert":
        data[at:at] = rng.randbytes(size)
    elif how == "delete":
        del data[at:stop]
    elif how == "zero":
        data[at:stop] = bytes(stop - at)
    elif how == "twice":
        data[at:at] = data[at:stop]
    else:
        to = rng.randrange(len(data) + 1)
        data[at:stop], data[to : to + size] = data[to : to + size], data[at:stop]
    path.write_bytes(data)
    return f"{how} of {size} at {at}"


def _special(path: Path, rng: random.Random) -> str:
    how = rng.choice(_SPECIAL)
    path.unlink()
    if how == "folder":
        path.mkdir()
    elif how == "pipe":
        os.mkfifo(path)
    elif how == "loop":
        path.symlink_to(path.name)
    elif how == "zeros":
        path.symlink_to("/dev/zero")
    elif how != "nothing":
        content = {"empty": b"", "text": b"Hello, world.\n" * 9}
        path.write_bytes(
            content.get(how) if how in content else rng.randbytes(rng.choice((7, 5000)))
        )
    return f"{how} in its place"


def places(node: Any) -> list[tuple[Any, Any]]:
    """(container, key) of everything in what JSON gives."""
    found: list[tuple[Any, Any]] = []
    waiting = [node]
    while waiting:
        each = waiting.pop()
        keys = (
            each if isinstance(each, dict) else range(len(each)) if isinstance(each, list) else ()
        )
        found += [(each, key) for key in keys]
        waiting += [each[key] for key in keys]
    return found


def change(document: Any, rng: random.Random) -> str:
    """Change one thing in it, in place."""
    found = places(document)
    if not found:
        return "nothing"
    # Half of the time near the top: a vocabulary has thousands of places that are alike.
    container, key = rng.choice(found[:40] if rng.random() < 0.5 else found)
    how = rng.choice(("odd", "odd", "odd", "gone", "new", "other", "sign", "deep"))
    if how == "gone":
        del container[key]
    elif how == "new" and isinstance(container, dict):
        container["unknown" + str(rng.randrange(9))] = rng.choice(ODD)
    elif how == "other":
        other, at = rng.choice(found)
        container[key] = json.loads(json.dumps(other[at])) if other is not container else at
    elif how == "sign" and type(container[key]) in (int, float):
        container[key] = -container[key]
    elif how == "deep":
        deep: Any = 0
        for _ in range(rng.choice((20, 900, 5000))):
            deep = [deep]
        container[key] = deep
    else:
        container[key] = rng.choice(ODD)
    return f"{how} at {str(key)[:40]!r}"


def dumped(document: Any) -> str:
    """JSON, however deep."""
    deep = json.JSONEncoder(check_circular=False).encode
    try:
        return deep(document)
    except RecursionError:
        return "[" * 100_000


def _json(path: Path, rng: random.Random) -> str:
    def one(text: str) -> tuple[str, str]:
        document = json.loads(text)
        what = change(document, rng)
        return dumped(document), what

    text = path.read_text()
    if path.suffix != ".jsonl":
        new, what = one(text)
        path.write_text(new)
        return what
    lines = text.splitlines()
    index = rng.randrange(len(lines))
    lines[index], what = one(lines[index])
    path.write_text("\n".join(lines) + "\n")
    return f"line {index}: {what}"


def signed(
    digest: Callable[[dict], str], name: str = "sha256"
) -> Callable[[Path, random.Random], str]:
    """Changes a document and signs it anew, so that only its shape is wrong. name: of the field."""

    def sign(path: Path, rng: random.Random) -> str:
        document = json.loads(path.read_text())
        what = change(document, rng)
        try:
            document[name] = digest(document)
        except (RecursionError, ValueError, KeyError):
            return "nothing"
        path.write_text(dumped(document))
        return what

    return sign
