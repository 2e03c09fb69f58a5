"""Embeddings on a device against the reference."""

from functools import partial

import numpy as np
import pytest

from llmq.base.dtypes import BF16, F32, I32
from llmq.base.tensor import Accumulator
from llmq.ops.pointwise import embedding
from llmq.ref.pointwise.embedding import CASES
from llmq.runtime.device import HOST_SPEC
from llmq.runtime.plan_device import PlanDevice
from tests.harness import host_device, run, step_scalars

SMALL = {name: shape for name, shape in CASES.items() if not name.startswith("qwen")}
DTYPES = [(F32, F32), (BF16, F32), (BF16, BF16)]


def _eighths(rng, shape, dtype):
    """Multiples of 1/8: F32 sums of them are exact in any order, so the results are equal."""
    return (rng.integers(-8, 9, shape) / 8).astype(dtype.numpy)


def _tokens(rng, kind, n, vocab):
    return {
        "uniform": rng.integers(0, vocab, n),
        "frequent": (rng.zipf(1.2, n) - 1) % vocab,
        "one_id": np.full(n, vocab - 1),
        # A run that ends, and one that starts, at the border of a chunk of 32.
        "borders": np.sort(np.arange(n) // 32 % vocab)[rng.permutation(n)],
    }[kind].astype(np.int32)


@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("B, T, C, V", SMALL.values(), ids=SMALL)
def test_forward(dev, rng, B, T, C, V, dtype, positions):
    table = rng.normal(size=(T + 5, C)).astype(dtype.numpy)
    arrays = {
        "out": np.full((B, T, C), np.nan, dtype.numpy),
        "tokens": _tokens(rng, "uniform", B * T, V).reshape(B, T),
        "weight": rng.normal(size=(V, C)).astype(dtype.numpy),
        "position_weight": table if positions else None,
        "starts": np.full((B, T), -3, np.int32) if positions else None,
    }

    def call(dev, **tensors):
        embedding.forward(dev, **tensors)

    want = run(host_device(), call, arrays)["out"]
    assert np.isfinite(want.astype(np.float32)).all()
    np.testing.assert_array_equal(run(dev, call, arrays)["out"], want)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_scale(dev, rng, dtype):
    """A multiple of 1/2 with few bits, so that sums of multiples of 1/8 stay exact."""
    B, T, C, V = CASES["several_slices"]
    arrays = _gradient_arrays(rng, B, T, C, V, "frequent", dtype, dtype)
    got = run(dev, partial(_backward, scale=5.5), arrays)["d_weight"]
    want = run(host_device(), partial(_backward, scale=5.5), arrays)["d_weight"]
    np.testing.assert_array_equal(got, want)
    assert (got != run(dev, _backward, arrays)["d_weight"]).any()
    weight = rng.normal(size=(V, C)).astype(dtype.numpy)
    forward = {"out": np.empty((B, T, C), dtype.numpy), "tokens": arrays["tokens"]}
    forward |= {"weight": weight, "position_weight": None}
    call = partial(embedding.forward, scale=33.75)
    want = run(host_device(), lambda dev, **t: call(dev, **t), forward)["out"]
    np.testing.assert_array_equal(run(dev, lambda dev, **t: call(dev, **t), forward)["out"], want)
    assert (want != weight[arrays["tokens"]]).any()


@pytest.mark.parametrize("kind", ["uniform", "frequent", "one_id"])
@pytest.mark.parametrize(
    "n, vocab",
    [(1, 64), (127, 8), (1100, 320), (2100, 151936)],
    ids=["one", "fewer_ids_than_buckets", "one_pass", "four_passes"],
)
def test_sort_is_stable(dev, rng, n, vocab, kind):
    arrays = {
        "order": np.full(n, -1, np.int32),
        "spare": np.full(n, -1, np.int32),
        "tokens": _tokens(rng, kind, n, vocab),
    }
    buckets = embedding.num_buckets(n)

    def call(dev, order, spare, tokens):
        args = (order, spare, tokens, n, vocab, buckets)
        dev.launch(embedding.SORT, buckets, embedding.SORT_THREADS, args)

    want = run(host_device(), call, arrays)["order"]
    np.testing.assert_array_equal(np.sort(want), np.arange(n))
    np.testing.assert_array_equal(run(dev, call, arrays)["order"], want)


def _backward(dev, d_weight, d_out, tokens, scalars, scale=1.0, padding=None, **of_rows):
    target = Accumulator(d_weight, True, scalars, salt=4)
    embedding.backward(dev, target, d_out, tokens, scale, padding, **of_rows)


def _gradient_arrays(rng, B, T, C, V, kind, target, source):
    return {
        "d_weight": _eighths(rng, (V, C), target),
        "d_out": _eighths(rng, (B, T, C), source),
        "tokens": _tokens(rng, kind, B * T, V).reshape(B, T),
        "scalars": step_scalars(seed=1, step=2, micro_step=3),
    }


@pytest.mark.parametrize("kind", ["uniform", "frequent", "one_id", "borders"])
@pytest.mark.parametrize("target, source", DTYPES, ids=str)
@pytest.mark.parametrize("B, T, C, V", SMALL.values(), ids=SMALL)
def test_backward(dev, rng, B, T, C, V, target, source, kind):
    arrays = _gradient_arrays(rng, B, T, C, V, kind, target, source)
    got, want = run(dev, _backward, arrays), run(host_device(), _backward, arrays)
    np.testing.assert_array_equal(got["d_weight"], want["d_weight"])
    absent = np.setdiff1d(np.arange(V), arrays["tokens"])
    np.testing.assert_array_equal(got["d_weight"][absent], arrays["d_weight"][absent])


@pytest.mark.parametrize("kind", ["frequent", "one_id", "borders"])
def test_backward_without_the_row_of_padding(dev, rng, kind):
    """Runs of it inside of a chunk, across chunks, and of nothing else."""
    arrays = _gradient_arrays(rng, 2, 96, 40, 64, kind, F32, BF16)
    for padding in np.unique(arrays["tokens"])[:3]:
        call = partial(_backward, padding=int(padding))
        got, want = run(dev, call, arrays)["d_weight"], run(host_device(), call, arrays)["d_weight"]
        np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(got[padding], arrays["d_weight"][padding])


@pytest.mark.parametrize("target", [F32, BF16], ids=str)
@pytest.mark.parametrize("kind", ["uniform", "frequent", "one_id", "borders"])
def test_backward_of_some_rows_alone(dev, rng, kind, target):
    """Gradients of some rows equal the whole table's; runs of other ids lie between and around."""
    arrays = _gradient_arrays(rng, 2, 96, 40, 320, kind, target, BF16)
    table = run(dev, partial(_backward, padding=7), arrays)["d_weight"]
    for first, count in ((0, 9), (3, 8), (int(arrays["tokens"].max()), 1)):
        rows = slice(first, first + count)
        own = arrays | {"d_weight": arrays["d_weight"][rows]}
        call = partial(_backward, padding=7, first_id=first, vocab=320)
        got = run(dev, call, own)["d_weight"]
        np.testing.assert_array_equal(got, run(host_device(), call, own)["d_weight"])
        if target == F32:  # the others' random numbers count from their first row
            np.testing.assert_array_equal(got, table[rows])


def test_backward_of_a_run_over_many_chunks(dev, rng):
    """More than 32 chunks: the search for the run's end takes more than one look."""
    arrays = _gradient_arrays(rng, 1, 1200, 8, 64, "one_id", F32, BF16)
    arrays["tokens"][0, 1180:] = 3
    got, want = run(dev, _backward, arrays), run(host_device(), _backward, arrays)
    np.testing.assert_array_equal(got["d_weight"], want["d_weight"])


def test_backward_sums_in_a_fixed_order(dev, rng):
    arrays = _gradient_arrays(rng, 2, 96, 264, 320, "frequent", F32, F32)
    arrays["d_out"] = rng.normal(size=(2, 96, 264)).astype(np.float32)
    first = run(dev, _backward, arrays)["d_weight"]
    np.testing.assert_array_equal(run(dev, _backward, arrays)["d_weight"], first)
    want = run(host_device(), _backward, arrays)["d_weight"]
    # Sums of at most 192 terms of size 1 in another order.
    np.testing.assert_allclose(first, want, atol=1e-5)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("target, source", DTYPES, ids=str)
@pytest.mark.parametrize("B, T, C, V", SMALL.values(), ids=SMALL)
def test_backward_positions(dev, rng, B, T, C, V, target, source, accumulate):
    start = _eighths(rng, (T + 3, C), target)
    arrays = {
        "d_position": start if accumulate else np.full_like(start, np.nan),
        "d_out": _eighths(rng, (B, T, C), source),
        "scalars": step_scalars(seed=1, step=2, micro_step=3),
    }

    def call(dev, d_position, d_out, scalars):
        target = Accumulator(d_position, accumulate, scalars, salt=4)
        embedding.backward_positions(dev, target, d_out)

    got = run(dev, call, arrays)["d_position"]
    np.testing.assert_array_equal(got, run(host_device(), call, arrays)["d_position"])
    np.testing.assert_array_equal(got[T:], start[T:] if accumulate else np.zeros_like(start[T:]))


def _documents(rng, B, T):
    """I32 (B, T): where documents of random lengths start; the first sequence is one document."""
    first = rng.random((B, T)) < 0.2
    first[0] = False
    return np.maximum.accumulate(np.where(first, np.arange(T), 0), axis=1).astype(np.int32)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("target, source", DTYPES, ids=str)
@pytest.mark.parametrize("B, T, C, V", [*SMALL.values(), (3, 70, 520, 64)])
def test_positions_within_documents(dev, rng, B, T, C, V, target, source, accumulate):
    table = _eighths(rng, (T + 3, C), target)
    arrays = {
        "d_position": table if accumulate else np.full_like(table, np.nan),
        "d_out": _eighths(rng, (B, T, C), source),
        "scalars": step_scalars(seed=1, step=2, micro_step=3),
        "starts": _documents(rng, B, T),
    }

    def backward(dev, d_position, d_out, scalars, starts):
        target = Accumulator(d_position, accumulate, scalars, salt=4)
        embedding.backward_positions(dev, target, d_out, starts)

    got = run(dev, backward, arrays)["d_position"]
    np.testing.assert_array_equal(got, run(host_device(), backward, arrays)["d_position"])
    if target == F32:
        want = table.copy() if accumulate else np.zeros_like(table)
        np.add.at(want, np.arange(T) - arrays["starts"], arrays["d_out"].astype(np.float32))
        np.testing.assert_array_equal(got, want)
    arrays = {
        "out": np.full((B, T, C), np.nan, source.numpy),
        "tokens": _tokens(rng, "uniform", B * T, V).reshape(B, T),
        "weight": _eighths(rng, (V, C), source),
        "position_weight": _eighths(rng, (T, C), source),
        "starts": arrays["starts"],
    }

    def forward(dev, **tensors):
        embedding.forward(dev, **tensors)

    got = run(dev, forward, arrays)["out"]
    rows = arrays["position_weight"][np.arange(T) - arrays["starts"]]
    sums = arrays["weight"][arrays["tokens"]].astype(np.float32) + rows.astype(np.float32)
    np.testing.assert_array_equal(got, sums.astype(source.numpy))


def test_number_of_buckets():
    assert [embedding.num_buckets(n) for n in (1, 128, 129, 1024, 32768, 10**6)] == [
        *(1, 1, 2, 8, 128, 128)
    ]


def test_wrong_arguments():
    dev = PlanDevice(HOST_SPEC)

    def make(shape, dtype):
        return dev.alloc("x", shape, dtype, "Gradients")

    x, tokens, scalars = make((2, 3, 8), BF16), make((2, 3), I32), make((16,), I32)
    weight = make((9, 8), BF16)
    with pytest.raises(ValueError, match=r"seq_len must be at most 2, got 3"):
        embedding.forward(dev, x, tokens, weight, make((2, 8), BF16))
    with pytest.raises(ValueError, match=r"embedding.backward: d_weight must accumulate"):
        embedding.backward(dev, Accumulator(weight, False, scalars, 0), x, tokens)
    with pytest.raises(ValueError, match=r"seq_len must be at most 2, got 3"):
        embedding.backward_positions(dev, Accumulator(make((2, 8), F32), True, scalars, 0), x)
