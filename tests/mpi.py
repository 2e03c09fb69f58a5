"""Several processes under Open MPI's mpirun, each of which runs the same list of commands."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.runs import flags

SCRIPT = Path(__file__).with_name("mpi_script.py")
# As root, and with more processes than cores, on a machine without other networks than its own.
ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":OVERSUBSCRIBE",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_rmaps_base_oversubscribe": "true",  # the same of Open MPI 4
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "OMPI_MCA_btl": "^tcp",  # shared memory, which releases of Open MPI call otherwise
    "OPENBLAS_NUM_THREADS": "1",
}
SECONDS = 100  # after which a test that hangs has failed


def mpirun() -> str:
    """Open MPI's launcher, which lies beside Python where pip has installed it, else on the path.
    Skips the test that needs it where there is none, as on a GPU's machine without `.[test]`."""
    beside = shutil.which("mpirun", path=str(Path(sys.executable).parent))
    return beside or shutil.which("mpirun") or pytest.skip("there is no mpirun")


def start(
    count: int,
    *cases: dict[str, Any],
    output: Path | None = None,
    places: Sequence[dict[str, str]] = (),
    **options: Any,
) -> subprocess.Popen:
    """mpirun with so many processes, which all run the cases, see mpi_script.py. options: Popen's.

    Its output is in the pipes, or in a file. places: environment of each process, see `machines`.
    """
    command = [mpirun(), "-n", str(count), sys.executable, str(SCRIPT)]
    command += [json.dumps(cases), json.dumps(list(places))]
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": path}
    out = subprocess.PIPE if output is None else open(output, "w")  # noqa: SIM115 - the child's
    return subprocess.Popen(
        command, stdout=out, stderr=subprocess.PIPE, text=True, env=environment, **options
    )


def machines(*names: str) -> list[dict[str, str]]:
    """Places of processes that take themselves to be on these machines."""
    return [{"LLMQ_MACHINE": name} for name in names]


def run(
    count: int, *cases: dict[str, Any], places: Sequence[dict[str, str]] = ()
) -> tuple[int, list[str], str]:
    """The status of mpirun, the lines of the first process, and all that went to standard error."""
    process = start(count, *cases, places=places)
    try:
        out, err = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, out.splitlines(), err


def case(
    fault: dict[str, Any] | None = None,
    own: Any = None,
    machines: Any = None,
    **changes: Any,
) -> dict[str, Any]:
    """One `llmq train`. own: further flags of each process. machines: the name of each one's, see
    `machine_folder`. fault: see mpi_script.py."""
    return {"flags": flags(**changes), "own": own or [], "fault": fault, "machines": machines or []}


def machine_folder(name: str) -> Path:
    """A machine with a disk of its own: the folder in which its processes run; data are shared."""
    folder = Path(name)
    folder.mkdir()
    for shared in ("data", "model"):
        (folder / shared).symlink_to(f"../{shared}")
    return folder
