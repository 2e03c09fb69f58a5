"""--continue alone: options, log and identity of the run that goes on."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from llmq.base.errors import DataError
from llmq.commands.cli import _run
from llmq.options.options import OPTIONS
from llmq.report.json_log import without_undone
from llmq.run.run_paths import find_log
from tests.run.test_places import run_of_checkpoint, run_of_export
from tests.runs import make_workplace, options, records, signal_after, train

# The run is known by its name alone.
PLACES = {"log_file": None, "out_dir": None, "checkpoint_dir": None, "overwrite": None}
OWN = PLACES | {"name": "x", "steps": 4, "learning_rate": 3e-3, "recompute_ffn": "", "seed": 7}
OWN |= {"save_training_state": True}


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(make_workplace(tmp_path))


def resume(*args):
    return _run(["train", *args])


def log_of(name="x"):
    (path,) = Path("logs").glob(f"{name}-*.json")
    return path


def saved(path):
    return json.loads((Path(path) / "checkpoint.json").read_text())["options"]


def stopped(monkeypatch, step=1, **changes):
    """A run that is stopped after this step, before its last one."""
    with monkeypatch.context() as patch:
        signal_after(patch, step)
        assert train(**OWN | changes) == 130


def test_continue_and_a_name_are_enough(monkeypatch, capsys):
    assert train(**OWN | {"name": "whole"}) == 0
    stopped(monkeypatch)
    capsys.readouterr()
    assert resume("--continue", "--name=x") == 0
    out, err = capsys.readouterr()
    assert err == "" and "in the checkpoint's run it was" not in out
    whole, again = (saved(f"ckpt/{name}/step_00000004") for name in ("whole", "x"))
    own = {"name", "out_dir", "checkpoint_dir", "log_file", "continue_from"}
    assert {n for n in whole if whole[n] != again[n]} == own
    losses, whole = ([r["loss"] for r in records("step", log_of(n))] for n in ("x", "whole"))
    assert losses == whole and len(losses) == 4
    starts = records("cmd", log_of())
    assert [r["resumed_at"] for r in starts] == [0, 2]
    assert {r["run"]["id"] for r in starts} == {run_of_export("output/x")}


@pytest.mark.parametrize(("before", "after"), [(2, 2), (3, 1), (1, 2)])
def test_a_run_goes_on_from_the_end_of_an_epoch_on_any_ranks(before, after):
    """The last sequences of the epoch, of nine, fill no group of ranks."""
    how = OWN | {"train_file": "data/train-0.bin", "grad_accumulation": 1, "steps": None}
    first = {"gpus": before, "batch_size": 6 // before}
    assert train(**how | {"name": "whole", "epochs": 2, **first}) == 0
    assert train(**how | {"epochs": 1, **first}) == 0
    on = {"continue": "", "epochs": 2, "gpus": after, "batch_size": 6 // after}
    assert train(**how | on | {"overwrite": None}) == 0
    whole, again = ([r["loss"] for r in records("step", log_of(n))] for n in ("whole", "x"))
    assert again == pytest.approx(whole, rel=1e-6) and len(whole) == 4


OLD = {"final_lr_fraction": 1, "cooldown": 0}  # what versions before had beside a schedule


@pytest.mark.parametrize(
    ("began", "again", "constant"),
    [
        ({"lr_schedule": "cosine"}, [], False),
        ({"lr_schedule": "cosine", "final_lr_fraction": 0.2}, ["--lr-schedule=cosine"], False),
        (OLD | {"lr_schedule": "cosine"}, [], False),
        (OLD | {"lr_schedule": "cosine"}, ["--lr-schedule=cosine"], True),
        (OLD | {"lr_schedule": "linear"}, ["--lr-schedule=LINEAR"], True),
        (OLD | {"lr_schedule": "wsd"}, ["--lr-schedule=wsd"], True),
    ],
)
def test_a_run_goes_on_with_the_rates_that_it_began_with(
    monkeypatch, capsys, began, again, constant
):
    assert train(**OWN | {"name": "whole", "log_file": "whole.json"} | began) == 0
    stopped(monkeypatch, **began)
    capsys.readouterr()
    assert resume("--continue", "--name=x", *again) == 0
    out, err = capsys.readouterr()
    assert ("the checkpoint's run has a constant rate, which stays" in err) == constant
    assert "in the checkpoint's run it was" not in out + err
    rates, whole = ([r["lr"] for r in records("step", log)] for log in (log_of(), "whole.json"))
    assert rates == whole and len(rates) == 4


def test_another_schedule_falls_from_where_the_run_goes_on(monkeypatch):
    stopped(monkeypatch)
    assert resume("--continue", "--name=x", "--lr-schedule=linear") == 0
    rates = [r["lr"] for r in records("step", log_of())]
    assert rates == pytest.approx([3e-3, 3e-3, 1e-3, 0])


def test_a_directory_or_a_path_is_enough(monkeypatch):
    stopped(monkeypatch)
    shutil.copytree("ckpt/x", "elsewhere")
    assert resume("--continue", "--checkpoint-dir=elsewhere") == 0
    assert sorted(os.listdir("elsewhere")) == ["step_00000002", "step_00000004"]
    assert resume("--continue=ckpt/x/step_00000002", "--steps=3") == 0
    assert sorted(os.listdir("ckpt/x")) == ["step_00000002", "step_00000003"]
    assert [r["step"] for r in records("step", log_of())] == [0, 1, 2, 3, 2]


def test_every_change_is_printed_with_both_values(monkeypatch, capsys):
    stopped(monkeypatch)
    capsys.readouterr()
    changes = ["--steps=3", "--no-recompute-ffn", "--lr=0.001", "--ckpt-keep-n=1"]
    assert resume("--continue", "--name=x", *changes) == 0
    out, err = capsys.readouterr()
    was = ", in the checkpoint's run it was"
    lines = out.splitlines()
    for line in (
        f"--steps is 3{was} 4",
        f"--recompute-ffn is off{was} on",
        f"--recompute-swiglu is off{was} on",
        f"--ckpt-keep-n is 1{was} 3",
    ):
        assert line in lines
    assert sum(was in line for line in lines) == 4
    assert err == f"warning: --learning-rate is 0.001{was} 0.003\n"
    assert sorted(os.listdir("ckpt/x")) == ["step_00000002", "step_00000003"]  # 2 was followed
    assert saved("ckpt/x/step_00000003")["seed"] == 7
    assert resume("--continue", "--name=x", "--epochs=1") == 0, "in place of the steps"
    assert saved("ckpt/x/step_00000005")["steps"] == -1


def test_a_file_changes_options_too(monkeypatch):
    stopped(monkeypatch)
    Path("run.toml").write_text('name = "x"\nsteps = 3\ncontinue = true\nlr = 1e-3\n')
    assert resume("--config=run.toml", "--lr=2e-3") == 0
    assert saved("ckpt/x/step_00000003")["learning_rate"] == 2e-3


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--no-from-scratch"], "--no-from-scratch: cannot be changed, because the weights are"),
        (["--init-proj-to-zero"], "--init-proj-to-zero: cannot be changed, because"),
        (["--model=tiny"], "is of another model: "),
        (["--opt-m-dtype=e4m3"], "has these moments in fp32, which cannot be converted"),
        (["--name=y"], "--continue: no complete checkpoint in 'ckpt/y' to take the options from"),
        (["--train-file=data/train-0.bin"], "training files changed since the checkpoint"),
    ],
)
def test_what_cannot_change(monkeypatch, capsys, args, message):
    stopped(monkeypatch)
    capsys.readouterr()
    assert resume("--continue", "--name=x", *args) == 2
    [error] = [x for x in capsys.readouterr().err.splitlines() if x.startswith("error: ")]
    assert message in error
    assert sorted(os.listdir("ckpt/x")) == ["step_00000002"]


def test_options_that_this_version_does_not_know(monkeypatch, capsys):
    from llmq.checkpoint.manifest import digest_of

    stopped(monkeypatch)
    path = Path("ckpt/x/step_00000002/checkpoint.json")
    document = json.loads(path.read_text())
    document["options"]["of_later"] = 3
    del document["options"]["z_loss"]
    path.write_text(json.dumps(document | {"sha256": digest_of(document)}))
    capsys.readouterr()
    assert resume("--continue", "--name=x") == 0
    assert "options not known here: of_later\n" in capsys.readouterr().err


def test_options_that_older_versions_had(monkeypatch, capsys):
    """Values that make no other numbers go on; others are refused, and nothing is written."""
    from llmq.checkpoint.manifest import digest_of

    stopped(monkeypatch)
    path = Path("ckpt/x/step_00000002/checkpoint.json")
    original = json.loads(path.read_text())

    def saved(**old):
        document = original | {"options": original["options"] | old}
        path.write_text(json.dumps(document | {"sha256": digest_of(document)}))
        capsys.readouterr()
        return resume("--continue", "--name=x"), capsys.readouterr().err

    status, err = saved(cautious_decay=True, optimizer="muon")
    assert status == 2 and "--cautious-decay=True is no option any more: weight decay" in err
    status, err = saved(cautious_decay=True, muon_scale="spectral", sample_tokens=9, tune=True)
    assert status == 0
    assert "--sample-tokens=9 is no option any more: samples have at most 64 tokens" in err
    assert "cautious" not in err and "not known" not in err


def test_a_plan_is_of_the_run_that_goes_on(monkeypatch, capsys):
    stopped(monkeypatch)
    capsys.readouterr()
    assert _run(["plan", "--continue", "--name=x", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)["memory"]
    given = [f"--{n}={v}" for n, v in options(recompute_ffn=True).items() if n != "overwrite"]
    assert _run(["plan", "--json", *given]) == 0
    assert json.loads(capsys.readouterr().out)["memory"] == planned
    assert _run(["plan", "--json", *given, "--no-recompute-ffn"]) == 0
    assert json.loads(capsys.readouterr().out)["memory"] != planned


# ------------------------------------------------------------------------------------------------
# The log


def test_the_log_is_found_by_its_identity(monkeypatch):
    """A renamed log is found; where the log is gone, a new log begins under its name."""
    stopped(monkeypatch)
    log = log_of()
    log.rename("logs/renamed.json")
    assert train(**OWN | {"name": "other", "steps": 1}) == 0
    assert resume("--continue", "--name=x") == 0
    assert sorted(os.listdir("logs")) == sorted([log_of("other").name, "renamed.json"])
    assert [r["step"] for r in records("step", "logs/renamed.json")] == [0, 1, 2, 3]
    os.remove("logs/renamed.json")
    assert resume("--continue", "--name=x", "--steps=5") == 0
    assert [r["step"] for r in records("step", "logs/renamed.json")] == [4]


def test_a_log_of_another_run_in_its_place_is_left_alone(monkeypatch):
    log = Path("logs/x-2020-02-20T20_20_20.json")  # not of the second in which the new one begins
    stopped(monkeypatch, log_file=log)
    assert train(**OWN | {"name": "other", "steps": 1}) == 0
    shutil.copy(log_of("other"), log)
    before = log.read_bytes()
    assert resume("--continue", "--name=x") == 0
    assert log.read_bytes() == before
    (new,) = set(Path("logs").glob("x-*.json")) - {log}
    assert [r["step"] for r in records("step", new)] == [2, 3]


def test_a_torn_log_goes_on(monkeypatch, capsys):
    stopped(monkeypatch)
    with open(log_of(), "r+b") as file:
        file.truncate(os.path.getsize(log_of()) - 20)
    capsys.readouterr()
    assert resume("--continue", "--name=x") == 0
    assert "ended in the middle of a record: cut back to its " in capsys.readouterr().err
    assert [r["step"] for r in records("step", log_of())] == [0, 1, 2, 3]


def test_undone_steps_are_left_out(monkeypatch):
    """A run that goes on from an earlier checkpoint, and one that begins again."""
    assert train(**OWN, ckpt_interval=1, eval_every_n_steps=2) == 0
    assert resume("--continue=2", "--name=x", "--steps=3") == 0
    everything = json.loads(log_of().read_text())
    kept = without_undone(everything)
    assert [r["step"] for r in kept if r["log"] == "step"] == [0, 1, 2]
    assert [r["step"] for r in kept if r["log"] == "eval"] == [2, 3]
    assert kept[-1] == everything[-1]
    again = without_undone([*kept, {"log": "cmd", "step": 0, "resumed_at": 0}])
    assert [r for r in again if r["log"] in ("step", "eval")] == []


def test_find_log(monkeypatch):
    stopped(monkeypatch)
    log = log_of()
    assert find_log("x") == log == find_log(str(log))
    log.rename("logs/renamed.json")
    assert find_log("x") == Path("logs/renamed.json")
    assert train(**PLACES | {"name": "z", "log_file": "elsewhere/z.json", "steps": 1,
                             "save_training_state": True}) == 0  # fmt: skip
    assert find_log("z") == Path("elsewhere/z.json")
    for text, problem in (
        ("nobody", "no log in 'logs' is of a run of this name"),
        ("logs/x.json", "No such file or directory"),
        ("x.json", "No such file or directory"),
        ("~nobody-here/x", "No such file or directory"),
        ("logs/", "it is a directory"),
        (".", "it is a directory"),
    ):
        with pytest.raises(DataError, match=f"cannot read the log '{text}': {problem}"):
            find_log(text)
    assert _run(["plot", "z", "--out", "z.png"]) == 0


# ------------------------------------------------------------------------------------------------
# Forks


def test_a_fork_is_a_run_of_its_own(monkeypatch, capsys):
    stopped(monkeypatch)
    parent = run_of_checkpoint("ckpt/x/step_00000002")
    before = log_of().read_bytes()
    capsys.readouterr()
    assert resume("--continue=ckpt/x/step_00000002", "--name=y") == 0
    out = capsys.readouterr().out
    (line,) = [x for x in out.splitlines() if x.startswith("This is run 'y' (")]
    assert line.endswith(f"a fork of run 'x' ({parent}) at step 2")
    assert log_of().read_bytes() == before and os.listdir("ckpt/x") == ["step_00000002"]
    own = run_of_checkpoint("ckpt/y/step_00000004")
    assert own == run_of_export("output/y") != parent
    assert [r["step"] for r in records("step", log_of("y"))] == [2, 3]
    recorded = {"id": parent, "name": "x", "step": 2}
    (start,) = records("cmd", log_of("y"))
    assert (start["run"]["parent"], start["resumed_at"]) == (recorded, 2)
    for file in ("ckpt/y/step_00000004/checkpoint.json", "output/y/llmq.json"):
        assert json.loads(Path(file).read_text())["run"]["parent"] == recorded
    assert resume("--continue", "--name=y", "--steps=5") == 0
    assert run_of_checkpoint("ckpt/y/step_00000005") == own == run_of_export("output/y")
    assert "a fork of" not in capsys.readouterr().out
    assert [r["step"] for r in records("step", log_of("y"))] == [2, 3, 4]


def test_a_fork_that_had_no_checkpoint_begins_again_as_the_same(monkeypatch):
    stopped(monkeypatch)
    fork = ["--continue=ckpt/x/step_00000002", "--name=y", "--log-file=y.json"]
    with monkeypatch.context() as patch:
        signal_after(patch, 2)
        assert resume(*fork) == 130
    shutil.rmtree("ckpt/y")
    assert resume(*fork) == 0
    first, second = records("cmd", "y.json")
    assert first["run"] == second["run"]


def test_a_fork_does_not_write_to_its_parents_places(monkeypatch, capsys):
    stopped(monkeypatch, checkpoint_dir="c", out_dir="o")
    capsys.readouterr()
    fork = ["--continue=2", "--checkpoint-dir=c", "--name=y"]
    assert resume(*fork) == 2
    assert "--out-dir: 'o' is that of run 'x' (" in capsys.readouterr().err
    fork = ["--continue=c/step_00000002", "--name=y"]
    same = ["--out-dir=o2", "--checkpoint-dir=c"]
    assert resume(*fork, *same) == 2
    assert "from which this run 'y' (" in capsys.readouterr().err
    assert resume(*fork, *same, "--overwrite") == 2
    assert os.listdir("c") == ["step_00000002"]
    assert resume(*fork) == 0
    assert os.listdir("ckpt") == ["y"] and not Path("o").exists()


def test_a_checkpoint_from_elsewhere_does_not_choose_where_the_run_writes(monkeypatch, capsys):
    """Whoever made it may have meant any file of whoever continues it."""
    theirs = {"checkpoint_dir": "theirs", "out_dir": "etc", "log_file": "etc.json"}
    stopped(monkeypatch, **theirs)
    os.remove("etc.json")
    capsys.readouterr()
    before = tree_of("theirs")
    assert resume("--continue=theirs/step_00000002") == 0
    err = capsys.readouterr().err
    assert "lies in no place of this run" in err
    for place in ("--out-dir=etc", "--checkpoint-dir=theirs", "--log-file=etc.json"):
        assert place in err
    assert os.listdir("ckpt") == os.listdir("output") == ["x"] and log_of().exists()
    assert tree_of("theirs") == before
    assert not Path("etc").exists() and not Path("etc.json").exists()
    shutil.rmtree("ckpt")
    assert resume("--continue=theirs/step_00000002", "--checkpoint-dir=theirs") == 0
    assert Path("etc").is_dir(), "a place that was named is the user's own"


def tree_of(folder):
    return {path: path.stat().st_mtime_ns for path in Path(folder).rglob("*")}


def test_options_of_one_command_are_known():
    from llmq.options.options import ONCE

    assert set(ONCE) <= OPTIONS.keys()


def test_a_run_that_goes_back_leaves_its_later_checkpoints(monkeypatch, capsys):
    """The newest checkpoint is then one of the course that it took, not of the one that it left."""
    assert train(**OWN | {"ckpt_interval": 1}) == 0
    assert sorted(os.listdir("ckpt/x")) == [f"step_0000000{n}" for n in (1, 2, 3, 4)]
    capsys.readouterr()
    assert resume("--continue=2", "--name=x", "--steps=2") == 0
    assert "Moved aside" not in capsys.readouterr().out, "no step was made again"
    assert resume("--continue=2", "--name=x", "--steps=3", "--lr=1e-3") == 0
    moved = "Moved aside: the checkpoints after step 2, which the run makes again, to "
    assert f"{moved}'{Path('ckpt/x.old-1').absolute()}'\n" in capsys.readouterr().out
    assert sorted(os.listdir("ckpt/x")) == [f"step_0000000{n}" for n in (1, 2, 3)]
    assert sorted(os.listdir("ckpt/x.old-1")) == ["step_00000003", "step_00000004"]
    assert resume("--continue", "--name=x", "--steps=4") == 0
    assert saved("ckpt/x/step_00000004")["learning_rate"] == 1e-3


def test_a_step_that_is_not_there(monkeypatch, capsys):
    stopped(monkeypatch)
    capsys.readouterr()
    assert resume("--continue=3", "--name=x") == 2
    err = capsys.readouterr().err
    expected = "--continue 3: no complete checkpoint of this step in 'ckpt/x', which has 2"
    assert expected in err
    assert resume("--continue=ckpt/y", "--name=x") == 2
    assert "--continue ckpt/y: no complete checkpoint there" in capsys.readouterr().err
