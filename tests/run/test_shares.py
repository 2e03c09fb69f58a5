"""`llmq train --share`: ranks that compute more and fewer micro-batches of a step."""

from __future__ import annotations

import signal
import time
from itertools import product

import numpy as np
import pytest
from safetensors.numpy import load_file

from llmq.base.dtypes import STEP_SCALARS
from llmq.base.shares import apportion
from llmq.model.rings import scalars_of
from llmq.model.step import Step
from llmq.options.options_io import make_config
from llmq.run.shares import MEASURED, WARM_UP, Shares
from llmq.runtime.machine import choose_machine
from llmq.runtime.mesh import Mesh
from llmq.state.rules import RULES
from tests.runs import make_workplace, records, signal_after, train

# A large epsilon: without it AdamW turns rounding errors into whole steps.
RUN = {"gpus": 2, "grad_accumulation": 3, "adam_epsilon": 1e-3, "model_dtype": "fp32"}


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(make_workplace(tmp_path))


def trained(name: str, steps: int, **options: object) -> None:
    """Train and export to the folder `name`, with the log NAME.json."""
    places = {"log_file": f"{name}.json", "out_dir": name, "checkpoint_dir": f"{name}-ckpt"}
    assert train(steps=steps, **RUN | places | {"save_training_state": True} | options) == 0


def assert_alike(name: str, other: str) -> None:
    """Both runs made the same steps of the same data, up to the order of sums in fp32."""
    logs = [records("step", f"{each}.json") for each in (name, other)]
    assert [r["step_tokens"] for r in logs[0]] == [r["step_tokens"] for r in logs[1]]
    for key in ("loss", "norm"):
        values = [[record[key] for record in log] for log in logs]
        np.testing.assert_allclose(*values, rtol=1e-6)
    weights = [load_file(f"{each}/model.safetensors") for each in (name, other)]
    for key, values in weights[0].items():
        np.testing.assert_allclose(values, weights[1][key], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("total", "rates", "shares"),
    [
        (8, (1, 1), [4, 4]),
        (10, (3, 2), [6, 4]),
        (6, (2, 1), [4, 2]),
        (8, (1, 0.98), [4, 4]),  # 5:3 would take longer
        (7, (100, 1, 1), [5, 1, 1]),
        (2, (5, 1), [1, 1]),  # all take part in each exchange
    ],
)
def test_no_other_shares_are_done_sooner(total, rates, shares):
    assert apportion(total, rates) == shares
    longest = max(share / rate for share, rate in zip(shares, rates, strict=True))
    others = product(range(1, total + 1), repeat=len(rates))
    assert longest == min(
        max(share / rate for share, rate in zip(other, rates, strict=True))
        for other in others
        if sum(other) == total
    )


def test_a_micro_batch_is_the_same_on_every_rank():
    """The order of data, and the numbers of sequences and of random numbers."""

    def dealt(share: str, count: int) -> dict[str, tuple[int, int]]:
        config = make_config({"grad_accumulation": 3, "gpus": 2, "share": share})
        batches = [[f"{i} of rank {rank}" for i in range(count)] for rank in range(2)]
        found = {}
        shares = Shares(config, choose_machine("cpu", 2), plan=None)
        for rank, own in enumerate(shares.deal(batches)):
            for number, batch in own:
                rule, mesh = RULES["adamw"](config), Mesh.of(2, rank)
                words = scalars_of(config.for_step, mesh, rule, 0, number, 0.0, 0.0)
                record = words.view(STEP_SCALARS)[0]
                found[batch] = (record["micro_step"], record["first_sequence"])
        return found

    assert dealt("equal", 3) == dealt("5:1", 3) == dealt("1:2", 3)
    assert len(set(dealt("5:1", 3).values())) == 6
    assert dealt("equal", 2) == dealt("3:1", 2)  # at the end of an epoch


def test_a_step_is_the_same_with_other_shares():
    """Through the smaller step at the end of an epoch."""
    trained("equal", 4)
    trained("most", 4, share="5:1")
    assert_alike("equal", "most")
    trained("one", 4, gpus=1, grad_accumulation=6)
    assert_alike("one", "most")


def test_a_run_goes_on_with_other_shares(monkeypatch, capsys):
    trained("whole", 4, share="2:1")
    with monkeypatch.context() as patch:
        signal_after(patch, 2, signal.SIGTERM)
        places = {"log_file": "cut.json", "out_dir": "cut", "checkpoint_dir": "cut-ckpt"}
        assert train(steps=4, **RUN | places, share="2:1") == 128 + signal.SIGTERM
    capsys.readouterr()
    trained("cut", 4, share="1:2", **{"continue": ""})
    assert "numbers may be rounded otherwise than in the checkpoint's run: --share=1:2 (was " in (
        capsys.readouterr().err
    )
    assert_alike("whole", "cut")


def test_shares_are_measured(monkeypatch, capsys):
    """A rank that takes twice as long gets half as many; a checkpoint keeps the shares."""
    seconds, micro_step, made = [0.02, 0.045], Step._micro_step, []

    def slowed(step: Step, *args: object, **options: object) -> None:
        if step.dev.kind != "plan":
            made.append(step.dev.mesh.rank)
            time.sleep(seconds[step.dev.mesh.rank])
        micro_step(step, *args, **options)

    monkeypatch.setattr(Step, "_micro_step", slowed)
    steps = WARM_UP + MEASURED
    trained("slowed", steps + 1, share="auto")
    assert "Shares of the GPUs: 4:2 of a step's 6 micro-batches" in capsys.readouterr().out
    seconds[:] = [0.0, 0.0]
    made.clear()
    trained("slowed", steps + 2, share="auto", **{"continue": ""})
    assert "Shares of the GPUs: 4:2 of a step's 6 micro-batches" in capsys.readouterr().out
    assert [made.count(rank) for rank in range(2)] == [4, 2]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"share": "3-2"}, "expected equal, auto or numbers above 0 such as 3:2"),
        ({"share": "3:0"}, "expected equal, auto or numbers above 0 such as 3:2"),
        ({"share": "1:2:3"}, "--share: 1:2:3 gives 3 of 2 GPUs a share"),
        ({"share": "auto", "zero_level": 3}, "with --shard-weights GPUs exchange data in every"),
        ({"share": "3:2", "zero_level": 2}, "with --shard-gradients GPUs exchange data in every"),
        ({"share": "auto", "context_parallel": 2}, "with --context-parallel GPUs exchange data"),
    ],
)
def test_shares_that_cannot_be(options, line, capsys):
    assert train(steps=1, **RUN | options) == 2
    assert line in capsys.readouterr().err
