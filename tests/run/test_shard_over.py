"""`llmq train` on several machines, which processes of this one pretend to be, through MPI."""

from __future__ import annotations

import os
import re
from itertools import product
from pathlib import Path

import pytest

from tests.covering import covering
from tests.mpi import case, machine_folder, machines, run
from tests.run.test_processes import places, same_bits
from tests.runs import make_workplace, records, train, write_tokens

pytest.importorskip("mpi4py")

ROWS = covering(
    {"level": level, "numbers": numbers, "steps": 2 - a2a, "a2a": a2a}
    for level, numbers, a2a in product((2, 3), ("fp32", "delayed"), (False, True))
)
DELAYED = {"model_dtype": "bf16", "matmul_dtype": "e4m3", "fp8_recipe": "delayed"}
NUMBERS = {"fp32": {"model_dtype": "fp32"}, "delayed": DELAYED}


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(make_workplace(tmp_path))
    write_tokens(Path("data/train-3.bin"), 30, seed=5)


def options_of(row: dict) -> dict[str, object]:
    """The options of a row of ROWS."""
    options = {"steps": 2, "save_training_state": True, "eval_every_n_steps": 1, "batch_size": 1}
    options |= {"zero_level": row["level"], "grad_accumulation": row["steps"], "eval_num_steps": 1}
    return options | NUMBERS[row["numbers"]] | {"all_to_all_reduce": row["a2a"]}


def losses(name: str) -> list[float]:
    """The losses of the steps."""
    return [record["loss"] for record in records("step", name)]


def succeed(count: int, *cases: dict, names: str) -> str:
    """Run without complaints; the output of the first process."""
    status, out, err = run(count, *cases, places=machines(*names))
    assert (status, err) == (0, "")
    assert [line for line in out if line.startswith("status of process 0")] == (
        ["status of process 0: 0"] * len(cases)
    )
    return "\n".join(out)


@pytest.mark.slow
def test_bits_do_not_depend_on_the_processes_of_a_machine():
    """Three processes, which the launcher deals to two machines in turn."""
    rows = list(enumerate(ROWS))
    own = [["--gpus=1"], ["--gpus=2"], ["--gpus=1"]]
    three = [case(own=own, **options_of(row), **places(f"three-{i}")) for i, row in rows]
    out = succeed(3, *three, names="aba")
    assert "Ranks: 4, in 3 processes on 2 machines" in out
    for i, row in rows:
        assert train(gpus=4, **options_of(row), **places(f"one-{i}")) == 0
        # Sums in another order: in fp32 each rounds at 6e-8; gradients of BF16 have 8 bits.
        exact = {"fp32": 1e-6, "delayed": 2e-3}[row["numbers"]]
        assert losses(f"three-{i}.json") == pytest.approx(losses(f"one-{i}.json"), rel=exact), row


def test_checkpoints_of_machines():
    """All files together hold each value once; one process reads them, and machines read its."""
    options = {"steps": 6, "save_training_state": True, "batch_size": 1}
    options |= {"opt_m_dtype": "e4m3", "eval_every_n_steps": 3}
    first, rest = options | {"steps": 4, "cooldown": 0}, options | {"cooldown": 0}
    succeed(
        2,
        case(gpus=2, **rest, **places("whole")),
        case(gpus=2, **first, **places("parts"), ckpt_interval=2, ckpt_background=True),
        case(gpus=2, **rest, **places("parts"), **{"continue": ""}),
        case(gpus=2, **first, **places("moved")),
        names="ab",
    )
    same_bits("whole", "parts", 6)
    sizes = [path.stat().st_size for path in Path("whole-ckpt/step_00000006").glob("adam.v.*")]
    assert train(gpus=4, **first, **places("alone")) == 0
    of_one = [path.stat().st_size for path in Path("alone-ckpt/step_00000004").glob("adam.v.*")]
    assert sum(sizes) == pytest.approx(sum(of_one), rel=0.02), "beside headers"
    assert max(sizes) < 0.5 * sum(sizes), "all four write"
    assert train(gpus=4, **rest, **places("moved"), **{"continue": ""}) == 0
    found, want = losses("moved.json"), losses("whole.json")
    assert found == pytest.approx(want, rel=2e-3)  # as above
    assert "step_00000006" in os.listdir("moved-ckpt")


def test_machines_that_are_not_alike():
    options = {"steps": 2, "own": [["--gpus=2"], ["--gpus=1"]]}
    _, _, err = run(2, case(**options), places=machines("a", "b"))
    errors = [line for line in err.splitlines() if line.startswith("error")]
    assert len(errors) == 1
    assert re.match("error: --shard-over machine: every machine must have as many GPUs, there are "
                    "2 on 'a', 1 on 'b': give --shard-over world", errors[0])  # fmt: skip


def test_machines_that_share_no_directory_of_checkpoints():
    """Machines without a common directory are refused before the first step."""
    for name in "ab":
        machine_folder(name)
    Path("a/ckpt/step_00000001").mkdir(parents=True)
    options = {"machines": ["a", "b"], "steps": 2, "gpus": 1, "batch_size": 1}
    _, out, err = run(2, case(**options), case(**options, **{"continue": ""}))
    assert sorted(out) == [f"status of process {i}: 2" for i in (0, 0, 1, 1)]
    errors = [line for line in err.splitlines() if line.startswith("error")]
    text = (
        "error: process 1 on machine 'b': --checkpoint-dir: 'ckpt' is another directory here than "
        "for process 0 on machine 'a': a run over several machines needs one that all of them share"
    )
    assert errors == [text] * 2, err
    assert os.listdir("a/ckpt") == ["step_00000001"] and os.listdir("b/ckpt") == []
