"""The default order of the data: sequences of all files, shuffled together from a seed alone."""

from __future__ import annotations

import itertools
import json
import math
import tracemalloc
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import llmq
from llmq.base.errors import ConfigError, DataError
from llmq.checkpoint.manifest import digest_of
from llmq.commands.cli import _run
from llmq.data.dataset import SequenceLayout
from llmq.data.epoch_plan import FileWindows, Permutation, WindowSource
from llmq.data.loader import DataLoader
from llmq.data.tokens import MASKED_TARGET, TokenWriter
from llmq.options.options_io import make_config
from tests.data.test_loader import VOCAB, T, write
from tests.runs import before_step, make_workplace, options, records, train

SEED = 0x83B45442


def loader(pattern, rank=0, world_size=1, micro_batch=2, seed=SEED, **kwargs):
    shape = {"seq_len": T, "micro_batch": micro_batch, "vocab_size": VOCAB, "seed": seed}
    return DataLoader(pattern, rank=rank, world_size=world_size, **shape, **kwargs)


def files(folder, counts):
    """Files of so many sequences each, whose token at position p is 1000 * file + p."""
    for number, count in enumerate(counts):
        write(folder / f"f{number}.bin", 1000 * number + np.arange(count * T + 2))
    return folder / "f*.bin"


def firsts(loaders):
    """First tokens of the real sequences that the loaders of all ranks still read, in order."""
    found = []
    while loaders[0].batches_left:
        rows = [zip(*one.next_batch()[:2], strict=True) for one in loaders]
        for group in zip(*rows, strict=True):
            found += [int(row[0]) for row, target in group if (target != MASKED_TARGET).all()]
    return found


# ------------------------------------------------------------------------------------------------
# Permutations


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 8, 9, 31, 100, 1000, 4097])
def test_each_number_has_one_place(n):
    order = Permutation(n, SEED, 3, 1)
    numbers = [order[place] for place in range(n)]
    assert sorted(numbers) == [*range(n)] and len(order) == n
    assert [order.place_of(number) for number in numbers] == [*range(n)]


def test_known_orders():
    """The order of a checkpoint's data has to stay the same in later versions."""
    for arguments, first in (
        ((10, SEED, 0, 0), [9, 5, 3, 2, 0, 4]),
        ((10, SEED, 1, 0), [0, 7, 6, 8, 5, 4]),
        ((1000003, 42, 7, 3), [870124, 849817, 339405, 287776, 441889, 477060]),
        ((5 * 10**9, 2**63 + 1, 0, 0), [2516770529, 625113624, 2473265188, 1476292448]),
    ):
        order = Permutation(*arguments)
        assert [order[place] for place in range(len(first))] == first


