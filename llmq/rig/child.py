"""One measurement in a process of its own, so that what fails, hangs or crashes ends nothing else.

`python -m llmq.rig.child RESULT` reads a job (`llmq.bench.child.ask`): `part`, a module here,
`seconds` that it may take, and its `options`. It writes JSON to the file RESULT whenever it knows
more: `result`, and `error` where the measurement failed.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmq.base.files import write_file
from llmq.bench.child import ask, job_of_parent
from llmq.run.restarts import in_words

CHILD = (sys.executable, "-m", "llmq.rig.child")
GRACE = 15.0  # seconds that a child may take longer than it was given, to start and to end


@dataclass
class Job:
    """The input of a measurement. deadline: of time.monotonic. note: keeps what is known."""

    deadline: float
    note: Callable[[dict[str, Any]], None] = field(default=lambda result: None)

    @property
    def left(self) -> float:
        """Seconds."""
        return self.deadline - time.monotonic()

    @classmethod
    def within(cls, seconds: float) -> Job:
        """A job whose results only its caller wants."""
        return cls(time.monotonic() + seconds)


def run_part(
    part: str,
    seconds: float,
    options: dict[str, Any],
    *,
    command: Sequence[str] = CHILD,
    grace: float = GRACE,
) -> dict[str, Any]:
    """`result`, as far as it is known, and `error`, None if all went well, of a child. command: of
    its process. grace: seconds that it may take longer."""
    job = {"part": part, "seconds": seconds, "options": options}
    found, ended = ask(command, job, seconds + grace)
    found = found or {"result": {}, "error": None}
    if ended.status is None:
        return found | {"error": f"it took more than {seconds + grace:.0f} s and was ended"}
    if ended.status and found["error"] is None:
        return found | {"error": f"its process {in_words(ended.status)}"}
    return found


def function_of(part: str) -> Callable[..., None]:
    """The function that measures a part: it takes a Job and options, and notes its result."""
    return importlib.import_module(f"llmq.rig.{part}").measure


def main() -> None:
    """The child: see the top of this file."""
    given, found = job_of_parent(), {"result": {}, "error": None}

    def note(result: dict[str, Any]) -> None:
        found["result"] = result
        write_file(Path(sys.argv[1]), json.dumps(found))

    try:
        job = Job(time.monotonic() + given["seconds"], note)
        function_of(given["part"])(job, **given["options"])
    except Exception as error:  # of CUDA, say: the report has it, and the traceback where
        traceback.print_exc()
        found["error"] = " ".join(f"{type(error).__name__}: {error}".split())
        note(found["result"])


if __name__ == "__main__":
    main()
