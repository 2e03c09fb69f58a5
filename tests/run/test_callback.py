"""A user's callback hears of steps, evaluations, checkpoints and the end, from a Trainer and from
`llmq train`."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import llmq
from llmq.checkpoint.manifest import MANIFEST
from llmq.options.options_io import make_config
from llmq.run.model_of_run import model_of_run
from llmq.run.training import run_training
from tests.runs import VOCAB, B, T, make_workplace, options, records


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(make_workplace(tmp_path))


class Notes(llmq.Callback):
    """Notes what it hears. at: raises at this step."""

    def __init__(self, at=None, stop_at=None):
        self.at, self.stop_at = at, stop_at
        self.heard, self.steps, self.records = [], [], []

    def on_step(self, step):
        self.heard.append(("step", step.step))
        self.steps.append(step)
        if step.step == self.at:
            raise RuntimeError("as the user wants it")
        if step.step == self.stop_at:
            self.stop = "the user has seen enough"

    def on_evaluation(self, evaluation):
        self.heard.append(("evaluation", evaluation.step, *sorted(evaluation.metrics)))

    def on_checkpoint(self, path):
        assert (path / MANIFEST).is_file()
        self.heard.append(("checkpoint", path.name))

    def on_record(self, record):
        self.records.append(record)

    def on_end(self, end):
        self.heard.append(("end", end.steps_done, end.error and type(end.error)))


def trainer(*callbacks, **changes):
    given = options(**{"grad_accumulation": 1, "steps": 10, **changes})
    given = {name.replace("-", "_"): value for name, value in given.items() if value is not None}
    return llmq.Trainer(callbacks=callbacks, **given)


def train(*callbacks, **changes):
    config = make_config(options(**{"grad_accumulation": 1, **changes}))
    model, model_dir = model_of_run(config)
    run_training(config.validate_with(model), model, model_dir, ["train"], callbacks=callbacks)


# ------------------------------------------------------------------------------------------------
# Trainer


def test_a_trainer_tells_what_the_script_does():
    notes = Notes()
    with trainer(notes) as t:
        losses = [t.step().loss]
        tickets = [t.enqueue_step() for _ in range(2)]
        assert notes.heard == [("step", 0)], "without a result there is nothing to tell"
        losses += [t.result(ticket).loss for ticket in tickets]
        t.result(tickets[-1])  # which is known by now
        t.validate(1)
        assert t.save() == Path("ckpt/step_00000003")
        ids = np.zeros((B, T), np.int32)
        losses.append(t.step([(ids, np.full_like(ids, VOCAB - 1))]).loss)
        rates = [t.learning_rate(step) for step in range(4)]
    assert notes.heard == [
        *[("step", step) for step in range(3)],
        ("evaluation", 3, "loss"),
        ("checkpoint", "step_00000003"),
        ("step", 3),
        ("end", 4, None),
    ]
    assert [step.result.loss for step in notes.steps] == losses
    assert [step.lr for step in notes.steps] == rates
    assert [step.number for step in notes.steps] == [0, 1, 2, 3]
    assert all(step.ms > 0 for step in notes.steps)
    epochs = [step.epoch for step in notes.steps]
    assert epochs[0] == (0, pytest.approx(B / 20, abs=0.03)) and epochs[-1] is None
    assert all(one < other for one, other in pairwise(epochs[:3]))


def test_an_error_is_the_end_for_all_callbacks():
    first, last = Notes(), Notes()
    with (
        pytest.raises(RuntimeError, match="as the user wants it"),
        trainer(first, Notes(at=1), last) as t,
    ):
        for _ in range(3):
            t.step()
    assert first.heard == [("step", 0), ("step", 1), ("end", 2, RuntimeError)]
    assert last.heard == [("step", 0), ("end", 2, RuntimeError)]
    t.close()
    assert len(first.heard) == 3, "the end comes once"


def test_an_error_in_the_end_keeps_no_other_from_it():
    class Failing(llmq.Callback):
        def on_end(self, end):
            raise RuntimeError("as the user wants it")

    notes = Notes()
    with pytest.raises(RuntimeError, match="as the user wants it"), trainer(Failing(), notes):
        pass
    assert notes.heard == [("end", 0, None)]


def test_a_callback_does_nothing_by_itself():
    with trainer(llmq.Callback()) as t:
        t.step()
    assert llmq.Callback().stop is None


# ------------------------------------------------------------------------------------------------
# llmq train


@pytest.mark.parametrize("background", [False, True])
def test_a_run_tells_what_it_logs(background):
    notes = Notes()
    more = {"eval_file": ["data/eval.bin", "more=data/eval.bin"], "eval_every_n_steps": 2}
    more |= {"ckpt_interval": 3, "save_training_state": True, "ckpt_background": background}
    train(notes, steps=4, **more)
    heard = [entry for entry in notes.heard if entry[0] != "checkpoint"]
    validation = [("evaluation", "loss"), ("evaluation", "more/loss")]
    assert heard == [
        ("step", 0),
        ("step", 1),
        *[(kind, 2, name) for kind, name in validation],
        ("step", 2),
        ("step", 3),
        *[(kind, 4, name) for kind, name in validation],
        ("end", 4, None),
    ]
    checkpoints = [entry[1] for entry in notes.heard if entry[0] == "checkpoint"]
    assert checkpoints == ["step_00000003", "step_00000004"]
    assert [s.result.loss for s in notes.steps] == [r["loss"] for r in records("step")]
    logged = json.loads(Path("log.json").read_text())
    told = [{**record, "time": 0} for record in notes.records]
    assert told == [{**record, "time": 0} for record in logged]


def test_a_callback_stops_a_run(capsys):
    notes = Notes(stop_at=2)
    train(notes, steps=9, save_training_state=True)
    assert notes.heard[-3:] == [
        ("checkpoint", "step_00000003"),
        ("evaluation", 3, "loss"),
        ("end", 3, None),
    ]
    line = "Stopped early: the user has seen enough, which ends the run after 3 steps\n"
    assert line in capsys.readouterr().out
    assert Path("out/model.safetensors").is_file()


def test_stages_of_lengths_are_one_run():
    notes = Notes()
    train(notes, steps=4, seq_len="8:0.5,16:0.5", eval_file="none")
    assert notes.heard == [
        ("step", 0),
        ("step", 1),
        ("checkpoint", "step_00000002"),
        ("step", 2),
        ("step", 3),
        ("end", 4, None),
    ]


def test_an_error_in_a_callback_ends_a_run():
    notes = Notes()
    with pytest.raises(RuntimeError, match="as the user wants it"):
        train(notes, Notes(at=1), steps=4, eval_file="none")
    assert notes.heard == [("step", 0), ("step", 1), ("end", 2, RuntimeError)]
    assert [r["step"] for r in records("step")] == [0, 1]