def test_numbers_that_meet_are_random():
    """Neighbours of a long order are unrelated, and so are numbers at one place in many epochs."""
    n = 10_000
    order = np.array([Permutation(n, SEED, 0, 0)[place] for place in range(n)])
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 5 / math.sqrt(n)
    steps = np.diff(order) % n
    assert np.bincount(steps * 10 // n, minlength=10).max() < n / 10 + 5 * math.sqrt(n / 10)
    at_zero = [Permutation(n, SEED, epoch, 0)[0] * 10 // n for epoch in range(2000)]
    assert max(Counter(at_zero).values()) < 200 + 5 * math.sqrt(200)


def test_an_order_of_more_than_32_bits_takes_no_memory():
    sizes = [SimpleNamespace(num_tokens=2**31 - 1)] * 300
    source = WindowSource(FileWindows(sizes, 16, None), range(300), 0)
    assert source.count > 2**32
    tracemalloc.start()
    for number, index in itertools.product(range(3), (0, 1, source.count // 2, source.count - 1)):
        (span,) = source.spans(SEED, number, index)
        assert 0 <= span.file < 300 and span.start % 16 == 0
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 200_000


# ------------------------------------------------------------------------------------------------
# Epochs


def test_two_corpora_are_mixed_in_every_part_of_an_epoch(tmp_path):
    write(tmp_path / "a.bin", np.arange(400 * T + 1) % 500)
    write(tmp_path / "b.bin", 500 + np.arange(200 * T + 1) % 500)
    with loader([tmp_path / "a.bin", tmp_path / "b.bin"]) as one:
        for _ in range(3):
            found = np.array(firsts([one])) >= 500
            assert found.sum() == 200 and len(found) == 600
            of_tenths = found.reshape(10, 60).sum(axis=1)
            assert of_tenths.min() >= 8 and of_tenths.max() <= 32, "20 of 60 are expected"
            one.advance_epoch()


@pytest.mark.parametrize("counts", [[12, 7, 1, 0, 9], [1], [2, 2], [31]])
def test_every_sequence_once_in_one_order_on_any_ranks(tmp_path, counts):
    pattern = files(tmp_path, counts)
    want = sorted(1000 * i + T * j for i, count in enumerate(counts) for j in range(count))
    epochs = []
    for world_size in (1, 2, 3):
        ranks = [loader(pattern, rank, world_size) for rank in range(world_size)]
        of_epochs = []
        for _ in range(3):
            of_epochs.append(firsts(ranks))
            for one in ranks:
                one.advance_epoch()
        epochs.append(of_epochs)
        for one in ranks:
            one.close()
    assert epochs[0] == epochs[1] == epochs[2]
    assert all(sorted(order) == want for order in epochs[0])
    if len(want) > 20:
        assert epochs[0][0] != epochs[0][1] != epochs[0][2]
        with loader(pattern, seed=1) as other:
            assert firsts([other]) != epochs[0][0]


def test_a_validation_reads_all_files_from_its_first_batch(tmp_path):
    """Also the shorter last window of a file, wherever it comes; the tokens of some batches are
    counted as they come."""
    for number in range(8):
        with TokenWriter(tmp_path / f"f{number}.bin", VOCAB, with_documents=True) as writer:
            writer.write(1000 * number + np.arange(10 * T + 2))
    layout, pattern = SequenceLayout(document_mask=True), tmp_path / "f*.bin"
    with loader(pattern, micro_batch=8, everything=True, layout=layout) as one:
        assert one.data.plan.sources[0].count == 8 * 11
        seen, tokens = [], 0
        for number in range(one.batches_per_epoch):
            assert one.tokens(number) == tokens
            batch = one.next_batch()
            tokens += batch.inputs.size - batch.padding
            seen += batch.inputs[:, 0].tolist()
        assert one.tokens(one.batches_per_epoch) == tokens == 8 * (10 * T + 1)
    assert len({first // 1000 for first in seen[:16]}) >= 6


# ------------------------------------------------------------------------------------------------
# Runs


RUN = {"steps": 8, "ckpt_interval": 3, "ckpt_keep_n": 0}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A workplace that also has documents, in data/docs-*.bin."""
    monkeypatch.chdir(make_workplace(tmp_path))
    for number in range(2):
        with TokenWriter(Path(f"data/docs-{number}.bin"), 257, with_documents=True) as writer:
            writer.write(np.arange(100), ends=np.arange(10, 101, 10))


def losses() -> dict[int, float]:
    return {record["step"]: record["loss"] for record in records("step")}


def age(path: str) -> None:
    """Make a checkpoint one of the versions without --data-order."""
    file = Path(path) / "checkpoint.json"
    document = json.loads(file.read_text())
    del document["options"]["data_order"]
    file.write_text(json.dumps(document | {"sha256": digest_of(document)}))


def test_a_run_says_its_order(place, capsys):
    assert train(steps=1) == 0
    assert "Order of the data: 20 sequences of all 3 files are shuffled together" in (
        capsys.readouterr().out
    )
    assert {r["split"]: r["order"] for r in records("dataset")} == dict.fromkeys(
        ("train", "eval"), "shuffle"
    )
    assert train(steps=1, data_order="llmq") == 0
    assert "Order of the data: file after file, each shuffled (--data-order llmq)" in (
        capsys.readouterr().out
    )
    assert records("dataset")[0]["order"] == "llmq"
    assert _run(["show", "data/docs-*.bin", "--tokenizer=bytes"]) == 0
    assert "order in training: sequences of all 2 files shuffled together" in (
        capsys.readouterr().out
    )


def test_an_older_checkpoint_goes_on_in_the_order_of_llmq(place, monkeypatch, capsys):
    assert train(**RUN, data_order="llmq") == 0
    whole = losses()
    age("ckpt/step_00000003")
    age("ckpt/step_00000006")
    assert train(**RUN, **{"continue": "3"}) == 0
    assert losses() == whole
    with llmq.Trainer(**given(steps=8)) as trainer:
        message = r"the order of the data changed .* \(its run began with --data-order llmq\)"
        with pytest.raises(DataError, match=message):
            trainer.load("ckpt/step_00000006")
    with llmq.Trainer(**given(steps=8, data_order="llmq")) as trainer:
        trainer.load("ckpt/step_00000006")
        assert trainer.step().loss == whole[6]
    age("ckpt/step_00000006")
    orders = []
    before_step(monkeypatch, lambda loop: orders.append(loop.trainer.config.data_order))
    more = {"continue": "6", "new_data": "", "packing": "best-fit", "eval_file": "none"}
    assert train(**RUN, **more, train_file="data/docs-*.bin") == 0
    assert orders == ["shuffle"] * 2, "what begins anew has the order of this version"


def given(**changes):
    found = options(**changes)
    del found["overwrite"]
    return {name.replace("-", "_"): value for name, value in found.items()}


@pytest.mark.parametrize(
    "more, message",
    [
        ({"packing": "best-fit"}, "--packing best-fit makes sequences of documents: use shuffle"),
        ({"packing": "none"}, "--data-order: llmq orders windows of files"),
        ({"train-file": ("a.bin:1", "b.bin:2")}, "--train-file has weights"),
    ],
)
def test_orders_that_make_no_sense(more, message):
    with pytest.raises(ConfigError, match=message):
        make_config({"data-order": "llmq", **more}).validate()
