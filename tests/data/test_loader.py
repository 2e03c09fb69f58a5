"""llm.q's order of the data against a plain re-statement of its rules; places on any number of
ranks; errors. Places in other orders: test_packing.py."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from llmq.base.errors import DataError
from llmq.data.dataset import SequenceLayout
from llmq.data.epoch_plan import FILE_ORDER, epoch_order
from llmq.data.loader import DataLoader
from llmq.data.tokens import MASKED_TARGET, TokenFile, TokenWriter

TRAIN_SEED = 0x83B45442
T = 4
VOCAB = 1_000_000
# Chunks per file: some not multiples of 2, 3 or 4, one with less than a group, one empty.
CHUNKS = {"a": 12, "b": 7, "c": 1, "d": 0, "e": 9}


def write(path, tokens, mask=None, vocab_size=VOCAB):
    with TokenWriter(path, vocab_size, with_masks=mask is not None) as writer:
        writer.write(np.asarray(tokens), mask)
    return path


@pytest.fixture
def data(tmp_path):
    """Files whose token at position p is 1000 * file + p, so that a batch tells where it is from.

    Each has a tail that does not fill a chunk.
    """
    for number, (name, chunks) in enumerate(CHUNKS.items()):
        tokens = 1000 * number + np.arange(chunks * T + 3 if chunks else 2)
        write(tmp_path / f"{name}.bin", tokens)
    return tmp_path / "*.bin"


def loader(data, rank=0, world_size=1, micro_batch=2, seed=TRAIN_SEED, **kwargs):
    """A loader as llm.q's, which leaves out what fills no batch, unless it is for `everything`."""
    kwargs.setdefault("drop_last", not kwargs.get("everything", False))
    kwargs.setdefault("layout", SequenceLayout(data_order="llmq"))
    return DataLoader(
        data,
        seq_len=T,
        micro_batch=micro_batch,
        rank=rank,
        world_size=world_size,
        seed=seed,
        vocab_size=VOCAB,
        **kwargs,
    )


def expected_epoch(epoch, world_size, micro_batch, seed=TRAIN_SEED):
    """First token of every row, (batches, rank, row), as the order is defined."""
    groups = []
    counts = list(CHUNKS.values())
    for i, number in enumerate(epoch_order(len(counts), seed, epoch, FILE_ORDER)):
        order = epoch_order(counts[number], seed, epoch, i)
        for base in range(0, counts[number] - world_size + 1, world_size):
            groups.append(1000 * number + T * order[base : base + world_size])
    batches = len(groups) // micro_batch
    rows = np.array(groups[: batches * micro_batch])
    return rows.reshape(batches, micro_batch, world_size).transpose(0, 2, 1)


def drain(loader):
    """Inputs of all remaining batches of this epoch: (batches, B, T)."""
    out = []
    while loader.batches_left:
        inputs, targets, *_ = loader.next_batch()
        np.testing.assert_array_equal(targets, inputs + 1)
        out.append(inputs)
    return np.array(out)


def same(one, other):
    """Two batches are equal to the bit."""
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)


# ------------------------------------------------------------------------------------------------
# Batches


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("micro_batch", [1, 2, 5])
def test_order_over_files_epochs_and_ranks(data, world_size, micro_batch):
    for rank in range(world_size):
        with loader(data, rank, world_size, micro_batch) as ranks_loader:
            for epoch in range(3):
                expected = expected_epoch(epoch, world_size, micro_batch)[:, rank]
                batches = drain(ranks_loader)
                np.testing.assert_array_equal(batches[:, :, 0], expected)
                assert (batches - batches[:, :, :1] == np.arange(T)).all()
                assert len(batches) == ranks_loader.batches_per_epoch
                ranks_loader.advance_epoch()


def test_last_complete_group_is_used(tmp_path):
    write(tmp_path / "a.bin", np.arange(6 * T + 1))
    for world_size, batches in [(1, 6), (2, 3), (3, 2), (4, 1), (6, 1)]:
        with loader(tmp_path / "a.bin", 0, world_size, 1) as one:
            assert one.batches_per_epoch == len(drain(one)) == batches


