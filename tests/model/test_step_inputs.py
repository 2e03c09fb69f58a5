"""Named inputs of a step: declared by a loss or an architecture, read from sidecars or batches."""

from __future__ import annotations

import numpy as np
import pytest

from llmq.arch.qwen3 import Qwen3
from llmq.base.dtypes import BF16, F32, I32
from llmq.base.errors import ConfigError, DataError
from llmq.base.step_inputs import ARRAYS, ROW, TOKEN, Input
from llmq.data.dataset import SequenceLayout
from llmq.data.loader import DataLoader
from llmq.data.tokens import MASKED_TARGET, TokenWriter
from llmq.model.losses.cross_entropy import TokenCrossEntropy
from tests.run.test_trainer import B, T, batch, trainer, workplace  # noqa: F401

ADVANTAGES = Input("advantages", sidecar=ARRAYS)
FEATURES = Input("features", BF16, (3,), TOKEN, ARRAYS)
NUMBERS = Input("numbers", I32, (), TOKEN, ARRAYS)
IMAGES = Input("images", BF16, (5,), ROW)


@pytest.fixture
def data(tmp_path):
    """Documents of rising ids, half of them masked; every element of a sidecar is the id."""
    path, ids = tmp_path / "a.bin", np.arange(100)
    with TokenWriter(path, 1 << 10, with_masks=True, with_documents=True) as writer:
        for first in range(0, 100, 10):
            writer.write(ids[first : first + 10], ids[first : first + 10] % 2 == 0, ends=[10])
    np.save(path.with_suffix(".advantages.npy"), ids.astype(np.float32))
    np.save(path.with_suffix(".features.npy"), np.repeat(ids[:, None], 3, 1).astype(BF16.numpy))
    np.save(path.with_suffix(".numbers.npy"), ids.astype(np.int32))
    return path


def loader(path, *inputs, packing="concat"):
    layout = SequenceLayout(packing=packing, document_mask=packing != "concat")
    return DataLoader(
        path, seq_len=16, micro_batch=2, seed=1, vocab_size=1 << 10, layout=layout, inputs=inputs
    )


@pytest.mark.parametrize("packing", ["concat", "best-fit"])
def test_sidecars_follow_their_tokens(data, packing):
    """An element of a target stands where the target is predicted, 0 where masked."""
    with loader(data, ADVANTAGES, FEATURES, NUMBERS, packing=packing) as one:
        for _ in range(one.batches_left):
            inputs, targets, _, _, named, lengths = one.next_batch()
            learned = targets != MASKED_TARGET
            assert learned.any()
            np.testing.assert_array_equal(named["advantages"], np.where(learned, targets, 0))
            for row, length in enumerate(lengths):
                own = inputs[row, :length]
                np.testing.assert_array_equal(named["numbers"][row, :length], own)
                features = named["features"][row, :length].astype(np.int32)
                np.testing.assert_array_equal(features, np.repeat(own[:, None], 3, 1))
            assert named["features"].dtype == BF16.numpy


def test_wrong_sidecars_are_refused(data):
    path = data.with_suffix(".advantages.npy")
    whole = path.read_bytes()

    def refused(message):
        with loader(data, ADVANTAGES) as one, pytest.raises(DataError, match=message):
            one.next_batch()

    np.save(path, np.zeros(99, np.float32))
    refused(r"holds float32 \(99,\), and advantages of the tokens of .* is float32 \(100,\)")
    np.save(path, np.zeros(100))
    refused(r"holds float64 \(100,\)")
    np.save(path, np.full(100, np.nan, np.float32))
    refused("there are no advantages of a token that is trained: the sidecar has NaN")
    path.write_bytes(whole[:-300])
    refused("advantages.npy' is truncated")
    path.write_bytes(b"nothing")
    refused("cannot read .*advantages.npy")
    path.unlink()
    refused(r"there is no '.*a.advantages.npy': .* float32 \(100,\): write the file with np.save")


def arrays(rng, *inputs):
    return {
        each.name: rng.integers(-9, 9, each.batch_shape(B, T)).astype(each.dtype.numpy)
        for each in inputs
    }


@pytest.mark.parametrize("document_mask", [False, True])
def test_declared_inputs_reach_the_device(monkeypatch, document_mask):
    """The loss and the architecture may declare any dtype, and an odd number of small elements."""
    odd = Input("odd", BF16, (), ROW)
    of_loss, of_arch = (ADVANTAGES, odd), (IMAGES, NUMBERS, ADVANTAGES)
    monkeypatch.setattr(TokenCrossEntropy, "inputs", classmethod(lambda cls, options: of_loss))
    monkeypatch.setattr(Qwen3, "inputs", lambda self, model: of_arch)
    own = {"train_file": None, "eval_file": None, "batch_size": 1, "document_mask": document_mask}
    starts = np.zeros((1, T), np.int32) if document_mask else None
    rng = np.random.default_rng(0)
    with trainer(**own) as one:
        for _ in range(3):
            named = {n: a[:1] for n, a in arrays(rng, *of_arch, odd).items()}
            given = tuple(a[:1] for a in batch())
            one.step([(*given, starts, 0, named)])
            found = one._step.inputs
            assert (found.first_key is not None) == document_mask
            assert list(found.named) == ["advantages", "odd", "images", "numbers"]
            np.testing.assert_array_equal(found.tokens.numpy(), given[0])
            for name, array in named.items():
                np.testing.assert_array_equal(found.named[name].numpy(), array)
        assert one.usage == one.plan.usage
        with pytest.raises(ValueError, match=r"step: odd must be bfloat16 \(1,\), got float32"):
            one.step([(*given, starts, 0, named | {"odd": np.zeros(1, np.float32)})])
        with pytest.raises(ConfigError, match="--train-file: token files have no 'odd', which"):
            one.step()


def test_two_meanings_of_a_name_are_an_error(monkeypatch):
    other = ADVANTAGES._replace(dtype=I32)
    monkeypatch.setattr(TokenCrossEntropy, "inputs", classmethod(lambda *_: (ADVANTAGES,)))
    monkeypatch.setattr(Qwen3, "inputs", lambda self, model: (other,))
    with pytest.raises(ValueError, match="advantages is declared as"):
        trainer()


def test_a_step_without_named_inputs_has_no_memory_for_them(monkeypatch):
    """A float of each token takes 4 bytes of the inbox, and of each slot on its way there."""
    sizes = []
    for inputs in ((), (Input("x", F32),)):
        monkeypatch.setattr(TokenCrossEntropy, "inputs", classmethod(lambda *_, i=inputs: i))
        with trainer(train_file=None, eval_file=None) as one:
            sizes.append(one._step.inbox._inbox.nbytes)
    assert sizes[1] - sizes[0] == 4 * B * T
