"""Steps on samples: losses and gradients beside TRL's formulas, of batches and of token files."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from llmq.base.batch import Batch
from llmq.base.errors import ConfigError
from llmq.data.tokens import TokenWriter
from tests.model.test_preferences import LORA
from tests.models import LOSS_RTOL, VOCAB, exported, hf_model, pieces, same_gradients, trainer_for
from tests.ref.loss.test_grpo import FORMS, trl_loss

T, PROMPT = 32, 3
LENGTHS = [[12, 9, 8], [20, 7], [14, 15], [32]]  # of samples with their prompts, in rows
LOSSES = {
    "grpo": {"epsilon": 0.2, "epsilon-high": 0.2, "beta": 0.05},
    "dr-grpo": {"length": 50},
    "dapo": {"beta": 0.05},
    "gspo": {"epsilon": 0.02, "epsilon-high": 0.03, "beta": 0.05},
    "cispo": {"most": 1.3, "beta": 0.05},
}


def samples():
    """Rows of packed samples as arrays of targets, by name, and starts."""
    rng, shape = np.random.default_rng(0), (len(LENGTHS), T)
    inputs, targets = rng.integers(0, VOCAB, shape, np.int32), np.full(shape, -100, np.int32)
    starts = np.tile(np.arange(T, dtype=np.int32), (shape[0], 1))
    named = {name: np.zeros(shape, np.float32) for name in ("advantages", "sampled", "scores")}
    for row, lengths in enumerate(LENGTHS):
        first = 0
        for length in lengths:
            end = first + length
            starts[row, first:end] = first
            places = slice(first + PROMPT - 1, end - 1)
            targets[row, places] = inputs[row, first + PROMPT : end]
            named["advantages"][row, places] = rng.normal()
            first = end
    near = np.log(VOCAB) + rng.normal(size=(2, *shape)) * 0.3
    named["sampled"], named["scores"] = -near.astype(np.float32)
    return inputs, targets, starts, named


def of_torch(name, model, arrays):
    """TRL's loss, with its gradients in the model."""
    inputs, targets, starts, named = arrays
    rows = []
    for row in range(len(inputs)):
        for first in np.unique(starts[row][targets[row] >= 0]):
            at = np.flatnonzero((starts[row] == first) & (targets[row] >= 0))
            ids = torch.from_numpy(inputs[row, first : at[-1] + 2]).long()
            logits = torch.log_softmax(model(ids[None, :-1]).logits[0], -1)
            logp = logits.gather(1, ids[1:, None])[PROMPT - 1 :, 0]
            of_sample = (named[n][row, at] for n in ("sampled", "scores", "advantages"))
            rows.append((logp, *map(torch.from_numpy, of_sample)))
    padded = [torch.nn.utils.rnn.pad_sequence(x, batch_first=True) for x in zip(*rows, strict=True)]
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(r[0])) for r in rows], batch_first=True)
    loss = trl_loss(name, *padded[:3], padded[3][:, 0], mask)
    loss.backward()
    return loss.item()


@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_are_trls(loss):
    """Gradients of two micro-batches, whose samples have equal weights."""
    arrays, given = samples(), LOSSES[loss]
    targets, named = arrays[1], arrays[3]
    read = [n for n in named if n != "scores" or "beta" in given]
    batches = [
        Batch(*(a[i : i + 2] for a in arrays[:3]), 0, {n: named[n][i : i + 2] for n in read})
        for i in (0, 2)
    ]
    how = {"loss": loss, "loss_params": given, "document_mask": True, "seq_len": T}
    with trainer_for(exported("qwen2"), grad_accumulation=2, **how) as trainer:
        result = trainer.step(batches)
        ours = pieces(trainer, trainer.gradients())
        assert trainer.usage == trainer.plan.usage
    model, trained = hf_model("qwen2"), targets >= 0
    np.testing.assert_allclose(
        result.loss, of_torch(loss.replace("-", "_"), model, arrays), rtol=LOSS_RTOL
    )
    count = trained.sum() if FORMS[loss.replace("-", "_")].per == 0 else sum(map(len, LENGTHS))
    same_gradients({n: g / count for n, g in ours.items()}, model, result.norm)
    assert result.tokens == trained.sum() and 0 < result.numbers["clipped"] < 1
    assert 3.5 < result.numbers["entropy"] < 6.5  # of guessing: 4.9
    assert (result.numbers["kl"] > 0) == ("beta" in given)


def test_files_have_what_batches_have(tmp_path):
    """Advantages and log-probabilities beside token files; the reference of adapters is the model
    without, which scores the files itself."""
    inputs, targets, starts, named = samples()
    data, columns = tmp_path / "train.bin", {"advantages": [], "sampled": []}
    with TokenWriter(data, VOCAB, with_masks=True, with_documents=True) as writer:
        for row, lengths in enumerate(LENGTHS):
            first = 0
            for length in lengths:
                end, mask = first + length, np.arange(length) >= PROMPT
                writer.write(inputs[row, first:end], mask, [length])
                for name, values in columns.items():  # a target's stand at its own place
                    values += [0.0, *named[name][row, first : end - 1]]
                first = end
    for name, values in columns.items():
        np.save(tmp_path / f"train.{name}.npy", np.array(values, np.float32))
    how = {"loss": "grpo", "loss_params": "beta=0.1", "train_file": (str(data),), **LORA}
    how |= {"eval_file": "none", "seq_len": T, "packing": "best-fit", "batch_size": 4}
    with trainer_for(exported("qwen2"), checkpoint_dir=tmp_path / "ckpt", **how) as trainer:
        assert trainer.config.grad_accumulation == 1
        result = trainer.step()
    batch = Batch(inputs, targets, starts, 0, named)
    how |= {"train_file": None, "document_mask": True, "packing": "concat"}
    with trainer_for(exported("qwen2"), **how) as trainer:
        losses = trainer._step.score(batch)
        named["scores"] = -losses
        again = trainer.step([batch])
    assert result.tokens == again.tokens
    np.testing.assert_allclose(result.loss, again.loss, rtol=LOSS_RTOL)
    assert result.numbers == pytest.approx(again.numbers, rel=1e-4, abs=1e-6)
    assert abs(result.numbers["kl"]) < 1e-6


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ({"loss": "grpo", "document_mask": False}, "--loss grpo: documents are scored one by one"),
        ({"loss": "gspo", "router_aux_loss": 0.1}, "--loss gspo is a mean over samples"),
        ({"loss": "cispo", "loss_params": "epsilon=0.2"}, "--loss cispo has most, beta, got eps"),
        ({"loss": "dapo", "head_dtype": "e4m3"}, "an fp8 head rounds the weights"),
    ],
)
def test_what_does_not_go_together_is_refused(how, error, tmp_path):
    if "head_dtype" in how:
        how = how | {"model_dtype": "bf16", "matmul_dtype": "e4m3"}
    data = tmp_path / "train.bin"
    with TokenWriter(data, VOCAB) as writer:
        writer.write(np.zeros(100, np.int64))
    with pytest.raises(ConfigError, match=error):
        trainer_for(exported("qwen2"), train_file=(str(data),), eval_file="none", **how)