def test_some_batches_straddle_files(data):
    with loader(data, micro_batch=5) as one:
        files = [set(batch[:, 0] // 1000) for batch in drain(one)]
    assert max(len(names) for names in files) >= 3  # over the file with a single chunk, too


def test_batches_left_count_all_files(data):
    with loader(data, micro_batch=2) as one:
        total = one.batches_per_epoch
        assert total == 29 // 2
        for done in range(total):
            assert one.batches_left == total - done
            one.next_batch()
        assert not one.batches_left
        with pytest.raises(RuntimeError, match="advance_epoch"):
            one.next_batch()
        one.advance_epoch()
        assert one.epoch == 1
        assert one.batches_left >= total


def test_epoch_can_be_left_early(data):
    with loader(data) as one:
        one.next_batch()
        one.advance_epoch()
        np.testing.assert_array_equal(one.next_batch()[0][:, 0], expected_epoch(1, 1, 2)[0, 0])


def test_mask_of_the_target_decides(tmp_path):
    """Prompt 0 1 2 3, answer 4 5 6, end 7; then the next example's prompt."""
    tokens = np.arange(3 * T + 1)
    mask = np.isin(tokens, [4, 5, 6, 7, 12])
    write(tmp_path / "a.bin", tokens, mask)
    with loader(tmp_path / "a.bin", micro_batch=3) as one:
        inputs, targets, *_ = one.next_batch()
    by_start = {int(row[0]): target.tolist() for row, target in zip(inputs, targets, strict=True)}
    # Input 3, the prompt's last token, predicts 4: trained. Input 7, the end, predicts 8: not.
    assert by_start[0] == [-100, -100, -100, 4]
    assert by_start[4] == [5, 6, 7, -100]
    assert by_start[8] == [-100, -100, -100, 12]
    assert sorted(inputs.ravel().tolist()) == list(range(3 * T))


def test_masks_may_be_in_some_files_only(tmp_path):
    write(tmp_path / "a.bin", np.arange(T + 1), np.zeros(T + 1, bool))
    write(tmp_path / "b.bin", np.arange(T + 1))
    with loader(tmp_path / "*.bin", micro_batch=2) as one:
        targets = one.next_batch()[1]
    assert sorted(targets.tolist()) == [[-100] * T, [1, 2, 3, 4]]


# ------------------------------------------------------------------------------------------------
# Resuming


def test_state_is_that_of_the_consumer(data):
    with loader(data, prefetch=8) as one:
        before = one.state()
        one.next_batch()
        after = one.state()
        deadline = time.monotonic() + 10
        while not all(future.done() for future, _ in one._pending):
            assert time.monotonic() < deadline
        assert one.state() == after
        assert before["chunk_index"] == 0
        assert after["chunk_index"] == 2
        assert after["seed"] == TRAIN_SEED


def trained(loaders):
    """The first tokens of the sequences that the loaders still read in this epoch, sorted."""
    batches = [one.next_batch() for one in loaders for _ in range(one.batches_left)]
    rows = [(row, target) for batch in batches for row, target in zip(*batch[:2], strict=True)]
    return sorted(int(row[0]) for row, target in rows if (target != MASKED_TARGET).any())


@pytest.mark.parametrize("order", ["llmq", "shuffle"])
@pytest.mark.parametrize("before", [1, 2, 3, 4])
@pytest.mark.parametrize("after", [1, 2, 3])
def test_every_place_is_one_on_any_number_of_ranks(data, before, after, order):
    """Places are one on any number of ranks, also where an incomplete group ends a part."""
    how = {"drop_last": False, "layout": SequenceLayout(data_order=order)}
    ranks = [loader(data, rank, before, **how) for rank in range(before)]
    others = [loader(data, rank, after, **how) for rank in range(after)]
    for _ in range(ranks[0].batches_left + 1):
        state = ranks[0].state()
        for one in others:
            one.set_state(state)
            assert one.state() == state
        copies = [loader(data, rank, before, **how) for rank in range(before)]
        for one in copies:
            one.set_state(state)
        assert trained(others) == trained(copies)
        if ranks[0].batches_left:
            for one in ranks:
                one.next_batch()
        for one in copies:
            one.close()
    for one in (*ranks, *others):
        one.close()


def test_a_place_past_the_end_of_its_part_is_its_end(data):
    """Older versions saved it, after an incomplete group."""
    with loader(data, drop_last=False) as one:
        state = one.state()
        count = CHUNKS[state["file_name"].removesuffix(".bin")]
        one.set_state({**state, "chunk_index": count + 2})
        assert one.state()["chunk_index"] == count
        for wrong in ({"chunk_index": -1}, {"file_index": len(CHUNKS)}, {"epoch": -1}):
            with pytest.raises(DataError, match="does not exist: pass --new-data"):
                one.set_state(state | wrong)


def test_state_of_other_data_is_refused(data, tmp_path):
    with loader(data) as one:
        state = one.state()
        with pytest.raises(DataError, match="sequence length changed"):
            one.set_state({**state, "seq_len": T + 1})
    moved = tmp_path / "moved"
    moved.mkdir()
    for path in tmp_path.glob("*.bin"):
        path.rename(moved / path.name)
    with loader(moved / "*.bin") as one:
        one.set_state(state)  # the folder does not matter
    write(moved / "a.bin", np.arange(100))
    with loader(moved / "*.bin") as one, pytest.raises(DataError, match="training files changed"):
        one.set_state(state)


# ------------------------------------------------------------------------------------------------
# Errors and threads


@pytest.mark.parametrize("bad", [VOCAB, 2**31 - 1, -1])
def test_id_outside_the_vocabulary(tmp_path, bad):
    tokens = np.arange(8 * T + 1)
    path = write(tmp_path / "a.bin", tokens)
    data = bytearray(path.read_bytes())
    at = 5 * T + 2
    data[1024 + 4 * at : 1024 + 4 * at + 4] = np.int32(bad).tobytes()
    path.write_bytes(data)
    with loader(path, micro_batch=1) as one:
        good = 0
        with pytest.raises(DataError, match=f"token id {bad} at position {at},") as error:
            while True:
                one.next_batch()
                good += 1
        assert str(path) in str(error.value)
        assert good == shuffled_position(5)
        state = one.state()
        with pytest.raises(DataError, match="position"):  # it does not go away
            one.next_batch()
        assert one.state() == state


def shuffled_position(chunk):
    return epoch_order(8, TRAIN_SEED, 0, 0).tolist().index(chunk)


def test_error_of_the_reading_thread_is_raised(data, monkeypatch):
    def fail(*args):
        raise MemoryError("none left")

    monkeypatch.setattr(TokenFile, "read_tokens_into", fail)
    with loader(data) as one, pytest.raises(MemoryError, match="none left"):
        one.next_batch()


def test_model_vocabulary_too_small(data):
    with pytest.raises(DataError, match="the model has only 10"):
        DataLoader(data, seq_len=T, micro_batch=1, seed=0, vocab_size=10)


def test_too_little_data(data):
    message = r"29 sequences of 4 tokens, 24 of which all .* needs 32 \(8 x 4 ranks\)"
    with pytest.raises(DataError, match=message) as error:
        loader(data, world_size=4, micro_batch=8)
    assert "a.bin' …" in str(error.value)
    with pytest.raises(DataError, match=r"has 29 sequences of 4 tokens, but one batch needs 30 "):
        loader(data, micro_batch=30)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("micro_batch", [1, 2, 5, 40])
def test_everything_is_each_sequence_once(data, world_size, micro_batch):
    sizes = {"world_size": world_size, "micro_batch": micro_batch, "everything": True}
    loaders = [loader(data, rank, **sizes) for rank in range(world_size)]
    batches = loaders[0].batches_per_epoch
    groups = sum(-(-chunks // world_size) for chunks in CHUNKS.values())
    assert batches == -(-groups // micro_batch)
    found, counts = [], []
    for number in range(batches):
        for one in loaders:
            assert one.batches_left == batches - number
            inputs, targets, *_ = one.next_batch()
            is_real = targets[:, 0] != MASKED_TARGET
            np.testing.assert_array_equal(targets[is_real], inputs[is_real] + 1)
            assert (targets[~is_real] == MASKED_TARGET).all()
            # Sequences that fill up are of the data as well.
            starts = np.unique(inputs[:, 0])
            assert (starts % 1000 % T == 0).all() and (starts // 1000 <= 4).all()
            found += inputs[is_real, 0].tolist()
        counts.append(len(found))
    files = enumerate(CHUNKS.values())
    assert sorted(found) == [1000 * i + T * c for i, chunks in files for c in range(chunks)]
    assert [loaders[0].sequences(n + 1) for n in range(batches)] == counts
    for one in loaders:
        assert not one.batches_left
        assert one.state()["file_name"]  # the end is a place, too
        with pytest.raises(RuntimeError, match="no further batch"):
            one.next_batch()
        one.reset()
        assert one.batches_left >= batches
        one.close()


def test_everything_of_nothing(tmp_path):
    write(tmp_path / "a.bin", np.arange(1))
    with pytest.raises(DataError, match="has 0 sequences of 4 tokens, but one is needed: use more"):
        loader(tmp_path / "a.bin", world_size=2, everything=True)


def test_everything_of_less_than_a_sequence(tmp_path):
    """Is one shorter sequence; in training there is none."""
    write(tmp_path / "a.bin", np.arange(T))
    with loader(tmp_path / "a.bin", everything=True) as whole:
        assert whole.batches_per_epoch == 1 and whole.tokens(1) == T - 1
        _, targets, *_ = whole.next_batch()
        assert targets[0].tolist() == [1, 2, 3, MASKED_TARGET]
        (line,) = whole.data.lines("eval")
        assert line.startswith("WARNING: no file of eval fills a sequence of 4 tokens")
    with pytest.raises(DataError, match="has 0 sequences of 4 tokens, but one batch needs"):
        loader(tmp_path / "a.bin")


@pytest.mark.parametrize("wrong", [{"rank": 2, "world_size": 2}, {"micro_batch": 0}])
def test_bad_arguments(data, wrong):
    with pytest.raises(ValueError, match="DataLoader"):
        loader(data, **wrong)


def test_reads_ahead_but_not_too_far(data, monkeypatch):
    read, go = [], threading.Event()
    original = TokenFile.read_tokens_into

    def slow(file, start, out):
        assert threading.current_thread() is not threading.main_thread()
        go.wait(10)
        read.append(start)
        return original(file, start, out)

    monkeypatch.setattr(TokenFile, "read_tokens_into", slow)
    with loader(data, micro_batch=1, prefetch=3) as one:
        one._read_ahead()
        assert len(one._pending) == 3
        go.set()
        one.next_batch()
        assert len(one._pending) == 3
        for future, _ in one._pending:
            future.result()
        assert len(read) == 4


def test_close_ends_the_thread(data):
    before = threading.active_count()
    one = loader(data)
    one.next_batch()
    assert threading.active_count() == before + 1
    one.close()
    assert threading.active_count() == before
