"""The best checkpoint of a run (--keep-best), its export, and the early stop (--stop-after)."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import llmq
from llmq.base.run_id import RunId
from llmq.checkpoint.best import Best, EarlyStopping, Measurement, best_owner
from llmq.checkpoint.manifest import MANIFEST, digest_of
from llmq.commands.cli import _run
from llmq.options.options_io import make_config
from tests.runs import make_workplace, options, records, signal_after, train, write_tokens

RUN = {
    "batch_size": 1,
    "eval_every_n_steps": 1,
    "learning_rate": 0.03,  # the loss rises again
    "keep_best": "loss",
    "ckpt_interval": 1,
    "save_training_state": True,
    "steps": 8,
}
FALLS = {"eval_file": "data/train-0.bin", "learning_rate": 1e-2}
ON = {"continue": "", "overwrite": None}


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(make_workplace(tmp_path))
    write_tokens(Path("data/other.bin"), 5, seed=7)


def run(**changes):
    return train(**RUN | changes)


def note(folder="ckpt"):
    return json.loads(Path(folder, "best.json").read_text())


def validations(kind="eval"):
    return [(r["step"], r["loss"]) for r in records(kind)]


def messages(text):
    return [r["message"] for r in records("info") if text in r.get("message", "")]


def weights(folder):
    return load_file(next(Path(folder).glob("*model.safetensors")))


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_array_equal(value, other[name])


def exported(step, **more):
    """The weights that `llmq export` writes of the checkpoint of this step."""
    out = f"export-{step}"
    assert _run(["export", f"ckpt/step_{step:08d}", "--out", out, "--dtype=fp32"]) == 0
    return weights(out)


# ------------------------------------------------------------------------------------------------


def found(value, kind="9 items", *, final=False):
    return {"arc/acc": Measurement(value, kind, final)}


def test_the_first_of_equal_values_of_a_kind_is_the_best(tmp_path):
    mine, other = RunId.new("mine"), RunId.new("other")
    best = Best("arc/acc", tmp_path, ["arc/acc"], patience=2)
    stopping = EarlyStopping(best)
    checkpoint = tmp_path / "step_00000005"
    checkpoint.mkdir()
    (checkpoint / MANIFEST).write_text("{}")
    assert not best.take(4, {"loss": Measurement(1.0, "9 items")})
    assert not best.take(4, found(np.nan))
    assert best.take(5, found(0.5))
    assert best.known is None and best.state()["step"] == 5
    best.accept(mine)
    assert best_owner(tmp_path) == mine and best.stale == 0
    assert not best.take(5, found(0.5)) and best.stale == 0  # the same measurement once more
    assert not best.take(6, found(0.5)) and best.stale == 1
    assert not best.take(6, found(0.9, "all", final=True)) and best.begins_anew(found(0.9)) is None
    assert best.take(7, found(0.6)) and best.stale == 0
    best.drop()
    assert best.step == 5
    assert "is measured on 4 items now, and was on 9" in best.begins_anew(found(0.4, "4 items"))
    assert best.take(8, found(0.4, "4 items"))
    best.drop()
    assert not best.take(9, found(0.1)) and not stopping.stop
    assert not best.take(10, found(np.nan)) and stopping.stop
    loss = Best("loss", tmp_path, ["loss"])
    assert loss.take(1, {"loss": Measurement(2.0, "a")})
    loss.accept(mine)
    assert loss.take(2, {"loss": Measurement(1.9, "a")})
    assert not loss.take(3, {"loss": Measurement(2.1, "a")})
    assert not Best("arc/acc", tmp_path, ["arc/acc"]).take(3, {}) and not other.owns(mine)


def test_a_note_counts_for_its_run_its_metric_and_steps_that_are_done(tmp_path):
    run_id, other = RunId.new("mine"), RunId.new("other")
    checkpoint, note_path = tmp_path / "step_00000005", tmp_path / "best.json"
    document = {"version": 1, "run": {"step": 5, "state": {}, **run_id.record()}}
    document |= {"distributed": {"world": 1}, "files": [], "data-loader": {}, "model": {}}
    document["options"] = {}
    checkpoint.mkdir()
    document["sha256"] = digest_of(document)
    (checkpoint / MANIFEST).write_text(json.dumps(document))
    best = Best("arc/acc", tmp_path, ["arc/acc"])
    best.take(5, found(0.5))
    best.accept(run_id)
    written = note_path.read_text()
    for metric, owner, done, step in (
        ("arc/acc", run_id, 5, 5),
        ("arc/acc", other, 9, None),
        ("loss", run_id, 9, None),
        ("arc/acc", run_id, 4, None),  # its steps are made again
    ):
        again = Best(metric, tmp_path, [metric])
        again.resume(owner, done)
        assert again.step == step
        assert note_path.exists() == (metric == "loss" or done != 4)
    for text in (written.replace("0.5", "1e999"), written.replace('"step": 5', '"step": 1e999')):
        note_path.write_text(text)
        damaged = Best("arc/acc", tmp_path, ["arc/acc"])
        damaged.resume(run_id, 5)
        assert damaged.step is None and note_path.read_text() == text
    damaged.load(best.state())  # the record of a checkpoint is enough
    damaged.resume(run_id, 5)
    assert damaged.step == 5 and note_path.read_text() == written
    for state in (None, [], {"metric": 1}, best.state() | {"stale": None}):
        damaged.load(state)
        assert damaged.known is None and damaged.stale == 0


@pytest.mark.parametrize("background", [False, True])
def test_a_best_checkpoint_is_known_without_its_note(background, monkeypatch, capsys):
    """A kill comes between checkpoint and note."""
    more = {"ckpt_background": background, "ckpt_interval": 100, "ckpt_keep_n": 1}

    def killed(self, run):
        if self.proposed.step == 2:
            raise RuntimeError("killed")
        accept(self, run)

    accept = Best.accept
    with monkeypatch.context() as patch:
        patch.setattr(Best, "accept", killed)
        with pytest.raises(RuntimeError, match="killed"):
            run(**more, **FALLS)
    assert note()["step"] == 1 and Path("ckpt/step_00000002").is_dir()
    assert run(**more, **FALLS | ON | {"steps": 3, "learning_rate": 1e3}) == 0
    losses = dict(validations())
    assert losses[2] < losses[1] and losses[2] < losses[3]
    assert [step for step, _ in validations()].count(2) == 1
    assert (note()["step"], note()["value"]) == (2, losses[2])
    assert Path("ckpt/step_00000002").is_dir()
    assert messages("Exported: the best model, of step 2 of 3")


def test_a_best_that_is_made_again_is_forgotten():
    assert run(**FALLS, steps=3) == 0
    assert note()["step"] == 3
    again = {"continue": "1", "steps": 2, "learning_rate": 1e3}
    assert run(**FALLS | ON | again) == 0
    assert note()["step"] == 1 and Path("ckpt.old-1/step_00000003").is_dir()


def test_another_kind_of_validation_begins_anew(capsys):
    assert run(**FALLS, eval_num_steps=2, steps=4) == 0
    before = note()
    assert run(**FALLS | ON, eval_num_steps=3, steps=6) == 0
    assert note()["kind"] != before["kind"] and note()["step"] == 6
    (line,) = messages("is looked for anew")
    assert line.startswith("loss is measured on 48 tokens in sequences of 16 (data ")
    assert f"({before['value']:.6g} at step {before['step']} counts no more)" in line


def test_each_length_of_sequences_has_a_best(capsys):
    stages = {"seq_len": "8:0.5,16:0.5", "batch_size": 2, "steps": 8, "grad_accumulation": 1}
    assert run(**stages | FALLS) == 0
    assert "in sequences of 16 (" in note()["kind"] and note()["step"] >= 4
    assert len(messages("is looked for anew")) == 1


def test_the_last_model_is_measured_as_the_ones_before():
    """The validation of the end takes all sequences, which no other one does."""
    assert run(**FALLS, eval_num_steps=2, eval_every_n_steps=3) == 0
    tokens = [(r["step"], r["eval_tokens"]) for r in records("eval")]
    assert tokens == [(3, 32), (6, 32), (8, 32), (8, 144)]
    assert note()["step"] == 8
    assert messages("Exported: the best model, of step 8 of 8")
    assert run(keep_best=None, eval_num_steps=2, eval_every_n_steps=3) == 0
    assert [r["step"] for r in records("eval")] == [3, 6, 8]


# ------------------------------------------------------------------------------------------------
# --export


LORA = {"from_scratch": None, "lora_rank": 2, "model": "base", "learning_rate": 0.3}


@pytest.mark.parametrize(
    "more",
    [{"ema": 0.5}, {"gpus": 2, "zero_level": 3}, LORA],
    ids=["average", "ranks", "adapters"],
)
def test_the_exported_model_is_the_best(more):
    if "lora_rank" in more:
        assert train(steps=1, out_dir="base", checkpoint_dir="c0", log_file="l0.json") == 0
    assert run(**more, ckpt_keep_n=0) == 0
    best = note()["step"]
    losses = dict(validations()[:-1])
    assert 1 <= best < 8 and losses[best] == min(losses.values())
    assert_equal(weights("out"), exported(best))
    assert messages(f"Exported: the best model, of step {best} of 8; best: loss ")
    assert run(**more, **ON, export="last") == 0
    assert_equal(weights("out"), exported(8))
    assert messages("Exported: the last model, of step 8 of 8; best: loss ")
    evaluated = {**options(model="base" if "lora_rank" in more else "model"), "steps": 1}
    given = {n.replace("-", "_"): v for n, v in evaluated.items() if v is not None}
    given |= {n: v for n, v in more.items() if n not in ("model", "from_scratch")}
    given["from_scratch"] = "lora_rank" not in more
    given["batch_size"] = 1
    with llmq.Trainer(**given) as t:  # of this run's model
        t.export("script", checkpoint=f"ckpt/step_{best:08d}")
    assert_equal(weights("script"), weights(f"export-{best}"))


EXPORT = ["export", "--checkpoint-dir", "ckpt", "--dtype=fp32", "--overwrite", "--out"]


@pytest.mark.parametrize("lost", ["nothing", "note", "record"])
def test_a_directory_of_checkpoints_is_exported_as_its_run_does(capsys, lost):
    assert run() == 0
    best = note()["step"]
    assert best < 8
    if lost == "note":
        Path("ckpt/best.json").unlink()
    if lost == "record":
        manifest = Path("ckpt/step_00000008", MANIFEST)
        document = json.loads(manifest.read_text())
        del document["run"]["state"]["history"]["best"]
        manifest.write_text(json.dumps(document | {"sha256": digest_of(document)}))
    capsys.readouterr()
    assert _run([*EXPORT, "whole"]) == 0
    line = f"Taking the best checkpoint, 'ckpt/step_{best:08d}' ("
    assert capsys.readouterr().err.startswith(line)
    assert_equal(weights("whole"), exported(best))
    assert "Taking" not in capsys.readouterr().err  # of a checkpoint that is named


def test_a_damaged_best_checkpoint_is_not_replaced_by_another(capsys):
    assert run() == 0
    next(Path(f"ckpt/step_{note()['step']:08d}").glob("*.safetensors")).unlink()
    assert _run([*EXPORT, "whole"]) == 2
    err = capsys.readouterr().err
    assert "error: the best checkpoint of 'ckpt' is damaged: " in err
    assert err.endswith("the newest that can be exported is 'ckpt/step_00000008'\n")


def test_a_best_checkpoint_that_is_damaged_costs_no_model(capsys):
    assert run(ckpt_keep_n=0) == 0
    before = weights("out")
    path = next(Path(f"ckpt/step_{note()['step']:08d}").glob("weights*"))
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    capsys.readouterr()
    assert run(**ON) == 2
    err = capsys.readouterr().err
    assert "error: --export best: checkpoint file" in err and "--export last" in err
    assert_equal(weights("out"), before)
    assert run(**ON, export="last") == 0
    assert_equal(weights("out"), exported(8))


def test_a_spoiled_last_model_costs_not_the_best(capsys):
    assert run(learning_rate=1e30, guard="off", steps=3, grad_clip=0, eval_at_start="") == 0
    assert np.isfinite(note()["value"]) and note()["step"] < 3
    (line,) = messages("spoiled")
    assert line.startswith("WARNING: the ") and line.endswith(" the model of step 3 is spoiled")


# ------------------------------------------------------------------------------------------------
# --stop-after and --eval-at-start


def stopped_at():
    return max(r["step"] for r in records("step")) + 1


STOP = {"stop_after": 2, "keep_best": None, "steps": 40}


def test_a_run_stops_early_and_is_complete(capsys):
    assert run(**STOP) == 0
    step, best = stopped_at(), note()["step"]
    assert step == best + 2 < 40
    (line,) = messages("Stopped early: ")
    assert line == (
        f"Stopped early: loss has not been better than {note()['value']:.6g} of step {best} in the "
        f"last 2 measurements (--stop-after 2), which ends the run after {step} steps"
    )
    assert_equal(weights("out"), exported(best))
    assert Path(f"ckpt/step_{step:08d}").is_dir()
    assert "Done. validation loss" in capsys.readouterr().out
    assert [at for at, _ in validations()] == [*range(1, step + 1)]  # no step has two
    assert run(**STOP | ON) == 0  # and makes no further step
    assert stopped_at() == step and len(messages("Stopped early before: ")) == 1
    assert run(**STOP | ON | {"stop_after": 0, "steps": step + 2}) == 0
    went_on = [r["loss"] for r in records("step")]
    assert stopped_at() == step + 2
    assert run(steps=step + 2) == 0
    assert [r["loss"] for r in records("step")] == went_on


@pytest.mark.parametrize("background", [False, True])
def test_a_continued_run_counts_on(monkeypatch, background):
    assert run(**STOP, ckpt_background=background) == 0
    step, losses = stopped_at(), validations()
    with monkeypatch.context() as patch:
        signal_after(patch, step - 1)
        assert run(**STOP, ckpt_background=background) == 128 + signal.SIGINT
    assert run(**STOP | ON) == 0
    assert (stopped_at(), validations()) == (step, losses)


def test_stages_that_follow_an_early_stop_are_left_out():
    stages = {"seq_len": "8:0.5,16:0.5", "batch_size": 2, "grad_accumulation": 1}
    assert run(**STOP | stages) == 0
    step = stopped_at()
    assert step < 20 and len(messages("Stopped early: ")) == 1
    assert Path("out/config.json").is_file()
    assert run(**STOP | stages | ON) == 0
    assert stopped_at() == step


def test_a_task_stops_a_run():
    Path("words.txt").write_text("Some words that are longer than a sequence of the run.")
    more = {"eval_task": "text=words.txt", "task_every": 1, "keep_best": "text/bits_per_byte"}
    assert run(**STOP | more) == 0
    values = {r["step"]: r["value"] for r in records("task") if r["metric"] == "bits_per_byte"}
    assert note()["value"] == min(values.values()) and stopped_at() == note()["step"] + 2


def test_an_evaluation_at_the_start_is_the_first_value(capsys):
    Path("words.txt").write_text("Some words that are longer than a sequence of the run.")
    more = {"eval_at_start": "", "eval_task": "text=words.txt", "learning_rate": 1e3, "steps": 2}
    assert run(**more) == 0
    assert [step for step, _ in validations()] == [0, 1, 2]
    assert {r["step"] for r in records("task")} == {0, 2}
    assert note()["step"] == 0 and validations()[0][1] == note()["value"]
    assert_equal(weights("out"), exported(0))
    assert run(**more | {"continue": "0", "overwrite": None}) == 0  # it is not repeated
    assert [r["step"] for r in records("eval")].count(0) == 1
    assert note()["step"] == 0


@pytest.mark.parametrize("more", [{}, {"gpus": 2, "zero_level": 3}])
def test_an_evaluation_at_the_start_changes_no_bit(more):
    more |= {"model_dtype": "bf16", "matmul_dtype": "e4m3", "fp8_recipe": "delayed", "steps": 3}
    found = []
    for start in ({}, {"eval_at_start": ""}):
        assert train(**more, **start) == 0
        found.append([(r["loss"], r["norm"]) for r in records("step")])
    assert found[0] == found[1]
    step, loss = validations()[0]
    assert step == 0 and np.isfinite(loss)


# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"keep_best": None, "export": "best"}, "--export: best is known with --keep-best METRIC"),
        (
            {"keep_best": None, "stop_after": 1, "eval_file": "x=data/other.bin"},
            "--keep-best: the run measures no 'loss', as --stop-after needs; there are x/loss",
        ),
    ],
)
def test_what_is_refused(changes, message, capsys):
    assert run(**changes) == 2
    assert f"error: {message}" in capsys.readouterr().err
    assert not Path("out").exists()


def test_options_imply_each_other():
    assert make_config({"stop-after": 3}).keep_best == "loss"
    assert make_config({"keep-best": "loss"}).export == "best"
    assert make_config({}).export == "last"
    assert make_config({"keep-best": "loss", "export": "last"}).export == "last"
