"""`llmq eval`: the numbers of lm-eval, tasks in every published shape, batches, bad input."""

from __future__ import annotations

import gzip
import json
import math
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from llmq.base.dtypes import F32
from llmq.base.errors import DataError
from llmq.commands.cli import _run
from llmq.run.evaluate import Fleet, ask_model, batch_shape, scores_of
from llmq.run.sampling import open_model
from llmq.runtime.machine import choose_machine
from llmq.text.scoring import Encoder, Request, make_batches, pack_batches
from llmq.text.tasks import Task, Text, read_tasks
from llmq.text.tokenizer import ByteTokenizer
from tests.eval_data import KINDS, POSITIONS, records, write_model, write_tasks
from tests.runs import make_workplace, train

GOLDEN = json.loads((Path(__file__).parent / "golden" / "lm_eval.json").read_text())
HOW = {"seq_len": None, "device": "cpu", "model_dtype": "fp32"}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the two models of eval_data and the file of each kind."""
    folder = tmp_path_factory.mktemp("eval")
    write_tasks(folder)
    for name, adds_bos in (("plain", False), ("bos", True)):
        (folder / name).mkdir()
        write_model(folder / name, adds_bos=adds_bos)
    return folder


def write(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


# ------------------------------------------------------------------------------------------------
# Numbers


@pytest.mark.parametrize("model", ["plain", "bos"])
def test_numbers_are_those_of_lm_eval(place, model):
    """golden/lm_eval.json; kinds are recognised. Two threads share the batches."""
    tasks = read_tasks([str(place / f"{kind}.jsonl") for kind in KINDS])
    asked, likelihoods = ask_model(str(place / model), tasks, batch_tokens=256, gpus=2, **HOW)
    first = 0
    for of_task in asked:
        expected = GOLDEN[model][of_task.task.kind]
        got = likelihoods[first : first + len(of_task.requests)]
        first += len(of_task.requests)
        if of_task.task.is_text:
            got = np.add.reduceat(got, of_task.starts[:-1])
        # Sums of up to 300 losses of about 7, which torch adds up in F32.
        assert got == pytest.approx(np.array(expected["likelihoods"]), rel=3e-7, abs=5e-5)
        scores = {}
        for score in scores_of([of_task], likelihoods[first - len(of_task.requests) : first]):
            scores[score.metric] = score.value
            if score.stderr is not None:
                scores[f"{score.metric}_stderr"] = score.stderr
        scores.pop("perplexity", None)  # lm-eval has none by token
        # Relative, of word_perplexity: exp of 26 with the error above.
        assert scores == pytest.approx(expected["metrics"], rel=1e-6)


def test_what_is_shared_and_how_batches_are_made_changes_nothing(place):
    tasks = read_tasks([str(place / "mmlu.jsonl"), str(place / "boolq.jsonl")])
    one, two = (
        ask_model(str(place / "plain"), tasks, batch_tokens=size, gpus=1, **HOW)[1]
        for size in (16, 4096)
    )
    assert one == pytest.approx(two, rel=1e-6)  # products of other shapes, summed in another order


def test_devices_have_the_memory_of_the_plan(place):
    requests = [Request(np.arange(n, dtype=np.int32), 1) for n in (50, 20, 19, 5)]
    batches = make_batches(requests, partial(batch_shape, 64, POSITIONS))
    with open_model(str(place / "plain")) as (config, read, _):
        machine = choose_machine("cpu", 1)
        with Fleet(machine, config, F32, batches, read) as fleet:
            fleet.likelihoods(4, lambda tokens: None)
            assert fleet._scorers[0].dev.sizes() == fleet._sizes


def test_checkpoint_and_export_get_the_same_numbers(tmp_path, monkeypatch):
    monkeypatch.chdir(make_workplace(tmp_path))
    assert train(steps=2, save_training_state=True) == 0
    write(Path("text.jsonl"), {"text": "abc" * 50}, {"text": "é"})
    found = []
    for model in ("out", "ckpt"):
        args = ["--task=text.jsonl", "--device=cpu", "--model-dtype=fp32", f"--out={model}.json"]
        assert _run(["eval", model, *args]) == 0
        found.append(json.loads(Path(f"{model}.json").read_text())["tasks"])
    assert found[0] == found[1]
    assert found[0]["text"]["count"] == 2
    assert 200 < found[0]["text"]["perplexity"] < 400  # of 257 ids, after two steps


def test_report(place, capsys):
    out = place / "report.json"
    args = ["--device=cpu", "--limit=4", "--seq-len=48", f"--out={out}"]
    tasks = [f"--task={place / name}.jsonl" for name in ("piqa", "text")]
    assert _run(["eval", str(place / "plain"), *tasks, *args]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["task", "metric", "value", "stderr", "count"]
    named = [tuple(line.split()[:2]) for line in lines[1:]]
    metrics = ("perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte")
    assert named == [("piqa", "acc"), ("piqa", "acc_norm"), *(("text", m) for m in metrics)]
    report = json.loads(out.read_text())
    assert report["tasks"]["piqa"]["count"] == report["limit"] == 4
    assert f"{report['tasks']['piqa']['acc']:.4f}" == lines[1].split()[2]


# ------------------------------------------------------------------------------------------------
# Requests and batches


def test_windows_of_a_long_text():
    """Every token once, the first behind the end of a text; the last window is as long as others,
    so that its tokens see more."""
    task = Task("t", "text", Path("t"), (Text("abcdefghij", "t"),))
    asked = Encoder(ByteTokenizer(), longest=4).ask(task)
    got = [([*r.tokens], r.count) for r in asked.requests]
    a = ord("a")
    assert got == [
        ([256, *range(a, a + 4)], 4),
        ([*range(a + 3, a + 8)], 4),
        ([*range(a + 5, a + 10)], 2),
    ]


def test_requests_with_the_same_inputs_share_a_row():
    tokens = [[1, 2, 3, 4], [1, 2, 3, 5], [9, 2, 3, 4], [1, 2, 3, 6, 7]]
    requests = [Request(np.array(t, np.int32), 2) for t in tokens]
    (batch,) = make_batches(requests, lambda length, left: (left, 4))
    assert batch.inputs().tolist() == [[1, 2, 3, 6], [1, 2, 3, 0], [9, 2, 3, 0]]
    assert [[i for i, _ in sequence.asked] for sequence, _, _ in batch.placed] == [[3], [0, 1], [2]]
    assert batch.targets(0).tolist() == [
        [-100, -100, 6, 7],
        [-100, 3, 4, -100],
        [-100, 3, 4, -100],
    ]
    nothing = [-100] * 4
    assert batch.targets(1).tolist() == [nothing, [-100, 3, 5, -100], nothing]
    losses = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert batch.likelihoods(1, losses) == {1: -(5 + 6)}


def test_several_sequences_in_a_row():
    requests = [Request(np.arange(n + 1, dtype=np.int32), 2) for n in (3, 5, 2, 4, 3)]
    one, two = pack_batches(requests, (2, 8))
    x = -100
    assert one.inputs().tolist() == [[0, 1, 2, 3, 4, 0, 0, 0], [0, 1, 2, 3, 0, 1, 2, 0]]
    assert one.starts().tolist() == [[0] * 5 + [5] * 3, [0] * 4 + [4] * 3 + [7]]
    assert one.targets(0).tolist() == [[x, x, x, 4, 5, x, x, x], [x, x, 3, 4, x, 2, 3, x]]
    # The two of 3 tokens are the same, and both requests are asked in one round each.
    assert one.count == 2 and one.targets(1).tolist() == [[x] * 8, [x] * 5 + [2, 3, x]]
    assert two.inputs().tolist() == [[0, 1] + [0] * 6, [0] * 8]
    assert two.starts().tolist() == [[0, 0] + [2] * 6, [0] * 8]
    losses = np.arange(16, dtype=np.float32).reshape(2, 8)
    assert one.likelihoods(0, losses) == {0: -(13 + 14), 1: -(3 + 4), 3: -(10 + 11)}


def test_shapes_waste_little():
    for length in range(1, 1000):
        B, T = batch_shape(256, 1000, length, 99)
        assert length <= T and T % 4 == 0 and (1.25 * length >= T or T == 16)
        assert max(1, min(256 // T, 99)) == B
    assert batch_shape(256, 50, 50, 3) == (3, 52)


# ------------------------------------------------------------------------------------------------
# Files


def test_shapes_of_other_publishers(tmp_path):
    """AI2's own files, BoolQ's own, letters of MMLU; Parquet."""
    pairs = [{"text": "one", "label": "A"}, {"text": "two", "label": "B"}]
    ai2 = {"question": {"stem": "How many?", "choices": pairs}, "answerKey": "B"}
    path = write(tmp_path / "ai2.jsonl", ai2)
    with pytest.raises(DataError, match="a file of ARC looks like one of OpenBookQA here: say"):
        read_tasks([str(path)])
    (arc,) = read_tasks([f"arc_easy={path}"])
    (question,) = arc.items
    assert question.gold == 1
    assert question.choices[1] == ("Question: How many?\nAnswer:", " two", 3)
    (open_book,) = read_tasks([f"openbookqa={path}"])
    assert open_book.items[0].choices[0] == ("How many?", " one", 3)

    own = {"question": "is it", "passage": "It is.", "answer": True, "title": "x"}
    (boolq,) = read_tasks([str(write(tmp_path / "boolq.jsonl", own))])
    assert boolq.items[0].gold == 1
    assert boolq.items[0].choices[0] == ("It is.\nQuestion: is it?\nAnswer:", " no", 2)

    letters = {"question": "q", "choices": ["w", "x", "y", "z"], "answer": "C"}
    (mmlu,) = read_tasks([str(write(tmp_path / "mmlu.jsonl", letters))])
    assert mmlu.items[0].gold == 2
    assert mmlu.items[0].choices[0].context == "q\nA. w\nB. x\nC. y\nD. z\nAnswer:"

    pyarrow, parquet = (pytest.importorskip(f"pyarrow{n}") for n in ("", ".parquet"))
    made = {kind: tmp_path / f"{kind}.parquet" for kind in KINDS}
    for kind, path in made.items():
        parquet.write_table(pyarrow.Table.from_pylist(records(kind)), path)
    texts = write_tasks(tmp_path)
    of_both = [read_tasks([str(p) for p in paths.values()]) for paths in (made, texts)]
    assert [t.kind for t in of_both[0]] == list(KINDS)
    for one, other in zip(*of_both, strict=True):
        strip = [(i[:-1]) for i in one.items], [(i[:-1]) for i in other.items]
        assert strip[0] == strip[1]


def test_text_files_and_names(tmp_path):
    (tmp_path / "a.txt").write_text("A whole\nfile.")
    write(tmp_path / "b.jsonl", {"text": ""}, {"text": "b"})
    one, two = read_tasks([str(tmp_path / "a.txt"), f"text={tmp_path / 'b.jsonl'}"])
    assert [one.name, two.name] == ["a", "b"]
    assert [item.text for item in (*one.items, *two.items)] == ["A whole\nfile.", "b"]
    (alone,) = read_tasks([str(tmp_path / "a.txt")])
    assert alone.name == "text"


def test_a_text_has_the_characters_that_tokenize_reads(tmp_path, capsys):
    """Line ends as they are, without a byte order mark, unpacked; half a character is told of."""
    written = "a\r\nb\rc\n" * 50_000
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + written.encode())
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(written.encode()))
    for name in ("a.txt", "b.txt.gz"):
        (task,) = read_tasks([str(tmp_path / name)])
        assert [item.text for item in task.items] == [written]
    (tmp_path / "c.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match="is not UTF-8 text at byte 0: convert"):
        read_tasks([str(tmp_path / "c.txt")])
    (task,) = read_tasks([str(write(tmp_path / "d.jsonl", {"text": "a\ud83d"}, {"text": "b"}))])
    assert [item.text for item in task.items] == ["a\ufffd", "b"]
    assert f"warning: {tmp_path / 'd.jsonl'}:1 has half a character" in capsys.readouterr().err


def test_bad_input(place, tmp_path, capsys):
    piqa, goal = records("piqa")[0], {"goal": "g", "sol1": "a", "sol2": "b"}
    empty = write(tmp_path / "empty.jsonl")
    (tmp_path / "b").mkdir()
    write(tmp_path / "b" / "empty.jsonl", piqa)
    write(tmp_path / "twice.jsonl", piqa)
    broken = tmp_path / "broken.jsonl"
    broken.write_text(json.dumps(piqa) + "\n{\n")
    long = write(tmp_path / "long.jsonl", {**piqa, "sol1": "many words " * 99})
    blank = write(tmp_path / "blank.jsonl", {**records("winogrande")[0], "sentence": "none"})
    key = write(tmp_path / "key.jsonl", {**records("arc")[0], "answerKey": "Z"})
    nothing = write(tmp_path / "nothing.jsonl", {"goal": "x"})
    test = write(tmp_path / "test.jsonl", {**goal, "label": -1})
    endless = write(tmp_path / "endless.jsonl", {**goal, "label": math.inf})
    uneven = {"text": ["ice", "steam"], "label": ["A"]}
    uneven = write(tmp_path / "uneven.jsonl", {**records("arc")[0], "choices": uneven})
    number = write(tmp_path / "number.jsonl", {**goal, "goal": 7, "label": 0})
    for task, message in (
        (tmp_path / "no", "task file '"),
        ("~nobody-here/x.jsonl", "task file '"),
        (empty, "has no records"),
        (f"arc={place / 'piqa.jsonl'}", "not as arc has it: field 'answerKey' is missing"),
        (nothing, "fields goal are those of no task: say which it is, as in --task KIND=FILE"),
        (test, "test.jsonl:1: not as piqa has it: field 'label' is -1, no answer among 2: test f"),
        (endless, "field 'label' is inf, no answer among 2"),
        (uneven, "'choices' has 2 texts, but 1 labels"),
        (number, "field 'goal' is a int"),
        (broken, "broken.jsonl:2: not readable as JSON"),
        (long, "tokens, more than the 64 of a sequence"),
        (blank, "field 'sentence' has no blank"),
        (key, "field 'answerKey' is 'Z', not among"),
        ("arcs=x", "a task is FILE or KIND=FILE with one of hellaswag"),
    ):
        assert _run(["eval", str(place / "plain"), f"--task={task}", "--device=cpu"]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1), err
        assert err.startswith("error: ") and message in err
    again = [f"--task={tmp_path / 'twice.jsonl'}", f"--task={tmp_path / 'b' / 'empty.jsonl'}"]
    assert _run(["eval", str(place / "plain"), *again, "--device=cpu", "--limit=1"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()][1::2] == [
        "twice",
        "empty",
    ]
    assert _run(["eval", str(place / "plain"), again[0], again[0], "--device=cpu"]) == 2
    assert "two tasks are called 'twice'" in capsys.readouterr().err
    assert _run(["eval", str(place / "plain"), again[0], "--device=cpu", "--seq-len=65"]) == 2
    assert "--seq-len: 65 exceeds the model's 64 positions" in capsys.readouterr().err


def test_damaged_weights(place, tmp_path, capsys):
    from safetensors.numpy import load_file, save_file

    model = shutil.copytree(place / "plain", tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    weights["lm_head.weight"][:] = 3e38  # NaN itself is found when it is loaded
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    out = tmp_path / "out.json"
    task = f"--task={place / 'piqa.jsonl'}"
    assert _run(["eval", str(model), task, "--device=cpu", f"--out={out}"]) == 2
    assert "not finite numbers" in capsys.readouterr().err
    assert not out.exists()
