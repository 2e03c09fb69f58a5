"""Pairs of answers: their shapes, masks, token files, and how they stay together in batches."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from llmq.base.errors import DataError
from llmq.commands.cli import _run
from llmq.data.dataset import SequenceLayout
from llmq.data.document_index import DocumentIndex
from llmq.data.epoch_plan import Split
from llmq.data.loader import DataLoader
from llmq.data.tokens import MASKED_TARGET, TokenFile
from llmq.model.losses.preferences import PARTNER
from llmq.text.inputs import Portions
from tests.chat_templates import CHATML, assistant, system, user
from tests.pairs_data import write_pairs
from tests.text_data import interrupt_report, run, write_jsonl

T = 16
QUESTION = [user("q1"), assistant("a1"), user("q2")]
SHAPES = {
    "texts": {"prompt": "q", "chosen": "yes", "rejected": "no, no"},
    "messages": {
        "prompt": [user("q")],
        "chosen": [assistant("yes")],
        "rejected": [assistant("no, no")],
    },
    "prompt inside": {
        "prompt": "not read",
        "chosen": [user("q"), assistant("yes")],
        "rejected": [user("q"), assistant("no, no")],
        "messages": [user("q"), assistant("yes")],
    },
    "one message": {
        "conversations": [{"from": "human", "value": "q"}],
        "chosen": {"from": "gpt", "value": "yes"},
        "rejected": {"from": "gpt", "value": "no, no"},
    },
    "instruction": {"instruction": "q", "input": "", "chosen": "yes", "rejected": "no, no"},
}


def said(prompt, answer, start="<|im_start|>"):
    """The text that ChatML makes, and its trained part."""
    text = "".join(f"{start}{m['role']}\n{m['content']}<|im_end|>\n" for m in prompt)
    return f"{text}{start}assistant\n{answer}<|im_end|>\n", f"{answer}<|im_end|>\n"


def tokenized(folder, records, **how):
    folder.mkdir(exist_ok=True)
    (folder / "t.jinja").write_text(CHATML)
    if not (folder / "a.jsonl").exists():  # a run that goes on has to find the same file
        (folder / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    how = {"chat_template": str(folder / "t.jinja")} | how
    return run(folder / "a.jsonl", out=folder / "out", **how)


def documents(path):
    """Text, trained text, and whether it is the chosen one, of each document."""
    file, offsets = TokenFile(path), DocumentIndex.read(path).offsets
    found = []
    for start, end in itertools.pairwise(offsets):
        ids, mask = file.read_tokens(start, end - start), file.read_mask(start, end - start)
        chosen, mask[0] = bool(mask[0]), False
        found.append((bytes(ids.tolist()).decode(), bytes(ids[mask].tolist()).decode(), chosen))
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(tmp_path, shape):
    summary = tokenized(tmp_path, [SHAPES[shape]] * 2)
    pair = [(*said([user("q")], "yes"), True), (*said([user("q")], "no, no"), False)]
    assert documents(tmp_path / "out" / "train-000.bin") == pair * 2
    assert DocumentIndex.read(tmp_path / "out" / "train-000.bin").in_pairs
    trained = sum(len(part.encode()) for _, part, _ in pair * 2)
    assert (summary.counts.documents, summary.counts.trained, summary.warnings) == (4, trained, [])


def test_only_answers_are_trained(tmp_path):
    """Not what the assistant has said before, nor a system message; "all" trains all."""
    record = {"prompt": QUESTION, "chosen": "yes", "rejected": "no", "system": "s"}
    tokenized(tmp_path / "a", [record])
    prompt = [system("s"), *QUESTION]
    pair = [(*said(prompt, "yes"), True), (*said(prompt, "no"), False)]
    assert documents(tmp_path / "a" / "out" / "train-000.bin") == pair
    tokenized(tmp_path / "b", [record], train_on="all")
    text, trained, _ = documents(tmp_path / "b" / "out" / "train-000.bin")[0]
    assert trained == text[1:]
    tokenized(tmp_path / "c", [SHAPES["texts"]], chat_template="none")
    ids = TokenFile(tmp_path / "c" / "out" / "train-000.bin").read_tokens(0, 13)
    assert ids.tolist() == [*b"qyes", 256, *b"qno, no", 256]


LABELLED = [
    {"prompt": "q", "completion": "yes", "label": True},
    {"messages": [user("q2"), assistant("no, no")], "label": 0},
    {"instruction": "q3", "output": "perhaps", "label": "true"},
]


def test_labels_are_compared_with_answers_to_other_prompts(tmp_path):
    """The answer is that of the next record, or behind the last one the first record's."""
    tokenized(tmp_path, LABELLED, format="labels")
    path = tmp_path / "out" / "train-000.bin"
    asked = [("q", "yes", True), ("q2", "no, no", False), ("q3", "perhaps", True)]
    expected = [
        (*said([user(q)], answer), label)
        for (q, own, label), (_, other, _) in zip(asked, asked[1:] + asked[:1], strict=True)
        for answer in (own, other)
    ]
    assert documents(path) == expected
    with pytest.raises(DataError, match="has answers with labels, which --loss kto is for"):
        loader(path)
    for wrong, error in (
        ({"label": 1}, "nothing beside the label"),
        ({"label": 2}, "neither true nor"),
    ):
        with pytest.raises(DataError, match=error):
            bad = LABELLED[0] | {"prompt": None} | wrong
            tokenized(tmp_path / error[:2], [bad, LABELLED[1]], format="labels")


