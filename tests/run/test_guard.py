"""Divergence: which steps are bad, and that no good state is lost to them."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

from llmq.base.dtypes import NO_LIMITS, Limits
from llmq.base.result import Result
from llmq.checkpoint.states import PROVEN, read_verdict
from llmq.commands.cli import _run
from llmq.options.options_io import make_config
from llmq.run.guard import LAG, LEAST, NEW_LEVEL, ROLLBACKS, WINDOW, Guard
from llmq.run.health import HealthMonitor
from llmq.run.loop import Loop
from llmq.run.trainer import Trainer
from tests.runs import before_step, make_workplace, records, signal_after, train


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(make_workplace(tmp_path))


def guard(mode="warn"):
    return Guard(make_config({"guard": mode}), guessing=9.0)


def result(loss=3.0, norm=1.0, tokens=8):
    return Result(loss=loss, tokens=tokens, norm=norm)


def healthy(seed=0):
    rng = np.random.default_rng(seed)
    while True:
        yield result(3 + 0.1 * rng.normal(), math.exp(0.3 * rng.normal()))


def judged(of, results, start=0):
    """Reasons, or None, of results that come one by one."""
    return [
        of.judge(step, each, of.limits(step)).reason for step, each in enumerate(results, start)
    ]


# ------------------------------------------------------------------------------------------------
# What is bad


def test_a_spike_is_found_from_step_20_on():
    for name, spike in (("loss", result(loss=6.0)), ("gradient norm", result(norm=12.0))):
        of, steps = guard(), healthy()
        assert judged(of, [next(steps) for _ in range(20)]) == [None] * 20
        (reason,) = judged(of, [spike], 20)
        assert reason.startswith(f"the {name} ") and "deviations above its median" in reason


def test_the_first_steps_are_judged_by_absolute_signs(capsys):
    """Above three times the loss of guessing, or ten times the lowest; they are made, and the end
    says so, too."""
    assert train(learning_rate=100, steps=3) == 0
    out = capsys.readouterr().out
    assert re.search(
        r"^WARNING: step 1 is bad: the loss \S+ is \S+ times that of guessing", out, re.M
    )
    assert "WARNING: the last 2 steps were bad, up to step 2: the model is hardly what" in out
    assert [r["action"] for r in records("guard")] == ["warn", "warn"]

    losses = (0.5, 0.3, 2.9, 3.1, 3.4, 0.05, 0.9)
    reasons = judged(guard(), [result(loss=loss) for loss in losses])
    assert [reason is not None for reason in reasons] == [loss > 3 for loss in losses]
    assert reasons[3] == "the loss 3.1 is 10.3 times the lowest, 0.3"
    assert judged(guard("off"), [result(loss=loss) for loss in losses]) == [None] * len(losses)
    anything = Guard(make_config({"guard": "warn"}))  # of samples, whose losses are about 0
    assert judged(anything, [result(loss=loss) for loss in losses]) == [None] * len(losses)
    # A model that begins so is not changed by a return to the beginning.
    of = Guard(make_config({"guard": "rollback"}), guessing=1.0)
    assert None not in judged(of, [result(loss=4.0)] * 9) and of.trouble is None


def test_few_steps_say_nothing():
    of, steps = guard(), healthy()
    assert judged(of, [next(steps) for _ in range(LEAST)]) == [None] * LEAST
    assert of.limits(LEAST) == NO_LIMITS
    assert of.limits(LEAST + LAG - 1) != NO_LIMITS


def test_healthy_runs_are_left_alone():
    """Falling losses, and norms whose logarithm is normal, over 6,000 steps."""
    rng = np.random.default_rng(1)
    steps = np.arange(6_000)
    losses = 2 + 8 * np.exp(-steps / 300) + 0.05 * rng.normal(size=steps.size)
    norms = np.exp(0.35 * rng.normal(size=steps.size)) * (1 + 5 * np.exp(-steps / 100))
    reasons = judged(guard(), map(result, losses.tolist(), norms.tolist()))
    assert sum(reason is not None for reason in reasons) <= 2


def test_bad_steps_poison_nothing():
    """Infinities and spikes do not move the usual level, and the score has no ceiling."""
    of, steps = guard(), healthy()
    judged(of, [next(steps) for _ in range(60)])
    before = of.limits(63)
    spikes = [result(math.nan), result(math.inf), result(1e30), result(norm=math.nan)] * 5
    assert None not in judged(of, spikes, 60)
    after = [next(steps) for _ in range(WINDOW)]
    assert judged(of, after, 80) == [None] * WINDOW
    assert before.loss == pytest.approx(of.limits(80 + WINDOW).loss, rel=0.2)  # other samples
    (reason,) = judged(of, [result(1e30)], 80 + WINDOW)
    assert float(reason.split(" is ")[1].split()[0]) > 1e30


def test_steps_without_targets_are_neither():
    of = guard()
    assert judged(of, [result(math.nan, 0.0, 0)] * 50) == [None] * 50
    assert of.in_row == 0 and of.limits(60) == NO_LIMITS


def test_limits_do_not_depend_on_when_results_are_read():
    """The newest result that is read early does not count, also over a checkpoint."""
    steps = [next(each) for each in [healthy(3)] for _ in range(300)]
    early, late = guard(), guard()
    for step in range(300):
        if step >= LAG:
            known = late.limits(step - LAG)  # of which the result is read now
            late.judge(step - LAG, steps[step - LAG], known)
        assert early.limits(step) == late.limits(step)
        early.judge(step, steps[step], early.limits(step))
        if step % 37 == 0:
            copy = guard()
            copy.load(json.loads(json.dumps(early.state)))
            assert copy.state == early.state
            early = copy


def test_limits_are_numbers_of_f32():
    of, steps = guard(), healthy()
    judged(of, [next(steps) for _ in range(40)])
    assert all(float(np.float32(limit)) == limit > 0 for limit in of.limits(42))
    assert guard("off").limits(42) == NO_LIMITS


def test_a_level_that_lasts_is_the_usual_one():
    of, steps = guard(), healthy()
    judged(of, [next(steps) for _ in range(40)])
    for step in range(40, 40 + NEW_LEVEL):
        assert not of.accepts_new_level()
        assert of.judge(step, result(5.0 + step % 3), of.limits(step)).bad
    assert of.accepts_new_level() and of.level == 1 and of.in_row == 0
    assert judged(of, [result(5.0 + step % 3) for step in range(60)], 140) == [None] * 60


def test_the_learning_rate_rises_again():
    of = guard("rollback")
    assert of.rate_factor(7) == 1
    of.went_back(to=50, steps_done=80)
    assert [of.rate_factor(step) for step in (49, 50, 100, 150)] == [1, 0.1, 0.55, 1]


# ------------------------------------------------------------------------------------------------
# Runs


def verdicts():
    """Verdicts of checkpoints by step: True, False, or None."""
    found = {int(path.name[5:]): read_verdict(path) for path in Path("ckpt").glob("step_*")}
    return {step: verdict and verdict.good for step, verdict in sorted(found.items())}


def exploding(monkeypatch, *steps, factor=3000.0, data=None):
    """Multiply the learning rate of these steps; data: only with the batch of this place."""
    real = Trainer.enqueue_step

    def enqueue_step(self, *args, lr, **more):
        if self.steps_done in steps and data in (None, place_of(self)):
            lr *= factor
        return real(self, *args, lr=lr, **more)

    monkeypatch.setattr(Trainer, "enqueue_step", enqueue_step)


def place_of(trainer):
    """The place of the next batch."""
    state = trainer.train_loader.state()
    return state["epoch"], state["file_index"], state["chunk_index"]


SHORT = {"eval_file": "none", "batch_size": 1, "grad_accumulation": 1, "learning_rate": 3e-3}


def test_nans_leave_a_checkpoint_to_go_on_from(capsys):
    """Ten good steps, of which one checkpoint is kept, then nothing but infinities."""
    options = SHORT | {"ckpt_interval": 1, "ckpt_keep_n": 1, "save_training_state": True}
    assert train(**options, steps=10) == 0
    more = {"steps": 30, "learning_rate": 1e9, "continue": ""}
    assert train(**options | more) == 2
    assert "10 steps in a row changed no weights" in capsys.readouterr().err
    assert verdicts()[10] is False and max(verdicts()) == 11
    assert read_verdict(Path("ckpt/step_00000010")).steps == 1
    assert train(**options, steps=14, **{"continue": ""}) == 0
    out, err = capsys.readouterr()
    assert "warning: --continue: passed over checkpoint 'ckpt/step_00000011': step 11 was " in err
    assert "all checkpoints are known to be bad: taking 'ckpt/step_00000010', the newest af" in err
    assert "Loading checkpoint 10 from" in out
    assert all(math.isfinite(r["loss"]) for r in records("step")[-4:])


def test_nans_at_the_end_do_not_reach_the_model(capsys):
    options = SHORT | {"save_training_state": True}
    assert train(**options, steps=5) == 0
    before = Path("out/model.safetensors").read_bytes()
    more = {"steps": 9, "learning_rate": 1e30, "continue": ""}
    assert train(**options | more) == 2
    err = capsys.readouterr().err
    assert "error: no model is written, because the gradient norm is nan: 'out' stays" in err
    assert Path("out/model.safetensors").read_bytes() == before
    assert verdicts() == {5: False}
    assert train(**options | more, force="") == 0
    assert "; the model is written (--force)" in capsys.readouterr().out
    assert Path("out/model.safetensors").read_bytes() != before


@pytest.mark.parametrize("steps", [30, 8])
def test_a_run_that_is_stopped_among_nans_ends_as_the_whole_one(steps, monkeypatch, capsys):
    """After ten steps without an update, or with no model because of the last one."""
    options = SHORT | {"save_training_state": True, "guard": "off"}
    assert train(**options, steps=5) == 0
    shutil.copytree("ckpt", "before")
    more = {"steps": steps, "learning_rate": 1e30, "continue": ""}
    assert train(**options | more) == 2
    whole = capsys.readouterr().err.splitlines()[-1]
    shutil.rmtree("ckpt")
    os.rename("before", "ckpt")
    with monkeypatch.context() as patch:
        signal_after(patch, 7)
        assert train(**options | more, log_file="log2.json") == 128 + signal.SIGINT
    capsys.readouterr()
    assert train(**options | more, log_file="log2.json") == 2
    assert capsys.readouterr().err.splitlines()[-1] == whole


def test_a_validation_that_is_not_finite_keeps_the_model(monkeypatch, capsys):
    from llmq.run import evaluations

    monkeypatch.setattr(evaluations.Evaluations, "_timed", spoiled(evaluations.Evaluations._timed))
    last = {"ckpt_interval": 1, "save_training_state": True, "eval_every_n_steps": 0}
    assert train(steps=2, **last) == 2
    assert "no model is written, because the validation loss is nan" in capsys.readouterr().err
    assert not Path("out").exists()
    assert verdicts() == {1: None, 2: False}, "--continue takes the one before"
    assert read_verdict(Path("ckpt/step_00000002")).level == -1


def spoiled(real):
    def timed(self, *args):
        found = real(self, *args)
        self.not_finite = "the validation loss is nan"
        return found

    return timed


def test_weights_that_are_not_finite_are_not_exported(tmp_path, capsys):
    from tests.runs import options

    given = options(steps=1) | {"eval-file": "none"}
    del given["overwrite"]
    with Trainer(**{name.replace("-", "_"): value for name, value in given.items()}) as trainer:
        read = trainer.ranks.read_param
        trainer.ranks.read_param = lambda *of, **how: read(*of, **how) * np.float32(np.inf)
        with pytest.raises(Exception, match=r"holds NaN or infinity: no model is written"):
            trainer.export("model2")
        assert not Path("model2").exists()
    assert train(steps=1, save_training_state=True) == 0


def test_a_spike_does_not_push_out_the_good_checkpoint(monkeypatch, capsys):
    """Steps go on, but no checkpoint of theirs takes the place of the good one."""
    exploding(monkeypatch, 31)
    options = SHORT | {"ckpt_interval": 2, "ckpt_keep_n": 1, "save_training_state": True}
    assert train(**options, steps=50) == 0
    out = capsys.readouterr().out
    assert "WARNING: step 32 is bad: the " in out
    assert "WARNING: the last 18 steps were bad" in out
    kept = verdicts()
    (good,) = (step for step, verdict in kept.items() if verdict)
    assert good <= 31 - PROVEN + 1 and kept[50] is False
    assert [r["action"] for r in records("guard")] == ["warn"] * 18
    assert train(**options, steps=51, **{"continue": ""}) == 0
    out, err = capsys.readouterr()
    assert f"Loading checkpoint {good} from" in out
    assert "passed over checkpoint 'ckpt/step_00000050': the last 18 steps were bad" in err


def test_skipping_leaves_single_steps_out(monkeypatch):
    """A skipped step leaves weights and moments as before; the run ends as without its batch."""
    exploding(monkeypatch, 30, factor=1.0)
    assert train(**SHORT, steps=40, guard="skip") == 0
    assert records("guard") == []
    losses = [r["loss"] for r in records("step")]
    real = Guard.limits
    monkeypatch.setattr(
        Guard, "limits", lambda self, s: Limits(1e-6, 0.0) if s == 30 else real(self, s)
    )
    assert train(**SHORT, steps=40, guard="skip", log_file="skip.json") == 0
    (record,) = [r for r in records("guard", "skip.json") if r["action"] != "good"]
    assert (record["action"], record["step"], record["limit_norm"]) == ("skip", 30, 1e-6)
    skipped = [r["loss"] for r in records("step", "skip.json")]
    assert skipped[:31] == losses[:31] and skipped[31] != losses[31]


def test_skipping_for_ever_is_refused(monkeypatch, capsys):
    exploding(monkeypatch, 30)
    assert train(**SHORT, steps=60, guard="skip", ckpt_interval=5) == 2
    err = capsys.readouterr().err
    assert "10 steps in a row changed no weights, the last one is 40: the loss " in err
    assert "use --guard rollback" in err


ROLLBACK = SHORT | {
    "guard": "rollback", "ckpt_interval": 10, "ckpt_keep_n": 1,
    "save_training_state": True, "steps": 52,
}  # fmt: skip


def rates():
    return [r["lr"] for r in records("step")]


def losses(log="log.json"):
    return [(r["step"], r["loss"], r["norm"], r["lr"]) for r in records("step", log)]


def test_rollback_goes_back_and_past_the_data(monkeypatch, capsys):
    """The batch of step 35 is what does it; the run ends where a run without it would."""
    monkeypatch.setattr("llmq.run.guard.RECOVERY", 8)
    where = {}
    real = Trainer.enqueue_step

    def note(self, *args, **more):
        where.setdefault(self.steps_done, place_of(self))
        return real(self, *args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "enqueue_step", note)
        assert train(**ROLLBACK, log_file="without.json") == 0
    exploding(monkeypatch, *range(52), data=where[35])
    shutil.rmtree("ckpt")
    assert train(**ROLLBACK | {"guard": "warn"}, log_file="warn.json") == 0
    shutil.rmtree("ckpt")
    assert train(**ROLLBACK) == 0
    (record,) = [r for r in records("guard") if r["action"] == "rollback"]
    assert (record["back_to"], record["steps_done"], record["step"]) == (10, 40, 38)
    assert "back from step 40 to 10, checkpoint 'ckpt/step_00000010'" in record["message"]
    steps = [step for step, *_ in losses()]
    assert steps == [*range(40), *range(10, 52)]
    lowered = rates()[40:49]
    assert lowered == sorted(lowered) and lowered[0] == pytest.approx(0.1 * lowered[8])
    plain, warned, back = (losses(log)[-1][1] for log in ("without.json", "warn.json", "log.json"))
    assert warned > 2 * plain
    assert abs(back - plain) < 0.2 * plain  # other data, in another order

    # With results that are read one step late, as on a GPU, and stopped and continued anywhere, it
    # is the same run.
    whole = losses()
    for stop in (39, 45):
        shutil.rmtree("ckpt")
        with monkeypatch.context() as patch:
            read_late(patch)
            stop_at_call(patch, iter(range(1000)), stop)
            assert train(**ROLLBACK, log_file="again.json") == 130
        assert train(**ROLLBACK, log_file="again.json", **{"continue": ""}) == 0
        assert losses("again.json")[-37:] == whole[-37:], stop


def read_late(patch):
    """Have results read when the next step has been enqueued, or something else comes."""
    step, collect = Loop.step, Loop.collect

    def late_step(self):
        self.collected = 0
        step(self)
        self.collected = None

    def late_collect(self):
        if getattr(self, "collected", None) is None:
            return collect(self)
        self.collected += 1
        return collect(self) if self.collected == 1 else None

    patch.setattr(Loop, "step", late_step)
    patch.setattr(Loop, "collect", late_collect)


def stop_at_call(patch, count, number):
    """Send the signal while the number-th step of the process runs."""
    before_step(patch, lambda loop: next(count) == number and os.kill(os.getpid(), signal.SIGINT))


def test_rollback_gives_up_in_the_same_place(monkeypatch, capsys):
    exploding(monkeypatch, 35)
    assert train(**ROLLBACK) == 2
    err = capsys.readouterr().err
    assert f"and {ROLLBACKS} returns to step 10 have not helped" in err
    back = [r for r in records("guard") if r["action"] == "rollback"]
    assert [r["back_to"] for r in back] == [10] * ROLLBACKS
    assert verdicts()[10] is True


def test_rollback_to_the_beginning(monkeypatch):
    """Before there is a good checkpoint, also with infinities; the weights are the first ones."""
    exploding(monkeypatch, 3, factor=1e12, data=(0, 0, 3))
    assert train(**ROLLBACK | {"steps": 20}) == 0
    (record,) = [r for r in records("guard") if r["action"] == "rollback"]
    assert record["back_to"] == 0 and "the beginning" in record["message"]
    steps = records("step")
    assert [r["step"] for r in steps] == [*range(8), *range(20)]
    assert all(r["loss"] is not None for r in steps[8:])


STAGES = ROLLBACK | {"batch_size": 2, "seq_len": "8:0.5,16:0.5", "steps": 60, "ckpt_interval": 7}


@pytest.mark.parametrize("spike, to", [(33, 30), (56, 35)])
def test_rollback_stays_within_a_length_of_sequences(monkeypatch, spike, to):
    """Step 30, at which the second length begins, is no multiple of --ckpt-interval."""
    lengths = []
    real = Trainer.enqueue_step

    def enqueue_step(self, *args, **more):
        lengths.append((self.steps_done, self.config.seq_len))
        return real(self, *args, **more)

    monkeypatch.setattr(Trainer, "enqueue_step", enqueue_step)
    exploding(monkeypatch, spike, factor=1e4)
    assert train(**STAGES) == 2  # the step explodes each time
    back = [r["back_to"] for r in records("guard") if r["action"] == "rollback"]
    assert back == [to] * ROLLBACKS
    assert {(step, 8 if step < 30 else 16) for step, _ in lengths} == set(lengths)
    assert max(step for step, _ in lengths) < 60


def test_rollback_without_a_checkpoint_of_the_stage_is_refused(monkeypatch, capsys):
    real = HealthMonitor.roll_back

    def roll_back(self):
        shutil.rmtree("ckpt/step_00000030")
        real(self)

    monkeypatch.setattr(HealthMonitor, "roll_back", roll_back)
    exploding(monkeypatch, 33, factor=1e4)
    assert train(**STAGES | {"ckpt_keep_n": 3}) == 2
    err = capsys.readouterr().err
    assert "no good checkpoint is left of the stage with this --seq-len, from step 30 on" in err


def test_rollback_needs_checkpoints(capsys):
    assert train(steps=1, guard="rollback", ckpt_interval=0) == 2
    assert capsys.readouterr().err == (
        "error: --guard: rollback needs --ckpt-interval above 0, to have checkpoints to go back "
        "to\n"
    )


@pytest.mark.parametrize("mode", ["skip", "rollback"])
def test_ranks_decide_alike(mode, monkeypatch):
    """Two ranks with one micro-step each take the steps of one rank with two."""
    exploding(monkeypatch, 25, factor=1e4)
    shared = ROLLBACK | {"guard": mode, "steps": 30, "ckpt_interval": 5}
    for gpus in (1, 2):
        shutil.rmtree("ckpt", ignore_errors=True)
        more = {"gpus": gpus, "grad_accumulation": 2 // gpus, "log_file": f"{gpus}.json"}
        train(**shared | more)
    decided = [
        [(r["step"], r["action"]) for r in records("guard", f"{gpus}.json")] for gpus in (1, 2)
    ]
    assert decided[0] == decided[1] and mode in {action for _, action in decided[0]}


# ------------------------------------------------------------------------------------------------
# Which checkpoint


def test_a_damaged_checkpoint_is_passed_over_and_not_counted(capsys):
    options = SHORT | {"ckpt_interval": 2, "ckpt_keep_n": 2}
    assert train(**options, steps=7) == 0
    assert list(verdicts()) == [2, 4, 6]
    damaged = Path("ckpt/step_00000006/weights.shard_000_of_001.safetensors")
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    capsys.readouterr()
    assert train(**options, steps=7, **{"continue": ""}) == 0
    out, err = capsys.readouterr()
    assert "warning: --continue: passed over checkpoint 'ckpt/step_00000006': " in err
    assert "is damaged: wrong checksum" in err and "Loading checkpoint 4 from" in out
    damaged.write_bytes(content[:-5])  # of a wrong size: seen without reading it
    assert _run(["export", "--checkpoint-dir=ckpt/step_00000006", "--out-dir=x"]) == 2
    for path in Path("ckpt").glob("step_*/weights*"):
        path.write_bytes(b"")
    capsys.readouterr()
    assert train(**options, steps=7, **{"continue": ""}) == 2
    err = capsys.readouterr().err
    assert "error: none of the 3 checkpoints is whole; the newest: checkpoint file" in err


def test_a_single_bad_step_is_forgiven_after_20_good_ones(monkeypatch):
    real = Guard.limits
    monkeypatch.setattr(
        Guard, "limits", lambda self, s: Limits(1e-6, 0.0) if s == 18 else real(self, s)
    )
    options = SHORT | {"ckpt_interval": 10, "save_training_state": True, "ckpt_keep_n": 0}
    assert train(**options, steps=25) == 0
    assert verdicts() == {10: False, 20: None, 25: None}
    assert train(**options, steps=39, **{"continue": ""}) == 0
    assert verdicts() == {10: True, 20: None, 25: None, 30: None, 39: None}
