"""Who wrote a checkpoint, an export or a log: the identity of a run."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class RunId:
    """A run's random id, which it keeps over --continue; the name is for people.

    adopts: what has no id counts as this run's, because it went on from a checkpoint without one.
    """

    id: str
    name: str
    adopts: bool = False

    @classmethod
    def new(cls, name: str) -> RunId:
        """Of a run that begins now."""
        return cls(secrets.token_hex(6), name)

    @classmethod
    def of(cls, record: Any) -> RunId | None:
        """What `record` gave, read back from JSON; None if there is no id in it."""
        if not isinstance(record, dict) or not isinstance(record.get("id"), str):
            return None
        return cls(record["id"], str(record.get("name", "")), record.get("adopts") is True)

    def continuing(self, owner: RunId | None) -> RunId:
        """This run as the one that `owner` is, under its own name; None: of a run without an id."""
        if owner is None:
            return replace(self, adopts=True)
        return replace(owner, name=self.name)

    def record(self) -> dict[str, Any]:
        """In JSON's types."""
        return {"id": self.id, "name": self.name, "adopts": self.adopts}

    def owns(self, owner: RunId | None) -> bool:
        """Whether what belongs to `owner` is this run's. None: of a run without an id."""
        return self.adopts if owner is None else owner.id == self.id

    def __str__(self) -> str:
        return f"run '{self.name}' ({self.id})"
