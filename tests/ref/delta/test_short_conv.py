"""References of the short convolution against torch."""

import numpy as np
import pytest
import torch

from llmq.ref.delta import short_conv as ref

B, T, CHANNELS, COLUMNS, TAPS = 2, 70, 5, 7, 4
SIZES = (T, CHANNELS, COLUMNS)


def inputs(rng) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return (
        rng.normal(size=(B, T, COLUMNS)),
        rng.normal(size=(CHANNELS, TAPS)),
        rng.normal(size=(B, T, CHANNELS)),
    )


def torch_forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, silu: bool):
    x = x[..., :CHANNELS].mT
    z = torch.nn.functional.conv1d(x, weight[:, None], bias, padding=TAPS - 1, groups=CHANNELS)
    z = z[..., : x.shape[-1]].mT
    return torch.nn.functional.silu(z) if silu else z


def results(x, weight, d_out, starts=None, silu=1, bias=None) -> tuple[np.ndarray, ...]:
    """out, d_x, d_weight, and d_bias where there is one."""
    out, d_x = np.full(d_out.shape, np.nan), np.zeros_like(x)
    sizes = (x.shape[1], *SIZES[1:])
    ref.short_conv_forward(out, x, weight, bias, None, starts, *sizes, taps=TAPS, silu=silu)
    partial = np.full((x.shape[0] * -(-x.shape[1] // ref.SPAN), CHANNELS, TAPS), np.nan)
    of_bias = None if bias is None else np.full(partial.shape[:2], np.nan)
    inputs = (d_out, x, weight, bias, starts, *sizes)
    ref.short_conv_backward(d_x, partial, of_bias, *inputs, taps=TAPS, silu=silu)
    return out, d_x, partial.sum(0), *(() if bias is None else (of_bias.sum(0),))


@pytest.mark.parametrize("silu, biased", [(True, False), (False, False), (True, True)])
def test_equals_torch(rng, silu, biased):
    x, weight, d_out = inputs(rng)
    bias = rng.normal(size=CHANNELS) if biased else None
    given = (x, weight, *((bias,) if biased else ()))
    leaves = [torch.tensor(a, requires_grad=True) for a in given]
    want = torch_forward(*leaves, *(() if biased else (None,)), silu)
    gradients = torch.autograd.grad((want * torch.tensor(d_out)).sum(), leaves)
    # F64 on both sides: sums in another order.
    for a, b in zip(results(x, weight, d_out, None, silu, bias), (want, *gradients), strict=True):
        np.testing.assert_allclose(a, b.detach().numpy(), rtol=1e-10, atol=1e-12)


def test_documents_are_as_if_they_were_alone(rng):
    x, weight, d_out = inputs(rng)
    begins = (0, 1, 2, 30, 63, 65)
    starts = np.array([[max(b for b in begins if b <= t) for t in range(T)]] * B, np.int32)
    out, d_x, d_weight = results(x, weight, d_out, starts)
    total = np.zeros_like(d_weight)
    for first, stop in zip(begins, (*begins[1:], T), strict=True):
        alone = results(x[:, first:stop], weight, d_out[:, first:stop])
        np.testing.assert_array_equal(out[:, first:stop], alone[0])
        np.testing.assert_array_equal(d_x[:, first:stop], alone[1])
        total += alone[2]
    np.testing.assert_allclose(d_weight, total, rtol=1e-10)


@pytest.mark.parametrize("cut", [1, 2, 40])
def test_a_text_in_two_pieces(rng, cut):
    x, weight, d_out = inputs(rng)
    whole, *_ = results(x, weight, d_out)
    before = np.zeros((B, TAPS - 1, CHANNELS))
    for part in (x[:, :cut], x[:, cut:]):
        out = np.full((*part.shape[:2], CHANNELS), np.nan)
        sizes = (part.shape[1], *SIZES[1:])
        ref.short_conv_forward(out, part, weight, None, before, None, *sizes, taps=TAPS)
        ref.short_conv_keep(before, part, *sizes, taps=TAPS)
        want, whole = whole[:, : part.shape[1]], whole[:, part.shape[1] :]
        np.testing.assert_array_equal(out, want)
