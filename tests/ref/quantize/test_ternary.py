"""References of ternary weights."""

import numpy as np
import torch

from llmq.ref.quantize.quantize_int8 import quantize_int8_decode, quantize_int8_rows
from llmq.ref.quantize.ternary import LEAST_MEAN, ternary_of, ternary_round
from tests.bitnet import ActQuant, WeightQuant


def test_codes_are_those_of_transformers(rng):
    """Codes of weights and of activations are compared."""
    w = rng.normal(size=(48, 272)).astype(np.float32)
    q, scale = ternary_of(w)
    out = np.empty_like(w)
    ternary_round(out, w, np.full(48, scale), *w.shape)
    np.testing.assert_array_equal(np.unique(q), [-1, 0, 1])
    rounded = WeightQuant.apply(torch.from_numpy(w)).numpy()
    read = ActQuant.apply(torch.from_numpy(w)).numpy()
    np.testing.assert_array_equal(q, np.sign(rounded))
    np.testing.assert_allclose(out, rounded, rtol=1e-6)
    codes, scales = np.empty(w.shape, np.int8), np.empty(len(w), np.float32)
    quantize_int8_rows(codes, scales, w, None, None, 0, 1, *w.shape)
    quantize_int8_decode(out, codes, scales, *w.shape)
    np.testing.assert_allclose(out, read, rtol=1e-6)


def test_zeros_and_what_is_not_finite():
    w = np.zeros((16, 16), np.float32)
    q, scale = ternary_of(w)
    assert scale == LEAST_MEAN and not q.any()
    for none in (np.inf, np.nan):
        w[3, 4] = none
        out = np.empty_like(w)
        with np.errstate(invalid="ignore"):
            _, scale = ternary_of(w)
            ternary_round(out, w, np.full(16, scale), *w.shape)
        assert np.isnan(out).all()
