"""Prove that every documented way to install llmq resolves against the package index alone.

uv reads metadata only, so nothing large is downloaded. This machine's settings of pip and uv (other
sources of wheels, constraints) are left out, because a user's machine has none of them. A library
installed beside llmq must resolve to the same version as alone: an old PyTorch, which needs another
release of CUDA, would prove nothing.

    python tools/resolve_installs.py

The exit status is 1 if a way does not resolve. Without a network the tool proves nothing and exits
with 0, except in CI (the environment variable CI is set), where it exits with 1.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLATFORM = ("--python-platform", "x86_64-manylinux_2_28", "--python-version", "3.12")
# The words after `pip install`: requirement files and options of `uv pip compile`, then libraries
# installed beside llmq.
Way = tuple[tuple[str, ...], tuple[str, ...]]
WIDEST: dict[str, Way] = {
    ".[test]": (("pyproject.toml", "--extra", "test"), ()),
    ". peft lm-eval": (("pyproject.toml",), ("peft", "lm-eval", "torch")),
    "-r requirements/cuda13.txt": (("requirements/cuda13.txt",), ()),
}
# Ways whose metadata the widest ways have just fetched: nothing is fetched again.
WITHIN: dict[str, Way] = {
    ".": (("pyproject.toml",), ()),
    ". torch": (("pyproject.toml",), ("torch",)),
    "-r requirements/cpu.txt": (("requirements/cpu.txt",), ()),
}
UNREACHABLE = ("Failed to fetch", "error sending request", "dns error", "client error (Connect)")


class NotReached(Exception):
    """The index does not answer."""


def compiled(way: Way, cache: str, *options: str) -> dict[str, str]:
    """Return versions by name that uv finds. cache: folder for metadata.

    Raises NotReached, or RuntimeError with uv's reason why nothing fits.
    """
    arguments, beside = way
    ours = ("PIP_", "UV_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    command = [sys.executable, "-m", "uv", "pip", "compile", "--no-config", "--no-header"]
    command += ["--no-annotate", "--quiet", "--cache-dir", cache, *PLATFORM, *options, *arguments]
    done = subprocess.run(
        [*command, *(["-"] if beside else [])],
        input="\n".join(beside),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=env,
    )
    if done.returncode:
        lost = any(sign in done.stderr for sign in UNREACHABLE)
        raise (NotReached if lost else RuntimeError)(done.stderr.strip())
    return dict(re.findall(r"^([\w.-]+)==(\S+)", done.stdout, re.MULTILINE))


def problem(way: Way, cache: str, *options: str) -> str | None:
    """The reason why a way to install llmq fails; None if it works."""
    beside = way[1]
    try:
        found = compiled(way, cache, *options)
        alone = compiled(((), beside), cache, "--offline") if beside else {}
    except RuntimeError as error:
        return str(error)
    older = [f"{n} {found[n]} instead of {alone[n]}" for n in beside if found[n] != alone[n]]
    return f"only with {', '.join(older)}" if older else None


def problems() -> dict[str, str | None]:
    """Problems by way; None if the way works. Raises NotReached."""
    with tempfile.TemporaryDirectory() as cache, ThreadPoolExecutor() as threads:
        fetching = {name: threads.submit(problem, way, cache) for name, way in WIDEST.items()}
        found = {name: future.result() for name, future in fetching.items()}
        return found | {name: problem(way, cache, "--offline") for name, way in WITHIN.items()}


def main() -> int:
    """Report for each way whether it resolves."""
    try:
        found = problems()
    except NotReached as error:
        print(f"the package index cannot be reached: {error}", file=sys.stderr)
        if os.environ.get("CI"):
            return 1
        print("skipped: how llmq installs is not proven", file=sys.stderr)
        return 0
    for way, why in found.items():
        print(f"pip install {way}: {'resolves' if why is None else why}")
    return int(any(found.values()))


if __name__ == "__main__":
    sys.exit(main())