@pytest.mark.parametrize("documents_of_a_block", [1, 2, 5, 1024])
@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.4])
def test_labels_are_compared_alike_however_records_are_grouped(
    tmp_path, monkeypatch, documents_of_a_block, fraction
):
    """Blocks of any size, training and evaluation files, and runs that were interrupted."""
    records = [{"prompt": f"q{i}", "completion": f"a{i}", "label": i % 3 == 0} for i in range(12)]
    small = Portions(documents=documents_of_a_block, seconds=0)
    how = {"format": "labels", "eval_fraction": fraction, "portions": small}
    if documents_of_a_block < 5:
        interrupt_report(monkeypatch, 2)
        with pytest.raises(KeyboardInterrupt):
            tokenized(tmp_path, records, **how)
    tokenized(tmp_path, records, **how)
    sides = {side: [*(tmp_path / "out").glob(f"{side}-*.bin")] for side in ("train", "eval")}
    found = [text for paths in sides.values() for path in paths for text, _, _ in documents(path)]
    pairs = dict(zip(found[::2], found[1::2], strict=True))
    assert pairs == {
        said([user(f"q{i}")], f"a{i}")[0]: said([user(f"q{i}")], f"a{(i + 1) % 12}")[0]
        for i in range(12)
    }
    assert bool(sides["eval"]) == bool(fraction)


def test_a_single_answer_with_a_label_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"a.jsonl:1: the only record, and an answer with a label"):
        tokenized(tmp_path, LABELLED[:1], format="labels")
    assert not [*tmp_path.rglob("*.bin")]


def test_fields_of_other_formats_are_refused_or_told_of(tmp_path):
    """A field that decides about training is refused where nobody has chosen the format."""
    labelled = {"prompt": "q", "completion": "a", "label": True}
    with pytest.raises(DataError, match=r"'label', which --format prompt does not read: labels or"):
        tokenized(tmp_path / "a", [labelled])
    said = tokenized(tmp_path / "a", [labelled], format="prompt").warnings
    assert said == [
        f"'{tmp_path / 'a' / 'a.jsonl'}' has the field 'label', which --format prompt does not "
        "read: labels or classes does"
    ]
    with pytest.raises(DataError, match="'rejected', which --format messages does not read: pairs"):
        tokenized(tmp_path / "b", [{"messages": QUESTION, "rejected": "no"}])
    for name in ("score", "weight", "loss"):
        said = tokenized(tmp_path / name, [labelled | {"label": None, name: 0.5}], format="prompt")
        assert f"'{name}', which no format reads" in said.warnings[1]
    said = tokenized(tmp_path / "s", [{"messages": QUESTION, "system": "be kind"}]).warnings
    assert len(said) == 1 and "'system', which --format messages does not read" in said[0]
    said = tokenized(tmp_path / "t", [{"text": "a", "label": 1, "prompt": "q"}], chat_template=None)
    assert len(said.warnings) == 1 and "'label', which --format text does not" in said.warnings[0]
    assert not tokenized(tmp_path / "p", [SHAPES["texts"] | {"prompt": "q"}]).warnings


@pytest.mark.parametrize(
    "record, error",
    [
        ({"chosen": "a", "rejected": "b"}, "there is no prompt"),
        ({"prompt": "q", "chosen": "a", "rejected": None}, "no field 'rejected'"),
        ({"prompt": "q", "chosen": 1, "rejected": "b"}, "field 'chosen' is a int, not a list"),
        ({"prompt": "q", "chosen": [], "rejected": "b"}, "no message of the assistant"),
    ],
)
def test_bad_pairs_are_named(tmp_path, record, error):
    with pytest.raises(DataError, match=f"line 2: .*{error}|{error}"):
        tokenized(tmp_path, [SHAPES["texts"], record])
    assert not [*(tmp_path / "out").glob("*.bin*")]


# ------------------------------------------------------------------------------------------------
# In batches they stay together.

