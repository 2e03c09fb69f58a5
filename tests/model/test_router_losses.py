"""Losses of routers in whole steps: filler of rows, and every loss of tokens beside them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from llmq.base.batch import Batch
from llmq.base.errors import ConfigError
from llmq.data.document_index import DocumentIndex
from llmq.data.scores import Scored, ScoreWriter, scores_path
from llmq.data.tokens import TokenFile
from tests.model.test_distillation import K, formula, scored
from tests.models import LOSS_RTOL, VOCAB, exported, hf_model, pieces, same_gradients, trainer_for
from tests.pairs_data import write_documents
from tests.text.test_message_weights import write_weights

T, LENGTHS = 24, [9, 14, 6, 20, 24, 5]
AUX, Z = 0.3, 0.02
OPTIONS = {"seq_len": T, "batch_size": 6, "packing": "none", "eval_file": "none"}
OPTIONS |= {"router_aux_loss": AUX, "router_z_loss": Z}


def of_routers(model, documents):
    """The load-balancing loss with an attention mask, and the mean squared log-sum-exp."""
    longest = max(map(len, documents))
    ids, mask = torch.zeros(2, len(documents), longest, dtype=torch.long)
    for row, document in enumerate(documents):
        ids[row, : len(document)], mask[row, : len(document)] = document, 1
    out = model(ids, attention_mask=mask, output_router_logits=True)
    owned = mask.view(-1) == 1
    squares = torch.stack([x[owned].logsumexp(-1).square().mean() for x in out.router_logits])
    return out.aux_loss, squares.mean()


def documents_of(data):
    file = TokenFile(data)
    for start, end in itertools.pairwise(DocumentIndex.read(data).offsets.tolist()):
        yield start, torch.from_numpy(file.read_tokens(start, end - start)).long()


def weighted(model, data, weights):
    """The sum of cross-entropies of tokens times their weights, F32 (tokens of the file,)."""
    total = 0
    for start, ids in documents_of(data):
        each = torch.nn.functional.cross_entropy(
            model(ids[None, :-1]).logits[0], ids[1:], reduction="none"
        )
        total = total + (each * torch.from_numpy(weights[start + 1 : start + len(ids)])).sum()
    return total


def case_of(loss, folder):
    """Data, options, and a function of a model that gives the sum and the divisor of a loss."""
    data, scores = folder / "train.bin", folder / "scores"
    if loss == "message weights":
        write_weights(data, LENGTHS)
        weights = TokenFile(data).read_weights(0, sum(LENGTHS))
        first = np.cumsum([0, *LENGTHS[:-1]])
        mass = weights.sum() - weights[first].sum()
        return data, {}, lambda model: (weighted(model, data, weights), mass)
    write_documents(data, LENGTHS, VOCAB)
    mask = TokenFile(data).read_mask(0, sum(LENGTHS)).astype(np.float32)
    if loss == "kd":
        assert scored(exported("qwen2"), data, scores) == 0
        given = {"loss": loss, "scores": scores, "loss_params": f"top-k={K},mixture=0.3"}
        return data, given, lambda m: formula(m, data, scores, 0.3, 1.0, reverse=False)[::2]
    count = sum(int(mask[start + 1 : start + len(ids)].sum()) for start, ids in documents_of(data))
    if loss == "ce":
        return data, {}, lambda model: (weighted(model, data, mask), count)
    weights = np.random.default_rng(1).normal(size=sum(LENGTHS)).astype(np.float32)
    scores.mkdir()
    name = {"name": "mine"}
    writer = ScoreWriter(scores_path(scores, data), Scored.of(TokenFile(data), name, seq_len=T))
    writer.write(0, weights)
    writer.close()
    given = {"loss": loss, "scores": scores}
    return data, given, lambda model: (weighted(model, data, weights * mask), count)


@pytest.mark.parametrize("loss", ["ce", "message weights", "weighted", "kd"])
def test_step_equals_transformers_with_an_attention_mask(tmp_path, loss):
    """Rows of one document each and of filler; losses are means over their own divisors."""
    data, given, sum_of = case_of(loss, tmp_path)
    more = OPTIONS | given | {"train_file": (str(data),)}
    with trainer_for(exported("qwen3_moe"), **more) as trainer:
        result = trainer.step()
        ours = pieces(trainer, trainer.gradients())
        assert trainer.usage == trainer.plan.usage
    model = hf_model("qwen3_moe")
    total, divisor = sum_of(model)
    aux, z = of_routers(model, [ids for _, ids in documents_of(data)])
    (total / divisor + AUX * aux + Z * z).backward()
    assert result.loss == pytest.approx(total.item() / divisor, rel=10 * LOSS_RTOL)
    assert result.numbers["router_aux"] == pytest.approx(aux.item(), rel=LOSS_RTOL)
    assert result.numbers["router_z"] == pytest.approx(z.item(), rel=LOSS_RTOL)
    found = {name: gradient / divisor for name, gradient in ours.items()}
    same_gradients(found, model, result.norm)


@pytest.mark.parametrize("packing", ["none", "best-fit"])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_filler_has_no_part(tmp_path, name, packing):
    """Rows of any length and missing rows give the same step, with documents masked or not."""
    data, _, _ = case_of("ce", tmp_path)
    found = []
    for T, B, mask in ((24, 6, True), (48, 8, packing == "best-fit")):
        how = OPTIONS | {"seq_len": T, "batch_size": B, "packing": packing, "document_mask": mask}
        with trainer_for(exported(name), **how, train_file=(str(data),)) as trainer:
            assert trainer.steps_per_epoch == 1
            result = trainer.step()
            found.append((result.loss, result.norm, *result.numbers.values()))
    np.testing.assert_allclose(*found, rtol=1e-5)


def test_lengths_of_batches_say_what_is_filler():
    """The documents that a caller gives have filler of any tokens behind them."""
    rng, lengths = np.random.default_rng(3), np.array([24, 0, 7], np.int32)
    inputs, targets = rng.integers(0, VOCAB, (2, 3, T), np.int32)
    targets[np.arange(T) >= lengths[:, None]] = -100
    how = OPTIONS | {"batch_size": 3, "packing": "concat"}
    with trainer_for(exported("qwen3_moe"), **how) as trainer:
        result = trainer.step([Batch(inputs, targets, lengths=lengths)])
        for wrong, message in (
            (lengths + 1, "lengths must be from 0 to 24"),
            (lengths[:2], r"lengths must be int32 \(3,\)"),
        ):
            with pytest.raises(ValueError, match=message):
                trainer.step([Batch(inputs, targets, lengths=wrong)])
    documents = [torch.from_numpy(inputs[row, : lengths[row]]).long() for row in (0, 2)]
    aux, z = of_routers(hf_model("qwen3_moe"), documents)
    assert result.numbers["router_aux"] == pytest.approx(aux.item(), rel=LOSS_RTOL)
    assert result.numbers["router_z"] == pytest.approx(z.item(), rel=LOSS_RTOL)


def test_losses_of_answers_are_refused():
    for loss in ("dpo", "kto"):
        with pytest.raises(ConfigError, match="--router-aux-loss: is added to losses of tokens"):
            trainer_for(exported("qwen3_moe"), loss=loss, packing="best-fit", router_aux_loss=0.1)
