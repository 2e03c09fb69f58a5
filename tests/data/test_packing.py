"""Documents in sequences: nothing lost, nothing twice, nothing cut that fits; masks; weights."""

from __future__ import annotations

import itertools
import json
import re

import numpy as np
import pytest

from llmq.base.errors import ConfigError, DataError
from llmq.commands.cli import _run
from llmq.data.dataset import SequenceLayout
from llmq.data.document_file import documents_path
from llmq.data.epoch_plan import Split, shares_of
from llmq.data.loader import DataLoader
from llmq.data.packing import best_fit, cut_documents
from llmq.data.tokens import TokenFile, TokenWriter
from llmq.options.option_types import split_weight, split_weights
from llmq.options.options_io import make_config
from llmq.options.presets import preset
from llmq.plan.epoch import SAMPLE, data_record
from tests.runs import flags, make_workplace, records, train

T, VOCAB = 16, 10**6
# Lengths of the documents in each file: shorter than a sequence, as long, longer by one (whose last
# token is predicted, but predicts nothing), longer by far, and some that have nothing to predict.
LENGTHS = {"a": [5, 3, 16, 9, 1, 17, 2], "b": [33, 40, 7, 7, 7, 4, 12], "c": [1, 6], "d": []}
PACKINGS = [("best-fit", True), ("best-fit", False), ("none", True), ("concat", True)]


def write(path, lengths, start=0, mask=None, with_documents=True):
    """A file whose tokens count up from start."""
    tokens = np.arange(start, start + sum(lengths))
    with TokenWriter(
        path, VOCAB, with_masks=mask is not None, with_documents=with_documents
    ) as writer:
        writer.write(tokens, mask, np.cumsum(lengths) if with_documents else ())
    return path


@pytest.fixture
def data(tmp_path):
    """Every token of all files has a number of its own."""
    start = 0
    for name, lengths in LENGTHS.items():
        write(tmp_path / f"{name}.bin", lengths, start)
        start += sum(lengths)
    return tmp_path / "*.bin"


def documents():
    """The tokens of each document of `data`."""
    edges = np.cumsum([0, *(n for lengths in LENGTHS.values() for n in lengths)])
    return [np.arange(*pair) for pair in itertools.pairwise(edges)]


def loader(data, packing="best-fit", masked=True, *, rank=0, world_size=1, micro_batch=2, **kwargs):
    kwargs.setdefault("drop_last", not kwargs.get("everything", False))
    layout = {"packing": packing, "document_mask": masked}
    given = ("weights", "separator", "data_order")
    layout |= {k: kwargs.pop(k) for k in given if k in kwargs}
    return DataLoader(
        data, seq_len=T, micro_batch=micro_batch, seed=kwargs.pop("seed", 5), vocab_size=VOCAB,
        rank=rank, world_size=world_size, layout=SequenceLayout(**layout), **kwargs,
    )  # fmt: skip


def drain(one):
    """Read all remaining batches of this epoch."""
    return [one.next_batch() for _ in range(one.batches_left)]


def pairs(batches):
    """(input, target) of every position that is trained."""
    found = []
    for batch in batches:
        kept = batch.targets >= 0
        found += zip(batch.inputs[kept].tolist(), batch.targets[kept].tolist(), strict=True)
    return found


def same(one, other):
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)


# ------------------------------------------------------------------------------------------------
# Packing


