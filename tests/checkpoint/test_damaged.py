"""Damaged checkpoints, notes and logs in the places of a run: none of them stops it."""

from __future__ import annotations

import json
import os
import shutil
import sys
from functools import partial
from pathlib import Path

import pytest

import llmq.run.restarts
from llmq.checkpoint.manifest import digest_of, manifest_damage
from llmq.checkpoint.store import checkpoint_owner, delete_old, own_checkpoints
from llmq.commands.cli import _run
from llmq.report.json_log import is_damaged_log, log_owner
from llmq.run.run_paths import find_log, log_of_run
from llmq.run.trainer import Trainer
from tests import mpi
from tests.runs import flags, make_workplace, options, records, train

# There are as many checkpoints as ways to damage one, and some more: a run of a test meets all ways
# at once.
STEPS = 19
RUN = {"steps": STEPS, "ckpt_interval": 1, "ckpt_keep_n": 0, "save_training_state": True}
RUN |= {"overwrite": None, "eval_file": "none", "eval_every_n_steps": 0, "batch_size": 1}
RUN |= {"grad_accumulation": 1}
ON = RUN | {"continue": "", "steps": STEPS + 1}


def checkpoint(step):
    return f"ckpt/step_{step:08d}"


FIRST, NEWEST = checkpoint(1), checkpoint(STEPS)


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """A folder with a run; `whole` is the model of one step more that nobody disturbed."""
    folder = make_workplace(tmp_path_factory.mktemp("damaged"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert train(**ON | {"continue": None, "out_dir": "whole", "ckpt_interval": 0}) == 0
        shutil.rmtree("ckpt")
        os.remove("log.json")
        assert train(**RUN) == 0
    return folder


@pytest.fixture(autouse=True)
def place(template, tmp_path, monkeypatch):
    shutil.copytree(template, tmp_path / "place", symlinks=True)
    monkeypatch.chdir(tmp_path / "place")


def edited(change, *, sign):
    def edit(path):
        document = json.loads(path.read_text())
        change(document)
        path.write_text(json.dumps(document | ({"sha256": digest_of(document)} if sign else {})))

    return edit


def instead(make):
    def put(path):
        path.unlink()
        make(path)

    return put


DAMAGES = {
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "deep": lambda path: path.write_text("[" * 100_000),
    "no UTF-8": lambda path: path.write_bytes(b'{"version": 1, "run": "\xff\xfe"}'),
    "list": lambda path: path.write_text("[1, 2]"),
    "number": lambda path: path.write_text("7"),
    "object": lambda path: path.write_text("{}"),
    "version": edited(partial(dict.update, version="1"), sign=True),
    "run": edited(partial(dict.update, run=3), sign=True),
    "id": edited(lambda document: document["run"].update(id="0" * 12), sign=False),
    "step": edited(lambda document: document["run"].update(step=7), sign=False),
    "folder": instead(Path.mkdir),
    "pipe": instead(os.mkfifo),
    "loop": instead(lambda path: path.symlink_to(path.name)),
    "nowhere": instead(lambda path: path.symlink_to("nowhere")),
}
FEW = ["empty", "deep", "step", "folder", "loop"]  # what is found in different ways


def damage(path=FIRST, how="empty"):
    DAMAGES[how](Path(path) / "checkpoint.json")


def damage_each(ways, first=1):
    """Damage one checkpoint after the other in these ways; their paths."""
    paths = [checkpoint(step) for step, _ in enumerate(ways, first)]
    for path, how in zip(paths, ways, strict=True):
        damage(path, how)
    return paths


def model(folder="out"):
    return (Path(folder) / "model.safetensors").read_bytes()


def names(folder="ckpt"):
    return sorted(name for name in os.listdir(folder) if not name.startswith("."))


def warnings_of(capsys):
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning")]


def aside_of(path):
    return (
        f"warning: '{path}' is damaged and was set aside as '{Path(path).name}.damaged-1': '{path}"
    )


def test_damaged_checkpoints_are_set_aside(capsys):
    paths = damage_each(DAMAGES)
    tensors = {path: contents(path) for path in paths}
    capsys.readouterr()
    assert train(**ON) == 0
    said = warnings_of(capsys)
    assert len(said) == len(DAMAGES)
    for path, line in zip(paths, said, strict=True):
        assert line.startswith(aside_of(path))
        assert contents(f"{path}.damaged-1") == tensors[path]
        assert os.path.lexists(f"{path}.damaged-1/checkpoint.json") and not Path(path).exists()
    assert model() == model("whole")
    assert train(**ON | {"steps": STEPS + 2}) == 0, "what lies aside is no longer in the way"
    assert warnings_of(capsys) == []


def contents(path):
    return {file.name: file.read_bytes() for file in Path(path).glob("*.safetensors")}


@pytest.mark.parametrize("given", [STEPS - 1, checkpoint(STEPS - 1)])
def test_an_older_one_that_is_named(given, capsys):
    paths = damage_each(FEW)
    capsys.readouterr()
    assert train(**ON | {"continue": given}) == 0
    for path, line in zip(paths, warnings_of(capsys), strict=True):
        assert line.startswith(aside_of(path))
    assert model() == model("whole")
    assert f"{Path(FIRST).name}.damaged-1" in names()
    assert names("ckpt.old-1") == [Path(NEWEST).name]


def test_the_newest_are_damaged(capsys):
    paths = damage_each(FEW, STEPS - len(FEW) + 1)
    capsys.readouterr()
    assert train(**ON) == 0
    said = warnings_of(capsys)
    passed, aside = said[: len(FEW)], said[len(FEW) :]
    for path, line in zip(reversed(paths), passed, strict=True):
        assert line.startswith(f"warning: --continue: passed over checkpoint '{path}': ")
    for path, line in zip(paths, aside, strict=True):
        assert line.startswith(aside_of(path))
    assert model() == model("whole")
    assert manifest_damage(Path(NEWEST) / "checkpoint.json") is None, "it was made again"


def test_one_that_is_named_itself_is_refused_and_stays(capsys):
    damage_each(FEW)
    before = names()
    for step, _ in enumerate(FEW, 1):
        capsys.readouterr()
        assert train(**ON | {"continue": step}) == 2
        assert capsys.readouterr().err.startswith("error: ")
    assert names() == before


def test_none_is_whole(capsys):
    damage_each((FEW * 4)[:STEPS])
    before = names()
    capsys.readouterr()
    assert train(**ON) == 2
    said = f"error: none of the {STEPS} checkpoints is whole; the newest: "
    assert said in capsys.readouterr().err
    assert names() == before


def test_another_run_is_refused_as_before_and_nothing_is_renamed(capsys):
    damage()
    for step in range(2, STEPS):
        shutil.rmtree(checkpoint(step))
    before = names()
    capsys.readouterr()
    assert train(**RUN) == 2
    assert f"--checkpoint-dir: checkpoint '{NEWEST}' is of run 'llmq' (" in capsys.readouterr().err
    assert names() == before


def test_restarts(monkeypatch, capsys):
    """The process that starts the run reads the checkpoints, too. The run is in this process."""
    damage()
    tried = []

    def supervise(command, config, restarts):
        tried.append(config.continue_from)
        return _run([argument for argument in command[3:] if "--restarts" not in argument])

    monkeypatch.setattr(llmq.run.restarts, "supervise", supervise)
    command = ["train", *flags(**ON), "--restarts=1"]
    monkeypatch.setattr(sys, "argv", ["llmq", *command])
    assert _run(command) == 0 and tried == ["latest"]
    assert f"'{FIRST}' is damaged and was set aside" in capsys.readouterr().err
    assert model() == model("whole")


def test_check_names_them_and_goes_on(capsys):
    paths = damage_each(DAMAGES)
    capsys.readouterr()
    assert _run(["check", "ckpt"]) == 2
    out, err = capsys.readouterr()
    whole = "checksums agree, all weights are finite"
    rest = range(len(DAMAGES) + 1, STEPS + 1)
    assert out.splitlines() == [
        *(f"'{path}': DAMAGED" for path in paths),
        *(f"'{checkpoint(n)}': step {n}, {whole}" for n in rest),
    ]
    for path, line in zip(paths, err.splitlines(), strict=True):
        assert path in line


def test_export_takes_the_newest_that_is_whole(capsys):
    paths = damage_each(FEW, STEPS - len(FEW) + 1)
    before = names()
    capsys.readouterr()
    assert _run(["export", "--checkpoint-dir=ckpt", "--out-dir=exported"]) == 0
    for path, line in zip(reversed(paths), warnings_of(capsys), strict=True):
        assert f"passed over checkpoint '{path}'" in line
    assert names() == before


def test_they_are_not_the_trainers_and_are_not_deleted():
    damage_each((FEW * 4)[: STEPS - 2], 3)
    before = names()
    run = checkpoint_owner(Path("ckpt/step_00000002"))
    assert own_checkpoints(Path("ckpt"), run).keys() == {1, 2}
    assert delete_old(Path("ckpt"), run, [*range(3, STEPS + 1)]) == []
    given = {n.replace("-", "_"): v for n, v in options(**RUN).items() if n != "overwrite"}
    with Trainer(**given) as trainer:
        trainer.load("ckpt")
        assert trainer.steps_done == 2
    assert names() == before


def test_a_damaged_note_of_the_best(capsys):
    Path("ckpt/best.json").write_text("[" * 100_000)
    capsys.readouterr()
    assert train(**ON) == 0
    (line,) = warnings_of(capsys)
    assert "'ckpt/best.json' is damaged and was set aside as 'best.json.damaged-1'" in line
    assert Path("ckpt/best.json.damaged-1").read_text() == "[" * 100_000


# The log

LOGS = {
    "text": lambda path: path.write_text("Hello, world.\n" * 9),
    "deep": lambda path: path.write_text("[" * 100_000),
    "deep line": lambda path: path.write_text("[\n" + "[" * 100_000),
    "no UTF-8": lambda path: path.write_bytes(b'[\n  {"log": "cmd\xff"},\n  {}\n]\n'),
    "numbers": lambda path: path.write_text("[\n  1,\n  2\n]\n"),
    "folder": instead(Path.mkdir),
}


@pytest.mark.parametrize(("how", "given"), [*((how, False) for how in LOGS), ("deep", True)])
def test_a_damaged_log_is_set_aside(how, given, capsys):
    """Whether --log-file names it or the checkpoint does."""
    LOGS[how](Path("log.json"))
    before = None if how == "folder" else Path("log.json").read_bytes()
    capsys.readouterr()
    assert train(**ON | ({} if given else {"log_file": None})) == 0
    (line,) = warnings_of(capsys)
    said = "warning: 'log.json' is damaged and was set aside as 'log.json.damaged-1': it is no log"
    assert line == said
    assert model() == model("whole")
    assert [record["step"] for record in records("step")] == [STEPS]
    aside = Path("log.json.damaged-1")
    assert aside.is_dir() if before is None else aside.read_bytes() == before


@pytest.mark.parametrize("how", ["text", "deep", "folder"])
def test_the_log_that_was_begun_beside_it_goes_on(how):
    os.rename("log.json", "log.json.new-1")
    Path("log.json").touch()
    LOGS[how](Path("log.json"))
    assert train(**ON | {"log_file": None}) == 0
    steps = [record["step"] for record in records("step", "log.json.new-1")]
    assert steps == list(range(STEPS + 1))
    assert names(".").count("log.json") == 1, "the other one is left alone"


def test_a_log_begun_beside_another_runs_is_found():
    shutil.copy("log.json", "log.json.new-1")
    run = log_owner(Path("log.json"))
    text = Path("log.json").read_text()
    Path("log.json").write_text(text.replace(run.id, "0" * 12))
    assert log_of_run(run, Path("log.json")) == Path("log.json.new-1")
    os.mkdir("logs")
    shutil.move("log.json.new-1", "logs/llmq-2020-02-20T20_20_20.json.new-1")
    shutil.rmtree("ckpt")
    assert find_log("llmq").name == "llmq-2020-02-20T20_20_20.json.new-1"


@pytest.mark.parametrize("how", ["text", "deep", "numbers"])
def test_a_slip_of_the_users_is_refused(how, capsys):
    """--log-file names what the run never wrote."""
    other = Path("other.json")
    other.touch()
    LOGS[how](other)
    before = other.read_bytes()
    for changes in (ON, RUN | {"checkpoint_dir": "c", "out_dir": "o"}):
        assert train(**changes | {"log_file": other}) == 2
    assert other.read_bytes() == before and not list(Path().glob("other.json.*"))


@pytest.mark.parametrize(
    "content", [b"", b"[\n]\n", b"[\n", b'[\n  {"log": "cm', b"[\n" + bytes(50), bytes(50)]
)
def test_what_a_stop_leaves_is_not_damaged(tmp_path, content):
    (tmp_path / "log.json").write_bytes(content)
    assert not is_damaged_log(tmp_path / "log.json")


# Several processes


def test_all_processes_do_the_same():
    damage(how="deep")
    for step in range(2, STEPS):
        shutil.rmtree(checkpoint(step))
    Path("log.json").write_text("[" * 100_000)
    status, _, err = mpi.run(2, mpi.case(**ON | {"gpus": 2}))
    assert status == 0, err
    assert err.count(f"'{FIRST}' is damaged and was set aside as 'step_00000001.damaged-1'") == 1
    assert err.count("'log.json' is damaged and was set aside as 'log.json.damaged-1'") == 1
    assert (
        names().count("step_00000001.damaged-1") == 1
        and Path(checkpoint(STEPS + 1)).name in names()
    )
