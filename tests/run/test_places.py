"""Runs and what they write: identity, what belongs to another run, moving it aside."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import transformers

from llmq.commands.cli import _run
from llmq.run.trainer import Trainer
from tests.runs import make_workplace, options, records, signal_after, train

SAVED = {"steps": 2, "save_training_state": True, "overwrite": None}
AGAIN = SAVED | {"continue": ""}


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(make_workplace(tmp_path))


def run_of_checkpoint(path):
    return json.loads((Path(path) / "checkpoint.json").read_text())["run"]["id"]


def run_of_export(path="out"):
    return json.loads((Path(path) / "llmq.json").read_text())["run"]["id"]


def runs_of_log(log="log.json"):
    return [record["run"]["id"] for record in records("cmd", log)]


def edit_manifest(checkpoint, edit):
    """Change the manifest of a checkpoint, with its checksum."""
    from llmq.checkpoint.manifest import digest_of

    path = Path(checkpoint) / "checkpoint.json"
    document = json.loads(path.read_text())
    edit(document)
    path.write_text(json.dumps(document | {"sha256": digest_of(document)}))


def forget_ids(checkpoint):
    """Make a checkpoint one of the time before runs had ids."""
    edit_manifest(checkpoint, lambda document: [document["run"].pop(n) for n in ("id", "name")])


def everything():
    """All files with their times."""
    files = (path for path in Path().rglob("*") if path.is_file())
    return {str(path): path.stat().st_mtime_ns for path in files}


def test_checkpoints_log_and_export_carry_the_id_over_continue():
    assert train(**SAVED) == 0
    first = run_of_checkpoint("ckpt/step_00000002")
    assert re.fullmatch("[0-9a-f]{12}", first)
    assert train(**AGAIN | {"steps": 3}) == 0
    assert run_of_checkpoint("ckpt/step_00000003") == first == run_of_export()
    assert runs_of_log() == [first, first]
    assert transformers.AutoConfig.from_pretrained("out").vocab_size == 257
    assert _run(["export", "--checkpoint-dir=ckpt", "--out-dir=exported"]) == 0
    assert run_of_export("exported") == first


def test_two_runs_have_two_ids():
    assert train(**SAVED) == 0
    elsewhere = {"out_dir": "o", "checkpoint_dir": "c", "log_file": "l.json"}
    assert train(**SAVED | elsewhere) == 0
    assert run_of_export() != run_of_export("o")


@pytest.mark.parametrize("gone", [(), ("ckpt",), ("ckpt", "out"), ("log.json", "out")])
def test_a_second_run_is_refused_and_changes_nothing(gone, capsys):
    """Whichever of checkpoints, model and log is still there."""
    assert train(**SAVED) == 0
    mine = run_of_export()
    for name in gone:
        (shutil.rmtree if Path(name).is_dir() else os.remove)(name)
    before = everything()
    capsys.readouterr()
    assert train(**SAVED) == 2
    flag, what = ("--checkpoint-dir", "checkpoint 'ckpt/step_00000002'")
    if "ckpt" in gone:
        flag, what = ("--out-dir", "model 'out'")
        if "out" in gone:
            flag, what = ("--log-file", "log 'log.json'")
    assert re.fullmatch(
        rf"error: {flag}: {what} is of run 'llmq' \({mine}\), not of this run 'llmq' "
        r"\([0-9a-f]{12}\): give another --name, go on with --continue, or move it aside with "
        r"--overwrite\n",
        capsys.readouterr().err,
    )
    assert everything() == before


def test_overwrite_moves_aside_and_deletes_nothing(capsys):
    assert train(**SAVED) == 0
    first = run_of_export()
    Path("out/notes").touch()  # not the run's: stays where it is
    assert train(**SAVED | {"overwrite": ""}) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert f"Moved aside: checkpoint 'ckpt/step_00000002', to '{Path.cwd()}/ckpt.old-1'" in out
    assert os.listdir("ckpt.old-1") == ["step_00000002"]
    assert run_of_checkpoint("ckpt.old-1/step_00000002") == first == run_of_export("out.old-1")
    assert runs_of_log("log.json.old-1") == [first]
    second = run_of_export()
    assert second != first
    assert runs_of_log() == [second]
    assert Path("out/notes").exists()
    assert train(**SAVED | {"overwrite": ""}) == 0
    assert run_of_export("out.old-2") == second
    assert run_of_export("out.old-1") == first


def test_the_model_that_a_run_begins_from_is_not_moved(capsys):
    assert train(**SAVED) == 0
    before = everything()
    capsys.readouterr()
    assert train(steps=1, model="out", from_scratch=False, checkpoint_dir="c") == 2
    err = capsys.readouterr().err
    assert err == "error: --out-dir: model 'out' is the one of --model: choose another directory\n"
    assert everything() == before


def test_a_run_that_cannot_begin_moves_nothing(capsys):
    assert train(**SAVED) == 0
    before = everything()
    assert train(**SAVED | {"overwrite": "", "grad_accumulation": 100, "drop_last": ""}) == 2
    assert everything() == before


def test_cleaning_up_touches_only_its_own(capsys):
    assert train(**SAVED | {"checkpoint_dir": "other", "out_dir": "o", "log_file": "l"}) == 0
    assert train(**SAVED, ckpt_interval=1) == 0

    def arrive(self, *args):  # of another run, while this one is under way
        if not Path("ckpt/step_00000001").exists():
            shutil.copytree("other/step_00000002", "ckpt/step_00000002", dirs_exist_ok=True)
        return real(self, *args)

    real = Trainer.validate
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "validate", arrive)
        shutil.rmtree("ckpt/step_00000001")
        options = AGAIN | {"steps": 7, "ckpt_interval": 1, "ckpt_keep_n": 1}
        assert train(**options, eval_every_n_steps=3) == 0
    left = [f"step_{step:08d}" for step in (2, 3, 6, 7)]  # 3 is about to be a good one
    assert sorted(os.listdir("ckpt")) == left
    assert run_of_checkpoint("ckpt/step_00000002") == run_of_export("o")


def test_continuing_beside_the_checkpoints_of_another_run(capsys):
    """The newest is of another run than the one that is asked for."""
    assert train(**SAVED | {"steps": 1}) == 0
    other = {"checkpoint_dir": "other", "out_dir": "o", "log_file": "l"}
    assert train(**SAVED | other) == 0
    shutil.copytree("other/step_00000002", "ckpt/step_00000002")
    capsys.readouterr()
    assert train(**SAVED | {"continue": "1", "steps": 3}) == 2
    assert "checkpoint 'ckpt/step_00000002' is of run" in capsys.readouterr().err
    assert train(**SAVED | {"continue": "1", "steps": 3, "overwrite": ""}) == 0
    assert sorted(os.listdir("ckpt")) == ["step_00000001", "step_00000003"]
    assert os.listdir("ckpt.old-1") == ["step_00000002"]


def test_what_has_no_id_is_refused(capsys):
    """Nothing of the time before runs had ids is read, or lost."""
    assert train(**SAVED, ckpt_interval=1) == 0
    for step in (1, 2):
        forget_ids(f"ckpt/step_0000000{step}")
    before = everything()
    capsys.readouterr()
    assert train(**SAVED) == 2
    assert "is of a run without an id, not of this run" in capsys.readouterr().err
    assert train(**AGAIN | {"steps": 3}) == 2
    assert "'ckpt/step_00000002/checkpoint.json' is of the time before runs had ids: use" in (
        capsys.readouterr().err
    )
    assert everything() == before


def test_checkpoints_of_pissa_are_refused(capsys):
    assert train(**SAVED) == 0
    [path] = Path("ckpt").iterdir()
    edit_manifest(path, lambda document: document["options"].update(lora_init="pissa"))
    before = everything()
    for command in (["train", "--continue"], ["export"]):
        capsys.readouterr()
        assert _run([*command, "--checkpoint-dir=ckpt", "--out-dir=other"]) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert "is of a run with --lora-init pissa, which has been taken out: use the" in line
    assert everything() == before


def test_a_run_that_was_stopped_before_its_first_checkpoint_begins_again(monkeypatch):
    """Jobs that always give --continue want it so: the log says that it is the same run."""
    with monkeypatch.context() as patch:
        signal_after(patch, 1)
        assert train(**SAVED | {"steps": 4}) == 130
    (first,) = runs_of_log()
    shutil.rmtree("ckpt")
    assert train(**AGAIN) == 0
    assert runs_of_log() == [first, first]
    assert run_of_export() == first


@pytest.mark.parametrize("name", ["../../x", "a/b", "a\\b", "..", ".", "a\nb", "a\0b", " "])
def test_a_name_is_the_name_of_a_file(name, capsys):
    assert train(steps=1, name=name) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: --name: expected ")
    assert err.count("\n") == 1


def test_trainer_keeps_the_id_of_its_checkpoint():
    given = {name: value for name, value in options(steps=2).items() if name != "overwrite"}
    given = {name.replace("-", "_"): value for name, value in given.items()}
    with Trainer(**given) as trainer:
        first, saved = trainer.run, trainer.save()
    with Trainer(**given) as trainer:
        assert trainer.run.id != first.id
        trainer.load(saved)
        assert trainer.run == first