@pytest.mark.parametrize("seed", range(6))
def test_it_is_best_fit_decreasing(seed):
    """The result is what one would write down: as many rows, as full, as one piece after the other
    gives."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 33, 400)
    room: list[int] = []
    for length in np.sort(lengths)[::-1].tolist():
        fitting = [r for r in room if r >= length]
        if fitting:
            room[room.index(min(fitting))] -= length
        else:
            room.append(32 - length)
    rows = best_fit(lengths, 32)
    in_slots = np.sort(lengths)[::-1][rows.slots]
    sums = np.add.reduceat(in_slots, rows.edges[:-1])
    assert sorted(32 - sums) == sorted(room)


def test_pieces_of_documents():
    lengths = np.array([1, 2, 16, 17, 18, 32, 33, 34])
    starts = np.cumsum(lengths) - lengths
    pieces = cut_documents(3, starts, lengths, 16)
    found = list(zip((pieces.start - starts[[1, 2, 3, 4, 4, 5, 5, 6, 6, 7, 7, 7]]).tolist(),
                     pieces.length.tolist(), pieces.goes_on.tolist(), strict=True))  # fmt: skip
    whole, last = (0, 16, True), (16, 16, True)
    expected = [(0, 2, False), (0, 16, False), whole, whole, (16, 2, False)]
    expected += [whole, (16, 16, False), whole, last, whole, last, (32, 2, False)]
    assert found == expected
    assert set(pieces.file.tolist()) == {3} and (pieces.documents, pieces.cut) == (8, 5)


@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(("packing", "masked"), PACKINGS)
def test_every_token_of_every_document_is_predicted_once(
    data, packing, masked, world_size, everything
):
    """All tokens in training, as batches of one sequence leave none out."""
    if packing == "concat" and not everything:
        pytest.skip("windows leave out the ends of files")
    ranks = [
        loader(
            data,
            packing,
            masked,
            rank=r,
            world_size=world_size,
            micro_batch=1,
            everything=everything,
        )
        for r in range(world_size)
    ]
    found = []
    for one in ranks:
        with one:
            found += pairs(drain(one))
    expected = [pair for doc in documents() for pair in itertools.pairwise(doc.tolist())]
    if not masked:  # the end of a document predicts the next one of its row
        ends = {int(doc[-1]) for doc in documents() if len(doc)}
        found = [pair for pair in found if pair[0] not in ends]
    assert len(set(found)) == len(found)
    if everything or world_size == 1:
        assert sorted(found) == sorted(expected)
    else:
        assert set(found) <= set(expected)


@pytest.mark.parametrize("packing", ["best-fit", "none"])
def test_no_document_is_cut_that_fits(data, packing):
    with loader(data, packing, micro_batch=1) as one:
        batches = drain(one)
    rows = [set(batch.inputs[0].tolist()) for batch in batches]
    for doc in documents():
        inside = [row for row in rows if row.intersection(doc.tolist())]
        if 1 < len(doc) <= T:
            assert len(inside) == 1 and set(doc.tolist()) <= inside[0]
        else:
            assert len(inside) == -(-(len(doc) - 1) // T)
    if packing == "none":
        assert len(rows) == sum(-(-(len(doc) - 1) // T) for doc in documents())


@pytest.mark.parametrize(("packing", "masked"), [p for p in PACKINGS if p[1]])
def test_starts_and_padding(data, packing, masked):
    """Positions of one document share a start, which is their first one; padding is one of them."""
    number = np.concatenate([np.full(len(doc), i) for i, doc in enumerate(documents())])
    with loader(data, packing, masked, everything=True) as one:
        batches = drain(one)
        total = one.tokens(one.batches_per_epoch)
    padding = 0
    for batch in batches:
        assert batch.starts.dtype == np.int32 and batch.starts.shape == (2, T)
        for inputs, targets, starts in zip(*batch[:3], strict=True):
            assert (starts <= np.arange(T)).all() and (np.diff(starts) >= 0).all()
            assert (starts[starts] == starts).all()
            for t in range(T):
                document = number[inputs[starts[t] : t + 1]]
                trained = targets[t] >= 0
                if trained:
                    assert (document == document[0]).all()
                    assert targets[t] == inputs[t] + 1 and number[targets[t]] == document[0]
                last = number[inputs[t]] != number[inputs[t] + 1 : inputs[t] + 2]
                assert not (last.any() and trained)
        padding += batch.padding
    assert padding == sum(batch.inputs.size for batch in batches) - total


def test_masks_of_tokens(tmp_path):
    """A document of masked tokens is left out; the bit of the target decides, also at its start."""
    lengths = [4, 4, 4]
    mask = np.array([0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 1, 0], bool)  # of the second one only the first
    path = write(tmp_path / "a.bin", lengths, mask=mask)
    for packing, masked in PACKINGS[:3]:
        with loader(path, packing, masked, micro_batch=1) as one:
            batches = drain(one)
            assert (one.data.documents, one.data.untrained) == (3, 1)
            assert any("1 of 3 documents (x) have no token" in line for line in one.data.lines("x"))
        found = sorted(pairs(batches))
        across = [(3, 8)] if (3, 8) in found else [(11, 0)] if (11, 0) in found else []
        assert found == sorted([(1, 2), (2, 3), (8, 9), (9, 10), *(across if not masked else [])])
        assert masked or across in ([(3, 8)], [])  # token 0 is masked, token 8 is not


@pytest.mark.parametrize(("packing", "masked"), PACKINGS[:3])
def test_parts_without_a_trained_token_are_left_out(tmp_path, packing, masked):
    """The parts are of a document that is cut; a part's last token predicts the first one of the
    next part."""
    lengths = [5, 4 * T + 3, 2 * T + 1, 6]
    trained = [2, 5 + 2 * T, 5 + 4 * T + 1, 5 + 4 * T + 3 + 2 * T, sum(lengths) - 1]
    mask = np.isin(np.arange(sum(lengths)), trained)
    path = write(tmp_path / "a.bin", lengths, mask=mask)
    with loader(path, packing, masked, micro_batch=1) as one:
        batches = drain(one)
        assert (one.data.documents, one.data.cut, one.data.untrained_parts) == (4, 2, 4)
        pieces = one.data.plan.sources[0].pieces
        assert pieces.start.tolist() == [0, 5 + T, 5 + 4 * T, 5 + 4 * T + 3 + T, 105]
        expected = " (4 parts without a token to train on left out)"
        assert expected in one.data.lines("x")[0]
    assert {(t - 1, t) for t in trained} <= set(pairs(batches))
    if masked:
        assert len(pairs(batches)) == len(trained)


LONG = {  # which of the first tokens of parts are left, what is lost, and what is said
    None: (
        [0, 5, 5 + 2 * T, 5 + 3 * T],
        T - 1,
        "1 parts of longer documents have no question and are",
    ),
    "cut": ([0, 5, 5 + T, 5 + 2 * T, 5 + 3 * T], 0, None),
    "truncate": ([0, 5, 5 + 3 * T], T + 4, "2 parts of longer documents are left out (--long tr"),
    "drop": ([0, 5 + 3 * T], 2 * T + 2, "1 documents are longer than a sequence and are left out"),
}


@pytest.mark.parametrize("long", LONG)
@pytest.mark.parametrize("packing", ["best-fit", "none"])
def test_long_conversations(tmp_path, long, packing):
    """A question of 3 tokens, an answer to the end of the second part, a second turn in the third.

    The document behind it fits with its last token as a target only.
    """
    lengths = [5, 3 * T, T + 1]
    mask = np.ones(sum(lengths), bool)
    begins = np.cumsum([0, *lengths])
    mask[begins[:3]] = False
    mask[5 : 5 + 3] = False
    mask[5 + 2 * T : 5 + 2 * T + T - 5] = False
    path = write(tmp_path / "a.bin", lengths, mask=mask)
    starts, lost, said = LONG[long]
    layout = SequenceLayout(packing=packing, document_mask=True, long=long)
    how = {"seq_len": T, "micro_batch": 1, "seed": 1, "vocab_size": VOCAB, "layout": layout}
    with DataLoader(path, **how) as one:
        data = one.data
        assert sorted(data.plan.sources[0].pieces.start.tolist()) == starts
        total = mask.sum()
        lines = [line for line in data.lines("x") if "left out" in line]
    if said is None:
        assert lines == [] and (data.left_out, data.lost) == (0, 0)
        return
    assert lines == [lines[0]] and lines[0].startswith(f"WARNING: {said}")
    assert f", {100 * lost / total:.2f} % of all trained tokens (x)" in lines[0]
    assert (data.record()["lost"], data.trained) == (lost, total)


@pytest.mark.parametrize("mask", [None, np.arange(4 * T) >= T])
def test_what_has_no_question_at_all_is_cut_as_before(tmp_path, mask):
    path = write(tmp_path / "a.bin", [T, 3 * T], mask=mask)
    with loader(path, micro_batch=1) as one:
        assert len(one.data.plan.sources[0].pieces) == 3 + (mask is None) and not one.data.left_out


# ------------------------------------------------------------------------------------------------
# Order and resuming


@pytest.mark.parametrize(("packing", "masked"), PACKINGS)
@pytest.mark.parametrize("weighted", [False, True])
def test_order_does_not_depend_on_ranks(data, tmp_path, packing, masked, weighted):
    """Rank r of W has row r of each group; one rank with W times the batch has the same rows."""
    kwargs = {}
    if weighted:
        data, kwargs = [tmp_path / "a.bin", tmp_path / "b.bin"], {"weights": (3.0, 1.0)}
    elif packing == "concat":
        pytest.skip("windows without weights: see test_shuffle")
    with loader(data, packing, masked, micro_batch=2, **kwargs) as one:
        rows = [row for _ in range(3) for b in drain_epoch(one) for row in b.inputs.tolist()]
        count = one.data.sequences
    ranks = [
        loader(data, packing, masked, rank=r, world_size=2, micro_batch=1, **kwargs) for r in (0, 1)
    ]
    shared = [
        b.inputs[0].tolist()
        for _ in range(3)
        for both in zip(*map(drain_epoch, ranks), strict=True)
        for b in both
    ]
    assert shared == rows and len(rows) == 3 * (count // 2 * 2)


def drain_epoch(one):
    """The rest of this epoch; afterwards the next one begins."""
    batches = drain(one)
    one.advance_epoch()
    return batches


RESUMED = [  # each kind of source of sequences, in each order
    {"packing": "best-fit"},
    {"packing": "none"},
    {"packing": "best-fit", "weights": (3.0, 1.0)},
    {"packing": "concat", "weights": (3.0, 1.0)},
    {"packing": "concat"},
    {"packing": "concat", "data_order": "llmq"},
]


@pytest.mark.parametrize("layout", RESUMED, ids=str)
@pytest.mark.parametrize("drop_last", [False, True])
def test_resume_at_every_batch(data, tmp_path, layout, drop_last, monkeypatch):
    """Also at the ends of epochs: by a loader of another seed, which reads nothing before, although
    the first one has read ahead."""
    if "weights" in layout:
        data = [tmp_path / "a.bin", tmp_path / "b.bin"]
    how = layout | {"rank": 1, "world_size": 2, "micro_batch": 1, "drop_last": drop_last}
    states, batches = [], []
    with loader(data, **how) as one:
        for _ in range(3):
            while one.batches_left:
                states.append(one.state())
                batches.append(one.next_batch())
            states.append(one.state())
            batches.append(None)
            one.advance_epoch()
    assert len(states) > 9
    with loader(data, seed=9, **how) as two:
        for i, state in enumerate(states):
            with monkeypatch.context() as patch:
                patch.setattr(TokenFile, "read_tokens_into", None)
                two.set_state(state)
                assert two.state() == state
            for batch in batches[i : i + 3]:  # and goes on, into the next epoch
                assert bool(two.batches_left) == (batch is not None)
                two.advance_epoch() if batch is None else same(two.next_batch(), batch)


def test_epochs_differ(data):
    """Other documents stand together, in another order."""
    with loader(data, micro_batch=1, seed=1) as one:
        first, second = ([b.inputs[0].tolist() for b in drain_epoch(one)] for _ in range(2))
    assert first != second and sorted(map(sorted, first)) != sorted(map(sorted, second))


def test_state_of_another_packing_is_refused(data, tmp_path):
    with loader(data, "best-fit") as one:
        state = one.state()
    with loader(data, "best-fit", False) as one:
        one.set_state(state)  # the mask changes no place
    message = "documents, --packing, --data-order or the weights of --train-file changed since the"
    for packing in ("none", "concat"):
        with loader(data, packing) as one, pytest.raises(DataError, match=message):
            one.set_state(state)
    size = (tmp_path / "a.bin").stat().st_size
    write(tmp_path / "a.bin", [*LENGTHS["a"][:-2], 18, 1])
    assert (tmp_path / "a.bin").stat().st_size == size
    with loader(data, "best-fit") as one, pytest.raises(DataError, match=message):
        one.set_state(state)


def test_a_split_is_of_documents(data):
    sides = []
    for held_out in (False, True):
        with loader(data, split=Split(0.3, held_out), everything=True) as one:
            sides.append({token for pair in pairs(drain(one)) for token in pair})
            assert one.data.documents == (len(documents()) - 4, 4)[held_out]
    assert not sides[0] & sides[1]
    assert sides[0] | sides[1] == {t for doc in documents() if len(doc) > 1 for t in doc.tolist()}


# ------------------------------------------------------------------------------------------------
# Weights


@pytest.mark.parametrize(("packing", "masked"), [*PACKINGS, ("concat", False)])
def test_exact_shares(tmp_path, packing, masked):
    """Over an epoch and, to within a sequence, everywhere in it; no sequence before its turn."""
    write(tmp_path / "a.bin", [10, 12] * 40)
    write(tmp_path / "b.bin", [16] * 10, start=5000)
    paths = [tmp_path / "a.bin", tmp_path / "b.bin"]
    with loader(paths, packing, masked, micro_batch=1, weights=(1, 3)) as one:
        count = one.data.sequences
        counts = [source.count for source in one.data.plan.sources]
        assert count == sum(counts)
        seen = []
        for _ in range(4):
            of_b = np.array([b.inputs[0, 0] >= 5000 for b in drain_rows(one, seen)])
            assert of_b.sum() == one.data.plan.shares[1]
            assert abs(of_b.sum() - 0.75 * count) < 1
            assert (abs(np.cumsum(of_b) - 0.75 * np.arange(1, count + 1)) <= 1).all()
        for which, side in enumerate((lambda x: x < 5000, lambda x: x >= 5000)):
            rows = [row for row in seen if side(row[0])]
            for begin in range(0, len(rows) - counts[which] + 1, counts[which]):
                assert len(set(rows[begin : begin + counts[which]])) == counts[which]
    share = one.data.plan.shares[1]
    line = f"  {paths[1]}: {100 * share / count:.2f} % are {share}, {share / counts[1]:.2f} passes "
    assert one.data.lines("train")[-1] == f"{line}over its {counts[1]}"


def drain_rows(one, seen):
    batches = drain_epoch(one)
    seen += [tuple(batch.inputs[0].tolist()) for batch in batches]
    return batches


def test_shares_by_largest_remainders():
    assert shares_of(10, (1, 1, 1)) == [4, 3, 3]
    assert shares_of(1000, (0.7, 0.3)) == [700, 300]
    for total in (7, 100, 12345):
        shares = shares_of(total, (5, 2.5, 0.1 * total))
        assert sum(shares) == total
    with pytest.raises(DataError, match=r"the weight 0\.001 of 1\.001 is less than one of the 10"):
        shares_of(10, (1, 0.001))


def test_weights_of_patterns(tmp_path):
    assert split_weight("a.bin:0.7") == ("a.bin", 0.7)
    assert split_weight("data/*.bin:2") == ("data/*.bin", 2.0)
    assert split_weight("a:b.bin") == ("a:b.bin", None)  # a name
    assert split_weight("a.bin") == ("a.bin", None)
    path = tmp_path / "a:1"
    path.touch()
    assert split_weight(str(path)) == (str(path), None)
    assert split_weight(f"{path}:2") == (str(path), 2.0)
    assert split_weights(["a:1", "b:3"]) == (["a", "b"], (1.0, 3.0))
    assert split_weights(["a:1"]) == (["a"], None)
    assert split_weights(["a", "b"]) == (["a", "b"], None)
    for bad in ("a:0", "a:-1", "a:inf", "a:nan"):
        with pytest.raises(ConfigError, match="the weight of a must be more than 0"):
            make_config({"train-file": bad})
    with pytest.raises(ConfigError, match="b has no weight, others have one"):
        make_config({"train-file": ["a:1", "b"]})
    config = make_config({"train-file": ["a:1", "b:3"]})
    assert (config.train_patterns, config.train_weights) == (["a", "b"], (1.0, 3.0))
    assert config.splits


def test_bad_mixtures(data, tmp_path):
    with pytest.raises(DataError, match=r"a\.bin' is named twice, with two weights"):
        loader([data, tmp_path / "a.bin"], weights=(1, 2))
    with pytest.raises(DataError, match="no sequence of 16 tokens in what has the weight 2"):
        loader([tmp_path / "a.bin", tmp_path / "d.bin"], weights=(1, 2))


# ------------------------------------------------------------------------------------------------
# Bad input


def test_boundaries_that_contradict_the_file(data, tmp_path):
    path = documents_path(tmp_path / "b.bin")
    path.write_bytes(documents_path(tmp_path / "a.bin").read_bytes())
    with pytest.raises(DataError, match=r"b\.docs' contradicts '.*b\.bin'"):
        loader(data)
    path.unlink()
    for layout in (("concat", True), ("best-fit", False)):
        with pytest.raises(DataError, match=r"nothing says where the documents of '.*b\.bin' are"):
            loader(data, *layout)
    with loader(data, "concat", False):
        pass  # needs no documents


@pytest.mark.parametrize(("packing", "masked"), [*PACKINGS, ("concat", False)])
def test_nothing_to_train_on(tmp_path, packing, masked):
    write(tmp_path / "a.bin", [20, 20], mask=np.arange(40) == 0)  # no token predicts the first
    with pytest.raises(DataError, match=r"a\.bin' has nothing to train on: all"):
        loader(tmp_path / "a.bin", packing, masked)


def test_a_side_without_documents(tmp_path):
    write(tmp_path / "a.bin", [9])
    with pytest.raises(DataError, match=r"a\.bin' has 0 sequences of 16 tokens"):
        loader(tmp_path / "a.bin", split=Split(0.5, held_out=False))


# ------------------------------------------------------------------------------------------------
# Runs


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """The usual one, and data/docs.bin: documents of 3 to 30 tokens, a third of them masked."""
    monkeypatch.chdir(make_workplace(tmp_path))
    rng = np.random.default_rng(0)
    lengths = rng.integers(3, 31, 60)
    mask = np.repeat(np.arange(60) % 3 > 0, lengths)
    with TokenWriter("data/docs.bin", 257, with_masks=True, with_documents=True) as writer:
        writer.write(rng.integers(0, 256, lengths.sum()), mask, np.cumsum(lengths))
    return lengths


def tokens_of(lengths):
    """In sequences: a last token that would stand alone is none."""
    return int((lengths - ((lengths > T) & (lengths % T == 1))).sum())


def test_a_run_with_packed_documents(workplace, capsys):
    """Reports count what was trained; a resumed run goes on in the middle of an epoch."""
    options = {"train_file": "data/docs.bin", "eval_file": "split:0.1"}
    options |= {"packing": "best-fit", "epochs": 2, "ckpt_interval": 3, "ckpt_keep_n": 0}
    assert train(**options) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "\nDocuments (train, best-fit, masked): 54 in " in out
    assert "\nWARNING: 18 of 54 documents (train) have no token to train on: left out\n" in out
    assert "\nValidation: 6 documents at the ends of the training files, never trained on" in out
    whole = records("step")
    assert all(0 < r["trained_tokens"] <= r["step_tokens"] <= 64 for r in whole)
    is_trained = np.arange(60) % 3 > 0
    (dataset,) = (r for r in records("dataset") if r["split"] == "train")
    assert (dataset["documents"], dataset["untrained"]) == (54, 18)
    assert dataset["tokens"] == tokens_of(workplace[:54][is_trained[:54]])
    assert records("eval")[-1]["eval_tokens"] == tokens_of(workplace[54:][is_trained[54:]])
    assert train(**options, **{"continue": "3"}) == 0
    again = records("step")[-(len(whole) - 3) :]
    names = ("step", "loss", "norm", "step_tokens", "trained_tokens")
    assert [[r[n] for n in names] for r in again] == [[r[n] for n in names] for r in whole[3:]]
    assert train(**options | {"packing": "none"}, **{"continue": "3"}) == 2
    assert (
        "--packing, --data-order or the weights of --train-file changed" in capsys.readouterr().err
    )


def test_what_an_epoch_leaves_out(workplace, capsys):
    """Sequences that do not fill a step, where they are many."""
    options = {"train_file": "data/docs.bin", "eval_file": "none", "packing": "none"}
    dropping = {"drop_last": True}
    assert train(**options, **dropping, epochs=1, grad_accumulation=8) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "leaves out" in line]
    found = re.match(
        "WARNING: each epoch leaves out (\\d+) of (\\d+) sequences, which do not ", line
    )
    left, total = map(int, found.groups())
    assert 0 < left == total % 16 and line.endswith("--batch-size leaves out less")
    assert train(**options, **dropping, steps=1, grad_accumulation=8) == 0  # no epoch
    assert train(**options, **dropping, epochs=1, grad_accumulation=1) == 0
    assert train(**options, epochs=1, grad_accumulation=8) == 0
    assert "leaves out" not in capsys.readouterr().out


def test_a_run_with_weights(workplace, capsys):
    weights = "--train-file=data/train-0.bin:1", "--train-file=data/train-[12].bin:3"
    assert _run(["train", *flags(train_file=None, steps=6), *weights]) == 0
    out = capsys.readouterr().out
    assert ": data/train-0.bin:1 data/train-[12].bin:3\n" in out
    assert "\nAn epoch is 20 sequences, as many as all training files have:\n" in out
    assert "\n  data/train-0.bin: 25.00 % are 5, 0.56 passes over its 9\n" in out
    assert "\n  data/train-[12].bin: 75.00 % are 15, 1.36 passes over its 11\n" in out
    bad = "--train-file=data/train-0.bin:1", "--train-file=data/train-1.bin"
    assert _run(["train", *flags(train_file=None, steps=6), *bad]) == 2
    assert "data/train-1.bin has no weight, others have one" in capsys.readouterr().err


def test_options_without_effect(workplace, capsys):
    assert train(steps=1, document_separator=5) == 0
    assert "--document-separator 5 has no effect without --document-mask" in capsys.readouterr().err
    options = {"train_file": "data/docs.bin:2", "eval_file": "none", "packing": "none"}
    assert train(steps=1, document_separator=5, **options) == 0
    err = capsys.readouterr().err
    assert "--document-separator 5 has no effect: all files have a .docs file" in err
    assert "the weight in --train-file=data/docs.bin:2 has no effect on one file" in err


@pytest.mark.parametrize("packing", ["best-fit", "none", "concat"])
def test_how_much_attention_sees(workplace, packing):
    """The number is that of the batches of the first epoch."""
    given = {"train-file": "data/docs.bin", "eval-file": "none", "packing": packing}
    given |= {"document-mask": True, "seq-len": T, "batch-size": 1, "model": "tiny"}
    record = data_record(make_config(given | {"from-scratch": True}), preset("tiny"), 1)
    batches = drain(loader("data/docs.bin", packing, micro_batch=1))
    pairs = [(np.unique(b.starts[0], return_counts=True)[1] ** 2).sum() for b in batches]
    assert len(pairs) == record["sequences"] < SAMPLE  # all are looked at
    assert record["visible_share"] == sum(pairs) / (len(pairs) * T * T)


def test_plan_of_documents(workplace, capsys):
    shape = ["--model=model", "--from-scratch", "--seq-len=16", "--packing=best-fit"]
    assert _run(["plan", *shape, "--train-file=data/docs.bin", "--eval-file=none"]) == 0
    out = capsys.readouterr().out
    assert "\n[Data]\n  Documents (train, best-fit, masked): 60 in " in out
    assert "\n  Tokens per epoch: " in out and " % padding beside them\n  Steps per epoch:  " in out
    assert re.search(r"\n  Attention sees:   [\d.]+ % of unmasked\n", out)
    assert _run(["plan", *shape, "--train-file=none.bin", "--json"]) == 0
    assert "no token file matches" in json.loads(capsys.readouterr().out)["data"]["problem"]
    assert _run(["plan", *shape[:-1], "--train-file=none.bin"]) == 0  # not looked at
    assert "[Data]" not in capsys.readouterr().out
