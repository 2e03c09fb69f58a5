"""The entry points of the commands: `llmq`, `llmq-train` and `python -m llmq`."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from llmq.base.stopwatch import START  # measures from here on


@contextmanager
def _quiet_interrupt() -> Iterator[None]:
    """Exit with the status of Ctrl-C also while modules are loaded, which takes some tenths of a
    second."""
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(130)


def main() -> None:
    """Run `llmq`, as the entry point of the console script."""
    with _quiet_interrupt():
        with START.part("loading modules"):
            from llmq.commands import cli

        cli.main()


def train_main() -> None:
    """Run `llmq train`, as the entry point of the console script `llmq-train`."""
    with _quiet_interrupt():
        with START.part("loading modules"):
            from llmq.commands import cli

        cli.train_main()


if __name__ == "__main__":
    main()
