"""The identity of a run says who wrote a checkpoint, an export or a log."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from typing import Any, NamedTuple


class Parent(NamedTuple):
    """The run from which another run continued under a new name (a fork), and the step of the
    checkpoint where the fork began."""

    id: str
    name: str
    step: int

    def __str__(self) -> str:
        return f"run '{self.name}' ({self.id}) at step {self.step}"


@dataclass(frozen=True, slots=True)
class RunId:
    """A run's random id and its name. The run keeps its id when --continue has the same name; under
    another name the new run is a fork with a parent."""

    id: str
    name: str
    parent: Parent | None = None

    @classmethod
    def new(cls, name: str) -> RunId:
        """Return the identity of a new run."""
        return cls(secrets.token_hex(6), name)

    @classmethod
    def of(cls, record: Any) -> RunId | None:
        """Return the identity that the JSON value `record` holds; None if it has no id."""
        if not isinstance(record, dict) or not isinstance(record.get("id"), str):
            return None
        try:
            parent = Parent(**record["parent"])
        except (LookupError, TypeError):
            parent = None
        return cls(record["id"], str(record.get("name", "")), parent)

    def continuing(self, owner: RunId, step: int) -> RunId:
        """Return the identity of a run that continues from a checkpoint of `owner` at this step:
        `owner` if the name is the same, else a fork with this run's id."""
        if owner.name == self.name:
            return owner
        return replace(self, parent=Parent(owner.id, owner.name, step))

    def record(self) -> dict[str, Any]:
        """Return the identity as a JSON object."""
        parent = {} if self.parent is None else {"parent": self.parent._asdict()}
        return {"id": self.id, "name": self.name} | parent

    def owns(self, owner: RunId | None) -> bool:
        """True if files of `owner` belong to this run. owner: identity of the run that wrote the
        files; None if unknown."""
        return owner is not None and owner.id == self.id

    def __str__(self) -> str:
        return f"run '{self.name}' ({self.id})"
