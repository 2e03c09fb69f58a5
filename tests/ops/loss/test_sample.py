"""The choice of tokens on a device against the reference."""

import numpy as np
import pytest

from llmq.base.dtypes import BF16, F32, I32
from llmq.ops.loss import sample
from llmq.ref.loss.sample import CASES
from llmq.runtime.plan_device import PlanDevice
from tests.harness import GPU_SPEC, dtype_of, host_device, run
from tests.ref.loss.test_sample import requests

SMALL = {name: case for name, case in CASES.items() if case[1] <= 10_000}
EACH = {  # one a row: all scores, few, some, those of a share, of all filters, and the highest
    "temperature": [1, 0.7, 1.5, 0.9, 1.2, 0],
    "top_k": [0, 3, 2000, 0, 1500, 0],
    "top_p": [1, 1, 1, 0.9, 0.95, 1],
    "min_p": [0, 0, 0, 0, 0.001, 0],
    "repetition": [1, 1.2, 0.9, 1.5, 1, 1.1],
    "seed": np.arange(6) * 2**33 - 5,
    "position": [0, 1, 7, 100, 2**30, 3],
}


def arrays_of(rng, case, dtype, **values):
    rows, vocab, padded = case
    logits = (rng.normal(size=(rows, padded)) * 3).astype(dtype.numpy)
    logits[:, vocab:] = np.nan
    arrays = {"logits": logits, "tokens": np.full(rows, -7, np.int32)}
    arrays["seen"] = rng.integers(-(2**31), 2**31, (rows, -(-vocab // 32))).astype(np.int32)
    arrays["logprobs"] = np.full(rows, np.nan, np.float32)
    return arrays | requests(rows, **{k: np.resize(v, rows) for k, v in values.items()})


def choose(dev, arrays, vocab, softcap=None):
    def call(dev, tokens, logprobs, logits, seen, **request):
        how = sample.Requests(**request)
        sample.choose(dev, tokens, logprobs, logits, how, seen, vocab_size=vocab, softcap=softcap)

    return run(dev, call, arrays)


def check(dev, arrays, vocab, softcap=None):
    """The device chooses what the reference does. Returns the tokens."""
    got, want = choose(dev, arrays, vocab, softcap), choose(host_device(), arrays, vocab, softcap)
    np.testing.assert_array_equal(got["tokens"], want["tokens"])
    np.testing.assert_array_equal(got["seen"], want["seen"])
    # Sums of exponentials of another library, in another order.
    np.testing.assert_allclose(got["logprobs"], want["logprobs"], rtol=1e-6, atol=4e-6)
    return want["tokens"]


@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("case", SMALL.values(), ids=SMALL)
def test_equals_reference(dev, rng, case, dtype, softcap):
    """Sampled tokens in BF16 and with a soft cap, where many scores are nearly equal."""
    arrays = arrays_of(rng, case, dtype, **EACH)
    check(dev, arrays, case[1], softcap)
    check(dev, arrays | {"seed": arrays["seed"] + 1, "seen": None}, case[1])


@pytest.mark.parametrize("top_k, top_p", [(1, 1), (5000, 1), (0, 0.5), (4000, 0.7)])
def test_equal_scores_are_kept_by_their_ids(dev, rng, top_k, top_p):
    """More of them than are ranked one by one."""
    rows, vocab = 4, 8192
    arrays = arrays_of(rng, (rows, vocab, vocab), F32, top_k=top_k, top_p=top_p, temperature=1)
    logits = np.repeat(rng.normal(size=(rows, 4)), vocab // 4, axis=1)
    arrays["logits"] = rng.permuted(logits, axis=1).astype(np.float32)
    arrays["logits"][:, 5] = arrays["logits"].max() + 1
    tokens = check(dev, arrays | {"seen": None}, vocab)
    assert (top_k != 1) or (tokens == 5).all()


def test_what_is_no_number_and_what_is_beyond_all_bins(dev, rng):
    rows, vocab = 6, 70
    values = {"temperature": [1, 1, 0, 1, 0.01, 1e-30], "top_k": 3, "top_p": 0.9}
    arrays = arrays_of(rng, (rows, vocab, 72), F32, **values)
    logits = arrays["logits"]
    logits[0, 40], logits[1, 69], logits[2] = np.nan, np.inf, -np.inf
    logits[3], logits[3, 33] = -np.inf, -5
    tokens = check(dev, arrays, vocab)
    assert tokens[:4].tolist() == [-1, -1, -1, 33] and (tokens[4:] >= 0).all()


def test_a_row_depends_on_its_own_request_alone(dev, rng):
    case = (6, 505, 512)
    arrays = arrays_of(rng, case, BF16, **EACH)
    together = choose(dev, arrays, 505)
    for row in (1, 4):
        alone = choose(dev, {name: x[row : row + 1] for name, x in arrays.items()}, 505)
        for name in arrays:
            assert alone[name].tobytes() == together[name][row].tobytes(), name


def test_wrong_arguments():
    dev = PlanDevice(GPU_SPEC)

    def make(*shape, dtype=F32):
        return dev.alloc("x", shape, dtype, "Activations")

    how = sample.Requests(*(make(2, dtype=dtype_of(x)) for x in requests(2).values()))
    rows = (make(2, dtype=I32), make(2), make(2, 40))
    sample.choose(dev, *rows, how, make(2, 2, dtype=I32), vocab_size=37)
    with pytest.raises(ValueError, match="vocab must be at most 40, got 41"):
        sample.choose(dev, *rows, how, vocab_size=41)
