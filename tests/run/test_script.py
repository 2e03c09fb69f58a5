"""llmq.Trainer makes the run of `llmq train`, as a whole, step by step, and in a notebook."""

from __future__ import annotations

import os
import signal
import weakref
from pathlib import Path

import pytest

import llmq
from llmq.base.errors import LlmqError
from llmq.base.signals import Interrupted
from tests.runs import make_workplace, options, records, train

RUN = {"steps": 5, "eval_every_n_steps": 2, "ckpt_interval": 3, "keep_best": "loss"}


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(make_workplace(tmp_path))


def trainer(*callbacks, **changes):
    given = options(**RUN | changes)
    given = {name.replace("-", "_"): value for name, value in given.items() if value is not None}
    return llmq.Trainer(callbacks=callbacks, **given)


def logged(log: str = "log.json") -> list[tuple]:
    """The records of a log without times and places."""
    skipped = ("time", "duration_ms", "ms")
    return [
        (kind, *[(k, v) for k, v in record.items() if k not in skipped])
        for kind in ("step", "eval", "dataset")
        for record in records(kind, log)
    ]


def test_iteration_writes_what_llmq_train_writes():
    assert train(**RUN) == 0
    places = {"log_file": "own/log.json", "out_dir": "own/out", "checkpoint_dir": "own/ckpt"}
    with trainer(**places) as t:
        found = []
        for step in t:
            found.append(step)
            assert t.steps_done == step.step + 1
            if step.step == 1:
                break
        for step in t:
            found.append(step)
            if step.step == 3:
                break
        t.train()
        assert list(t) == [], "the run is over"
    losses = [record["loss"] for record in records("step")]
    assert [step.result.loss for step in found] == losses[:4]
    assert logged("own/log.json") == logged()
    assert records("info", "own/log.json")[-1]["message"].startswith("Exported: the best model")
    for path in Path("ckpt").glob("*/*.safetensors"):
        assert ("own" / path).read_bytes() == path.read_bytes()
    assert (
        Path("own/out/model.safetensors").read_bytes() == Path("out/model.safetensors").read_bytes()
    )


def test_a_loaded_checkpoint_goes_on_in_its_log():
    with trainer(steps=3, save_training_state=True) as t:
        t.train()
    with trainer(overwrite=False) as t:
        t.load("ckpt")
        t.train()
        with pytest.raises(LlmqError, match="the run has begun"):
            t.load("ckpt")
    assert [record["step"] for record in records("step")] == [*range(5)]
    (other,) = [r for r in records("cmd") if r["resumed_at"]]
    assert other["resumed_at"] == 3


def test_files_of_another_run_are_refused():
    with trainer() as t:
        t.train()
    with trainer(overwrite=False) as t, pytest.raises(LlmqError, match="--overwrite"):
        t.train()


class Ends(llmq.Callback):
    def __init__(self):
        self.ends = []

    def on_end(self, end):
        self.ends.append((end.steps_done, end.error and type(end.error)))


def test_the_end_of_a_run_is_told_once():
    """After its last step, or when the block is left, with the error."""
    whole, left = Ends(), Ends()
    with trainer(whole) as t:
        t.train()
        assert whole.ends == [(5, None)]
        t.sample("a") if t.tokenizer else t.validate()
    with pytest.raises(ZeroDivisionError), trainer(left) as t:
        for _ in t:
            raise ZeroDivisionError
    assert (whole.ends, left.ends) == ([(5, None)], [(1, ZeroDivisionError)])
    with trainer() as t:  # the places are free again
        t.train()


def test_a_signal_saves_and_ends_the_run():
    before, ends = signal.getsignal(signal.SIGINT), Ends()

    class Asks(llmq.Callback):
        def on_step(self, step):
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted), trainer(Asks(), ends) as t:
        for _ in t:
            assert signal.getsignal(signal.SIGINT) == before, "Ctrl-C is the caller's"
    assert ends.ends == [(1, Interrupted)]
    assert [path.name for path in Path("ckpt").glob("step_*")] == ["step_00000001"]


@pytest.mark.parametrize("gpus", [1, 2])
def test_a_closed_trainer_holds_no_memory(gpus):
    with trainer(gpus=gpus) as t:
        t.train()
        devices = t.ranks.devices
        arenas = [weakref.ref(dev.arenas["device"].storage.bytes) for dev in devices]
        del devices
    assert [arena() for arena in arenas] == [None] * gpus
    assert t.steps_done == 5
