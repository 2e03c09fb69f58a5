"""A run's work between its steps: named validations, tasks, samples, the best checkpoint."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from llmq.commands.cli import _run
from llmq.model.step import Step
from llmq.options.option_file import command_line
from llmq.options.options_io import make_config, option_rows
from llmq.options.presets import preset
from llmq.report.json_log import LogReader, without_undone
from llmq.report.sinks import numbers, text
from llmq.run import evaluations
from llmq.run.trainer import Trainer
from tests.runs import flags, make_workplace, records, signal_after, train, write_tokens

QUESTIONS = [("a", "bc", "d", "A"), ("ö", "x", "yz", "B"), ("no", "1", "22", "B")]
EVERYTHING = [
    "--eval-file=data/eval.bin",
    "--eval-file=other=data/other.bin",
    "--eval-task=questions.jsonl",
    "--eval-task=text=words.txt",
    "--task-every=2",
    "--sample-prompt=Hé",
    "--sample-prompt=ab",
    "--sample-prompt=c",
]
OPTIONS = {"seq_len": 32, "batch_size": 1, "eval_every_n_steps": 2, "steps": 4, "eval_file": None}


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(make_workplace(tmp_path))
    write_questions()


def write_questions():
    """Write the questions of EVERYTHING into the current folder."""
    write_tokens(Path("data/other.bin"), 5, seed=7)
    lines = [
        {"question": q, "choices": {"text": [one, two], "label": ["A", "B"]}, "answerKey": key}
        for q, one, two, key in QUESTIONS
    ]
    Path("questions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    Path("words.txt").write_text("Some words that are longer than a sequence of the run.")


def run(*args, **changes):
    return _run(["train", *flags(**(OPTIONS | changes)), *args])


def steps_of(kind, **fields):
    found = [r for r in records(kind) if all(r.get(k) == v for k, v in fields.items())]
    return [r["step"] for r in found]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gpus": 2, "zero_level": 3, "lmhead_chunks": 2},
        {"model_dtype": "bf16", "matmul_dtype": "e4m3", "fp8_recipe": "delayed", "gpus": 2,
         "head_dtype": "e4m3"},
    ],
    ids=["plain", "sharded", "fp8"],
)  # fmt: skip
def test_nothing_of_it_changes_a_bit(options):
    assert run(**options, eval_file="data/eval.bin") == 0
    plain = [(r["loss"], r["norm"]) for r in records("step")]
    validations = [r["loss"] for r in records("eval")]
    assert run(*EVERYTHING, **options) == 0
    assert [(r["loss"], r["norm"]) for r in records("step")] == plain
    assert [r["loss"] for r in records("eval") if "name" not in r] == validations
    ends = [2, 3, 4] if "gpus" in options else [2, 4]  # an epoch has three steps then
    assert steps_of("eval", name="other") == ends
    assert [r["split"] for r in records("dataset")] == ["train", "eval", "eval-other"]
    for task, metrics in (("arc", ["acc", "acc_norm"]), ("text", ["perplexity", "bits_per_byte"])):
        for metric in metrics:
            assert steps_of("task", name=task, metric=metric) == [2, 4]
    assert steps_of("sample", prompt="Hé") == steps_of("sample", prompt="c") == [2, 4]


@pytest.mark.parametrize("mask", [[], ["--document-mask", "--document-separator=51"]])
def test_numbers_are_those_of_the_exported_model(mask, monkeypatch, capsys):
    """Tasks: of `llmq eval` with sequences as long. Samples: of `llmq sample`.

    With documents that are masked (by token 51, which is in all files), tasks put several sequences
    into a row.
    """
    monkeypatch.setattr(evaluations, "TEMPERATURE", 0.0)
    monkeypatch.setattr(evaluations, "SAMPLE_TOKENS", 5)
    assert run(*EVERYTHING, *mask, steps=3) == 0
    args = ["--task=questions.jsonl", "--task=words.txt", "--seq-len=32", "--out=eval.json"]
    assert _run(["eval", "out", *args, "--device=cpu", "--model-dtype=fp32"]) == 0
    tasks = json.loads(Path("eval.json").read_text())["tasks"]
    last = [r for r in records("task") if r["step"] == 3]
    assert len(last) == 6
    for record in last:
        task = tasks[record["name"]]
        # Products of other shapes are summed in another order.
        assert record["value"] == pytest.approx(task[record["metric"]], rel=1e-5)
        assert record["stderr"] == task.get(f"{record['metric']}_stderr")
        assert record["count"] == task["count"]
    samples = [r for r in records("sample") if r["step"] == 3]
    assert samples
    for record in samples:
        args = [f"--prompt={record['prompt']}", "--temperature=0", "--max-new-tokens=5"]
        capsys.readouterr()
        assert _run(["sample", "out", *args, "--device=cpu", "--model-dtype=fp32"]) == 0
        assert capsys.readouterr().out == record["prompt"] + record["text"] + "\n"


def test_console(capsys):
    assert run(*EVERYTHING, steps=2) == 0
    lines = capsys.readouterr().out.splitlines()
    named = [line for line in lines if line.startswith("[V]") and "| other |" in line]
    assert len(named) == 1
    assert sum(bool(re.match(r"\[E\] step     2 \[.*%\] \| time: ", ln)) for ln in lines) == 2
    assert any("| arc | acc 0." in line and " ± 0." in line for line in lines)
    assert sum(bool(re.match(r"\[S\] step     2 \[.*%\] \| Hé", ln)) for ln in lines) == 1


def test_a_run_that_goes_on_makes_up_for_what_was_due(monkeypatch):
    """And repeats nothing: once for each step, whether it was stopped there or not."""
    with monkeypatch.context() as patch:
        signal_after(patch, 1)
        assert run(*EVERYTHING) == 128 + signal.SIGINT
    assert steps_of("task") == steps_of("sample") == []
    assert run(*EVERYTHING, "--continue", overwrite=None) == 0
    assert steps_of("task", metric="acc") == [2, 4]
    assert steps_of("eval", name="other") == [2, 4]


def test_a_signal_ends_tasks_between_two_batches(monkeypatch):
    """The run saves and leaves; what was cut short is made up for, from its beginning."""
    real, calls = Step.score, []

    def score(self, batch):
        calls.append(batch)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return real(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(Step, "score", score)
        assert run(*EVERYTHING) == 128 + signal.SIGINT
    assert len(calls) == 2 and steps_of("task") == []
    assert run(*EVERYTHING, "--continue", overwrite=None) == 0
    assert steps_of("task", metric="acc") == [2, 4]


def test_only_named_files():
    assert run("--eval-file=other=data/other.bin", "--keep-best=other/loss") == 0
    assert steps_of("eval", name="other") == steps_of("eval") == [2, 4]
    loss = records("eval")[-1]["loss"]
    done = f"Done. validation losses: other {loss:.6f}"
    assert any(r["message"] == done for r in records("info") if "message" in r)


def test_several_values_on_all_doors(tmp_path):
    config = make_config({"eval-file": ["a.bin", "x=b.bin"], "sample-prompt": "one"})
    assert (config.eval_pattern, config.eval_sets) == ("a.bin", {"x": "b.bin"})
    assert config.sample_prompt == ("one",)
    again = command_line(config)
    assert "--eval-file=a.bin" in again and "--eval-file=x=b.bin" in again
    shown = dict(option_rows(config, preset("tiny")))
    assert (shown["eval-file"], shown["eval-task"]) == ("a.bin x=b.bin", "none")
    path = tmp_path / "run.yaml"
    path.write_text("eval-file: [a.bin, x=b.bin]\nsample-prompt: one\n")
    assert make_config({}, path).eval_file == config.eval_file
    assert make_config({"eval-file": "data/x=1/a.bin"}).eval_pattern == "data/x=1/a.bin"


# ------------------------------------------------------------------------------------------------
# --keep-best


def checkpoints():
    return sorted(int(path.name.removeprefix("step_")) for path in Path("ckpt").glob("step_*"))


def test_the_best_checkpoint_stays_beside_the_newest(capsys):
    """With a learning rate at which the loss rises again."""
    options = {"ckpt_keep_n": 1, "ckpt_interval": 1, "learning_rate": 0.03, "steps": 8}
    best = ["--keep-best=loss", "--eval-file=data/eval.bin"]
    assert run(*best, **options, eval_every_n_steps=1) == 0
    losses = {r["step"]: r["loss"] for r in records("eval")[:-1]}
    step = min(losses, key=losses.get)
    note = json.loads(Path("ckpt/best.json").read_text())
    assert (note["step"], note["value"]) == (step, losses[step])
    assert 1 < step < 8, losses  # else the test shows nothing
    assert checkpoints() == sorted({1, step, 6, 7})  # 1 will be the first good one, 6 was followed
    assert f"Best so far: loss {losses[step]:.6g} at step {step}" in capsys.readouterr().out
    assert run(*best, "--continue", **options | {"steps": 10}, overwrite=None,
               eval_every_n_steps=1) == 0  # fmt: skip
    assert checkpoints() == sorted({1, step, 8, 9})


def test_the_note_of_another_run_is_not_overwritten(capsys):
    assert train(steps=1, eval_every_n_steps=1, keep_best="loss") == 0
    before = Path("ckpt/best.json").read_text()
    assert train(steps=1, keep_best="loss", overwrite=None, eval_every_n_steps=1) == 2
    assert Path("ckpt/best.json").read_text() == before
    assert train(steps=1, keep_best="loss", eval_every_n_steps=1) == 0
    assert Path("ckpt.old-1/best.json").read_text() == before
    assert Path("ckpt.old-1/step_00000001").is_dir()


# ------------------------------------------------------------------------------------------------
# What cannot work


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--eval-task=none.jsonl"], "task file 'none.jsonl' is not there"),
        (["--sample-prompt=" + "x" * 32], "has 32 tokens, --seq-len is 32: use a shorter one"),
        (["--keep-best=acc"], "--keep-best: the run measures no 'acc'; there are loss"),
        (["--eval-file=x=none"], "--eval-file: x needs files of its own, got none"),
        (["--eval-file=a", "--eval-file=b"], "--eval-file: only one may be without a name"),
        (["--eval-file=a=a", "--eval-file=a=b"], "--eval-file: two patterns are called a"),
        (["--eval-file=a=no.bin"], "no.bin"),
    ],
)
def test_refused_before_anything_is_written(args, message, capsys):
    assert run(*args) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("error:") == 1
    assert not any(Path(name).exists() for name in ("log.json", "out"))
    assert not Path("ckpt").exists() or not [*Path("ckpt").glob("step*")]


def test_options_that_do_nothing(capsys):
    assert run("--task-every=2", steps=1) == 0
    assert (
        "--task-every=2 has no effect without --eval-task or --sample-prompt"
        in capsys.readouterr().err
    )


def test_sent_elsewhere():
    common = {"step": 3, "time": 0.0}
    task = {"log": "task", "name": "arc", "metric": "acc", "value": 0.5, "stderr": 0.1, "count": 4,
            "seconds": 1.0, **common}  # fmt: skip
    assert numbers(task) == {"task/arc/acc": 0.5, "task/arc/acc_stderr": 0.1}
    assert numbers(task | {"stderr": None}) == {"task/arc/acc": 0.5}
    named = {"log": "eval", "name": "code", "loss": 2.0, "eval_tokens": 10, "duration_ms": 0}
    assert numbers(named | common)["eval/code/loss"] == 2.0
    sample = {"log": "sample", "prompt": "a", "text": "b", **common}
    assert numbers(sample) == {}
    assert text(sample) == ("sample-3", {"a": "b"})


def test_evaluations_that_are_repeated_count_once(monkeypatch):
    """A kill comes after the last evaluations, of which the last checkpoint knows nothing."""
    final = [*EVERYTHING, "--sample-prompt=ab"]
    assert run(*final, save_training_state=True, steps=3) == 0
    kept = without_undone(LogReader(Path("log.json")).new_records())

    def killed(self, *_, **__):
        raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "export", killed)
        with pytest.raises(RuntimeError, match="killed"):
            run(*final, save_training_state=True, steps=3)
    assert run(*final, "--continue", overwrite=None, steps=3) == 0
    again = without_undone(LogReader(Path("log.json")).new_records())
    for kind, value in (("eval", "loss"), ("task", "value"), ("sample", "text")):
        assert len([r for r in records(kind) if r["step"] == 3]) > len(
            [r for r in kept if r["log"] == kind and r["step"] == 3]
        )
        found = [[(r["step"], r[value]) for r in log if r["log"] == kind] for log in (kept, again)]
        assert found[0] == found[1] != []