LENGTHS = [(4 + i % 6, 5 + i % 3) for i in range(24)] + [(8, 8), (9, 8), (8, 30)]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Pairs of which the last two are longer than a sequence; every id occurs once."""
    path = tmp_path_factory.mktemp("pairs") / "train.bin"
    return write_pairs(path, LENGTHS, 1 << 20)


def loader(path, packing="best-fit", **how):
    layout = SequenceLayout(packing=packing, document_mask=True, pairs="answers")
    how = {"seq_len": T, "micro_batch": 2, "seed": 3, "vocab_size": 1 << 20} | how
    how = {"inputs": (PARTNER,)} | how
    return DataLoader(path, layout=layout, **how)


def halves(batch):
    """Trained tokens of the halves of each learned pair, the chosen half first."""
    found = []
    for row in range(len(batch.inputs)):
        partner = batch.named["partner"][row].astype(int)
        for start in np.flatnonzero(partner):
            other = abs(partner[start]) - 1
            if batch.starts[row, start] == start and other > start:
                ids = []
                for first in (start, other):
                    own = (batch.starts[row] == first) & (partner != 0)
                    assert len(np.unique(partner[own])) == 1
                    assert abs(partner[own][0]) - 1 == (other if first == start else start)
                    targets = batch.targets[row][own]
                    assert targets[-1] == MASKED_TARGET
                    ids.append(tuple(targets[targets != MASKED_TARGET].tolist()))
                assert partner[start] > 0 > partner[other]
                if any(map(len, ids)):
                    found.append(tuple(ids))
    return found


def expected(path):
    file, offsets = TokenFile(path), DocumentIndex.read(path).offsets
    ids, mask = file.read_tokens(0, file.num_tokens), file.read_mask(0, file.num_tokens)
    mask[offsets[:-1]] = False
    own = [tuple(ids[a:b][mask[a:b]].tolist()) for a, b in itertools.pairwise(offsets)]
    fits = np.add(*np.transpose(LENGTHS)) <= T
    return [p for p, fit in zip(zip(own[::2], own[1::2], strict=True), fits, strict=True) if fit]


@pytest.mark.parametrize("packing", ["best-fit", "none"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_every_pair_is_in_one_row(pairs, packing, ranks):
    """Once an epoch, on however many ranks; what is longer than a row is left out, and said."""
    found = []
    for rank in range(ranks):
        with loader(pairs, packing, rank=rank, world_size=ranks) as one:
            found += [p for _ in range(one.batches_left) for p in halves(one.next_batch())]
            assert one.data.left_out == 2 and one.data.documents == 50
            assert "2 pairs are longer than a sequence" in " ".join(one.data.lines("train"))
    assert sorted(found) == sorted(expected(pairs))


def test_resumed_batches_are_the_same(pairs):
    with loader(pairs) as one, loader(pairs) as other:
        one.next_batch()
        other.set_state(one.state())
        for _ in range(one.batches_left):
            a, b = one.next_batch(), other.next_batch()
            np.testing.assert_array_equal(a.inputs, b.inputs)
            np.testing.assert_array_equal(a.named["partner"], b.named["partner"])


def test_a_split_divides_no_pair(pairs):
    sides = []
    for held_out in (False, True):
        split = Split(0.3, held_out)
        with loader(pairs, split=split, everything=held_out) as one:
            sides.append([p for _ in range(one.batches_left) for p in halves(one.next_batch())])
    assert sorted(sides[0] + sides[1]) == sorted(expected(pairs)) and all(sides)


def test_pairs_and_texts_are_not_taken_for_each_other(pairs, tmp_path):
    with pytest.raises(
        DataError, match="has pairs, of which one answer is to be preferred, which --loss"
    ):
        DataLoader(pairs, seq_len=T, micro_batch=2, seed=3, vocab_size=1 << 20)
    run(write_jsonl(tmp_path / "a.jsonl", ["text"] * 9), out=tmp_path / "out")
    with pytest.raises(
        DataError,
        match="has single documents, which --loss ce is for, and this run's loss needs pairs",
    ):
        loader(tmp_path / "out" / "train-000.bin")


def test_show_prints_them_side_by_side(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    record = {"prompt": "Which?", "chosen": "This one", "rejected": "That one"}
    tokenized(tmp_path, [record, SHAPES["texts"]])
    assert _run(["show", str(tmp_path / "out"), "--limit", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("--- document 1 of 4 in ")
    assert lines[1:4] == ["<|im_start|>user", "Which?<|im_end|>", "<|im_start|>assistant"]
    assert [line.split() for line in lines[5:7]] == [
        ["---", "chosen", "---", "---", "rejected", "---"],
        ["⟦This", "one<|im_end|>", "⟦That", "one<|im_end|>"],
    ]
    assert lines[-3] == "4 documents" and "document 3" not in " ".join(lines)
