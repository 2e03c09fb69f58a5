"""Put known bugs into a copy of this tree, one at a time, and see which test finds each.

`python tools/mutations/run.py` exits 1 if a bug survives the tests that mutations.yaml names for
it. That file says what is changed where; a text that is not there exactly once is an error, so the
list is kept in step with the code.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Annotated

import typer
import yaml

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("mutations.yaml")
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist")
PATIENCE = 600  # seconds: a bug may make its test hang
FAILED = 1  # pytest's exit status where a test has failed; what is larger, it could not run them


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """file: a pattern of paths. old: text that they have once. tests: arguments of pytest."""

    name: str
    file: str
    old: str
    new: str
    tests: list[str]

    def place(self, root: Path) -> Path:
        """The file below root that has the text; ValueError unless one has it once."""
        found = {path: path.read_text().count(self.old) for path in sorted(root.glob(self.file))}
        if sum(found.values()) != 1:
            raise ValueError(f"{self.name}: {self.file} has {self.old!r} {sum(found.values())}x")
        return next(path for path, count in found.items() if count)

    @contextmanager
    def applied(self, root: Path) -> Iterator[None]:
        """The bug is in the tree during the block."""
        path = self.place(root)
        text = path.read_text()
        path.write_text(text.replace(self.old, self.new))
        try:
            yield
        finally:
            path.write_text(text)


def mutations() -> list[Mutation]:
    """The list."""
    return [Mutation(name=n, **fields) for n, fields in yaml.safe_load(LIST.read_text()).items()]


def finder(mutation: Mutation, root: Path) -> str | None:
    """The finder of the bug in the tree at root: a test, or that the run crashes or hangs; or None.

    RuntimeError where pytest cannot run the tests.
    """
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider"]
    environment = os.environ | {"PYTHONPATH": str(root)}
    with mutation.applied(root):
        try:
            done = subprocess.run(
                [*command, *mutation.tests],
                cwd=root,
                env=environment,
                capture_output=True,
                text=True,
                timeout=PATIENCE,
            )
        except subprocess.TimeoutExpired:
            return f"still running after {PATIENCE} s"
    if done.returncode == 0:
        return None
    if done.returncode < 0:
        return f"ended by signal {-done.returncode}"
    failed = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - |$)", done.stdout, re.MULTILINE)
    if done.returncode != FAILED or failed is None:
        raise RuntimeError(f"{mutation.name}: pytest says\n{done.stdout}{done.stderr}")
    return failed[1]


def main(
    only: Annotated[list[str] | None, typer.Option(help="Name of a mutation.")] = None,
    jobs: Annotated[int, typer.Option(help="Runs side by side.")] = os.cpu_count() or 1,
) -> None:
    """Show which test finds each bug."""
    chosen = [m for m in mutations() if not only or m.name in only]
    if unknown := set(only or ()) - {m.name for m in chosen}:
        raise typer.BadParameter(f"no such mutation: {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        trees: SimpleQueue[Path] = SimpleQueue()
        for i in range(min(jobs, len(chosen))):
            trees.put(shutil.copytree(ROOT, Path(folder) / str(i), ignore=LEFT_OUT))

        def run(mutation: Mutation) -> str | None:
            tree = trees.get()
            try:
                return finder(mutation, tree)
            finally:
                trees.put(tree)

        survivors = 0
        for mutation, found in zip(chosen, pool.map(run, chosen), strict=True):
            survivors += found is None
            print(f"{mutation.name:36} {found or 'SURVIVES'}", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} found")
    sys.exit(survivors > 0)


if __name__ == "__main__":
    typer.run(main)
