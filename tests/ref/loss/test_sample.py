"""The reference of the choice of tokens: filters as sorts, draws as their distribution."""

import numpy as np
import pytest
import torch
from transformers.generation import logits_process as hf

from llmq.ops.loss import sample
from llmq.ref.loss.sample import gumbel, kept
from tests.harness import host_device, run

GREEDY = {"temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0, "repetition": 1, "seed": 5}
DTYPES = {"top_k": np.int32, "seed": np.int64, "position": np.int32}


def requests(rows, **values):
    """Arrays of requests, of which these values are for all rows or each."""
    values = GREEDY | {"position": np.arange(rows)} | values
    return {
        name: np.broadcast_to(np.asarray(value), rows).astype(DTYPES.get(name, np.float32))
        for name, value in values.items()
    }


def choose(logits, seen=None, vocab=None, softcap=0, **values):
    """tokens and logprobs of rows of logits."""
    rows, padded = logits.shape
    tokens, logprobs = np.full(rows, -7, np.int32), np.full(rows, np.nan, np.float32)
    arrays = {"tokens": tokens, "logprobs": logprobs, "logits": logits, "seen": seen}

    def call(dev, tokens, logprobs, logits, seen, **how):
        sizes = {"vocab_size": vocab or padded, "softcap": softcap or None}
        sample.choose(dev, tokens, logprobs, logits, sample.Requests(**how), seen, **sizes)

    got = run(host_device(), call, arrays | requests(rows, **values))
    if seen is not None:
        seen[...] = got["seen"]
    return got["tokens"], got["logprobs"]


def _warped(scores, *processors):
    """The ids that transformers' processors leave."""
    x = torch.from_numpy(scores)[None]
    for processor in processors:
        x = processor(None, x)
    return np.flatnonzero(np.isfinite(x[0].numpy()))


@pytest.mark.parametrize(
    "top_k, top_p, min_p", [(7, 1, 0), (0, 0.8, 0), (20, 0.9, 0), (60, 0.95, 0.05)]
)
def test_filters_are_those_of_transformers(rng, top_k, top_p, min_p):
    for _ in range(5):
        scores = rng.normal(size=300).astype(np.float32) * 2
        scores -= scores.max()
        processors = [hf.TopKLogitsWarper(top_k)] if top_k else []
        processors += [hf.TopPLogitsWarper(top_p)] if top_p < 1 else []
        processors += [hf.MinPLogitsWarper(min_p)] if min_p else []
        left = kept(scores, top_k, np.float32(top_p), np.float32(min_p))
        np.testing.assert_array_equal(left, _warped(scores, *processors))


def test_equal_scores_are_kept_by_their_ids():
    scores = np.array([-1, 0, -1, -1, -2, -1], np.float32)
    assert kept(scores, 3, np.float32(1), np.float32(0)).tolist() == [0, 1, 2]
    share = 1 / (1 + 4 / np.e + np.exp(-2))
    for ids in (1, 2, 3):
        top_p = np.float32(share * (1 + (ids - 1) / np.e) * 0.999)
        assert len(kept(scores, 0, top_p, np.float32(0))) == ids
    assert kept(scores, 0, np.float32(0), np.float32(2)).tolist() == [1]
    assert kept(scores, 0, np.float32(1), np.float32(np.exp(-1.5))).tolist() == [0, 1, 2, 3, 5]


@pytest.mark.parametrize("how", [{"temperature": 1}, {"temperature": 0.7, "top_k": 5}], ids=str)
def test_draws_have_the_distribution_of_the_softmax(rng, how):
    """Chi-square of 8,000 positions of a seed, and of as many seeds at a position."""
    n, logits = 8_000, rng.normal(size=12).astype(np.float32)
    rows, scores = np.broadcast_to(logits, (n, 12)), logits / how["temperature"]
    left = np.argsort(-scores)[: how.get("top_k", 12)]
    share = np.exp(scores[left] - scores.max())
    expected = n * share / share.sum()
    for varied in ({"seed": 2**40 + 3}, {"seed": np.arange(n), "position": 9}):
        tokens, logprobs = choose(rows, **how, **varied)
        counts = np.bincount(tokens, minlength=12)
        assert counts.sum() == counts[left].sum()
        chi_square = np.sum((counts[left] - expected) ** 2 / expected)
        assert chi_square < 2.5 * len(left) + 10  # of 11 or 4 degrees of freedom: p < 1e-4
        whole = logits - np.log(np.exp(logits).sum())
        np.testing.assert_allclose(logprobs, whole[tokens], atol=1e-5)


def test_noise_of_neighbours_is_independent():
    noise = np.array([gumbel(7, position, np.arange(64)) for position in range(4000)])
    assert abs(noise.mean() - 0.5772) < 0.01 and abs(noise.var() - np.pi**2 / 6) < 0.02
    correlations = np.corrcoef(noise.T) - np.eye(64)
    assert np.abs(correlations).max() < 0.08  # of 4,000: 1 / sqrt(4000) = 0.016 each
    along = np.corrcoef(noise[:-1].ravel(), noise[1:].ravel())[0, 1]
    assert abs(along) < 0.01


def test_repetition_greedy_and_what_is_no_number(rng):
    logits = np.array([[3, -1, 2.9, 0.5], [-3, -1, -2, -4]], np.float32)
    seen = np.array([[0b0001], [0b0010]], np.int32)
    tokens, logprobs = choose(logits, seen, repetition=[1.5, 3])
    want = torch.from_numpy(logits).clone()
    for row, (ids, penalty) in enumerate((([[0]], 1.5), ([[1]], 3.0))):
        process = hf.RepetitionPenaltyLogitsProcessor(penalty)
        want[row] = process(torch.tensor(ids), want[row][None])[0]
    assert tokens.tolist() == want.argmax(1).tolist() == [2, 2]
    np.testing.assert_allclose(
        logprobs, torch.from_numpy(logits).log_softmax(1)[[0, 1], [2, 2]], atol=1e-6
    )
    assert seen.ravel().tolist() == [0b0101, 0b0110]
    logits = np.array([[1, np.nan], [np.inf, 1], [-np.inf, -np.inf], [-np.inf, -5]], np.float32)
    for temperature in (0, 1):
        tokens, logprobs = choose(logits, temperature=temperature)
        assert tokens.tolist() == [-1, -1, -1, 1]
        assert np.isnan(logprobs[:3]).all() and logprobs[3] == 0
