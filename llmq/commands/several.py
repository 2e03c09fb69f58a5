"""A command in several processes, which a launcher of MPI has started, and how they end."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator

from llmq.base.errors import LlmqError, keep_warnings, status_of, taken_warnings
from llmq.base.signals import Interrupted, OutOfTime
from llmq.commands.message import one_line
from llmq.runtime.processes import ALONE, Processes, launched, processes, set_processes


@contextlib.contextmanager
def joined() -> Iterator[Processes]:
    """Within the block, `processes()` are those that were started with this one.

    Only the first one writes to standard output. An error that ends one of them ends all, with its
    status: one that all have is told by the first, any other by the process that has it.
    """
    if launched() == 1:
        yield processes()
        return
    from llmq.runtime.mpi import join

    group = join()
    set_processes(group)
    with contextlib.ExitStack() as stack:
        if not group.first:
            keep_warnings()
            null = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(contextlib.redirect_stdout(null))
        try:
            yield group
            group.gather(None)  # no process ends before all have done their work
        except (Interrupted, OutOfTime):
            group.gather(None)
            raise
        except SystemExit:
            raise
        except BaseException as error:
            if not getattr(error, "agreed", False):
                _tell(group, error)
                group.abort(status_of(error))
            if not group.first:  # MPI lets it end when the first one has told what it is
                raise SystemExit(status_of(error)) from None
            raise
        finally:
            group.close()
            set_processes(ALONE)


def _tell(group: Processes, error: BaseException) -> None:
    """Print an error that only this process may have."""
    for line in taken_warnings() if not group.first else []:
        print(f"warning: {line}", file=sys.stderr)
    if status_of(error) == 1:
        traceback.print_exception(error)
    text = one_line(error)
    machine = group.machines[group.index]
    where = "" if machine in text else f"process {group.index} on machine '{machine}': "
    details = error.details if isinstance(error, LlmqError) else ()
    print("\n".join([f"error: {where}{text}", *details]), file=sys.stderr, flush=True)
