"""What became of a run after a checkpoint: a note that is written into it later.

A checkpoint is good when the PROVEN steps after it were. One that a bad step followed before is bad
until as many good steps have followed that one. Without a note it is not known yet. The
note is no part of what the checkpoint's checksums cover, and appears all at once.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from llmq.base.files import write_file
from llmq.base.json_file import json_object, values_of

VERDICT = "verdict.json"
PROVEN = 20  # steps


class Verdict(NamedTuple):
    """good: whether PROVEN steps after the checkpoint were. steps: good ones directly after it.
    reason: why it is not good. level: Guard.level of these steps; -1: it cannot become good."""

    good: bool
    steps: int
    reason: str = ""
    level: int = 0


def read_verdict(checkpoint: Path) -> Verdict | None:
    """Of a complete checkpoint; None if it is not known yet, or the note cannot be read."""
    note = json_object(checkpoint / VERDICT)
    found = values_of(note, steps=int, reason=str, level=int)
    return None if found is None or "good" not in note else Verdict(note["good"] is True, *found)


def write_verdict(checkpoint: Path, verdict: Verdict) -> None:
    """Raises LlmqError where the disk is full or refuses."""
    write_file(checkpoint / VERDICT, json.dumps(verdict._asdict()) + "\n")
