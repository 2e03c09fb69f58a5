"""A disk that knows what a loss of power may leave of it, by what POSIX promises and no more.

The content of a file is safe when fsync of the file has returned, its name when fsync of its
directory has. Any part of the rest may be there: some of the writes, the last one torn, a length
without data; any of the changes of names in a directory, in the order in which they were made. A
rename within a directory is one change, one between two directories is two.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field
from pathlib import Path

from tools.faults.calls import Call

PIECE = 512  # bytes: where a write tears


@dataclass
class _File:
    safe: bytes = b""
    pending: list[tuple[int, bytes | None]] = field(default_factory=list)
    """(offset, data) of writes, (length, None) of truncations."""

    def now(self, count: int | None = None) -> bytearray:
        """With so many of what is not safe; all if not given."""
        data = bytearray(self.safe)
        for at, new in self.pending[:count]:
            if new is None:
                del data[at:]
                data.extend(bytes(at - len(data)))
            else:
                data.extend(bytes(max(at - len(data), 0)))
                data[at : at + len(new)] = new
        return data

    def after_loss(self, rng: random.Random) -> bytes:
        """A state that may be there."""
        if not self.pending:
            return self.safe
        how = rng.choice(("safe", "all", "some", "torn", "zeros"))
        if how == "safe":
            return self.safe
        if how == "all":
            return bytes(self.now())
        count = rng.randrange(len(self.pending))
        data = self.now(count)
        at, new = self.pending[count]
        if new is None or how == "some":
            return bytes(data)
        pieces = rng.randint(0, len(new) // PIECE)
        part = new[: pieces * PIECE] if how == "torn" else bytes(len(new))
        data.extend(bytes(max(at + len(part) - len(data), 0)))
        data[at : at + len(part)] = part
        return bytes(data)


@dataclass
class _Folder:
    safe: dict[str, int] = field(default_factory=dict)
    pending: list[dict[str, int | None]] = field(default_factory=list)
    """Changes: names with what they are from then on."""

    def now(self, kept: list[bool] | None = None) -> dict[str, int]:
        names: dict[str, int | None] = dict(self.safe)
        for index, change in enumerate(self.pending):
            if kept is None or kept[index]:
                names |= change
        return {name: node for name, node in names.items() if node is not None}

    def after_loss(self, rng: random.Random) -> dict[str, int]:
        count, how = len(self.pending), rng.choice(("safe", "all", "first", "any"))
        first = rng.randint(0, count)
        kept = {
            "safe": [False] * count,
            "all": [True] * count,
            "first": [index < first for index in range(count)],
            "any": [rng.random() < 0.5 for _ in range(count)],
        }[how]
        return self.now(kept)


class Disk:
    """The disk of one folder. Links, which llmq never makes, are part of what was there before."""

    def __init__(self, root: Path):
        self.root = os.path.realpath(root)
        self.nodes: list[_File | _Folder | str] = []  # text: a link
        self._load(Path(self.root))

    def _load(self, path: Path) -> int:
        number = len(self.nodes)
        self.nodes.append(_File())
        if path.is_symlink():
            self.nodes[number] = os.readlink(path)
        elif path.is_dir():
            self.nodes[number] = folder = _Folder()
            for name in sorted(os.listdir(path)):
                folder.safe[name] = self._load(path / name)
        else:
            self.nodes[number] = _File(path.read_bytes())
        return number

    def _find(self, path: str) -> int | None:
        node = 0
        for name in os.path.relpath(path, self.root).split("/"):
            if name != ".":
                names = self.nodes[node].now()
                if name not in names:
                    return None
                node = names[name]
        return node

    def _parent(self, path: str) -> tuple[_Folder, str]:
        folder, name = os.path.split(path)
        return self.nodes[self._find(folder)], name

    def _add(self, path: str, node: _File | _Folder) -> None:
        parent, name = self._parent(path)
        parent.pending.append({name: len(self.nodes)})
        self.nodes.append(node)

    def do(self, call: Call) -> None:
        """Take a call that was done."""
        found = (
            None if call.kind in ("mkdir", "unlink", "rmdir", "rename") else self._find(call.path)
        )
        if call.kind == "open" and found is None:
            self._add(call.path, _File())
        elif call.kind == "open" and call.to:
            self.nodes[found].pending.append((0, None))
        elif call.kind == "write" and found is not None:
            self.nodes[found].pending.append((call.to, call.data))
        elif call.kind == "truncate":
            self.nodes[found].pending.append((call.to, None))
        elif call.kind == "fsync" and found is not None:
            node = self.nodes[found]
            node.safe = node.now() if isinstance(node, _Folder) else bytes(node.now())
            node.pending = []
        elif call.kind == "mkdir":
            self._add(call.path, _Folder())
        elif call.kind in ("unlink", "rmdir"):
            parent, name = self._parent(call.path)
            parent.pending.append({name: None})
        elif call.kind == "link":
            parent, name = self._parent(call.to)
            parent.pending.append({name: found})
        elif call.kind == "rename":
            self._rename(call.path, call.to)

    def _rename(self, path: str, to: str) -> None:
        moved = self._find(path)
        source, old = self._parent(path)
        target, new = self._parent(to)
        if source is target:
            source.pending.append({old: None, new: moved})
        else:
            target.pending.append({new: moved})
            source.pending.append({old: None})

    def lose_power(self, rng: random.Random, to: Path) -> None:
        """Make a folder of what may be left."""
        self._write(0, to, rng)

    def _write(self, number: int, to: Path, rng: random.Random) -> None:
        node = self.nodes[number]
        if isinstance(node, str):
            to.symlink_to(node)
        elif isinstance(node, _File):
            to.write_bytes(node.after_loss(rng))
        else:
            to.mkdir()
            for name, child in node.after_loss(rng).items():
                self._write(child, to / name, rng)
