"""Causal depthwise convolution inside documents, with or without SiLU."""

from contextlib import ExitStack

from llmq.base.dtypes import F32
from llmq.base.tensor import Accumulator, Tensor
from llmq.ops.common import finish_column_sum
from llmq.runtime.cost import BESIDE_ATTENTION
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div, expect

_X, _SIZES = "T[B,seq_len,columns]", "i32 seq_len, i32 channels, i32 columns"
_INPUTS = f"{_X} x, T[channels,taps] weight, T[channels]? bias"
_RULES = {
    "where": "taps >= 2, channels <= columns",
    "gpu": "channels % (vector_T//2), columns % (vector_T//2)",
}
FORWARD = Kernel(
    "delta/short_conv.cu",
    "short_conv_forward",
    f"out T[B,seq_len,channels] out, {_INPUTS}, f32[B,taps-1,channels]? before, "
    f"i32[B,seq_len]? starts, {_SIZES}",
    **_RULES,
)
KEEP = Kernel(
    "delta/short_conv.cu", "short_conv_keep", f"inout f32[B,kept,channels] before, {_X} x, {_SIZES}"
)
BACKWARD = Kernel(
    "delta/short_conv.cu",
    "short_conv_backward",
    f"out {_X} d_x, out f32[spans,channels*taps]? partial, "
    f"out f32[spans,channels]? bias_partial, T[B,seq_len,channels] d_out, "
    f"{_INPUTS}, i32[B,seq_len]? starts, {_SIZES}",
    **_RULES,
)

THREADS, SPAN, SPAN_BACKWARD = 128, 32, 512  # threads of a block; tokens of a block in each pass


class _Call:
    """Sizes and launches of one call."""

    def __init__(self, dev: Device, x: Tensor, weight: Tensor, silu: bool):
        self.dev = dev
        self.B, self.T, columns, self.channels, taps = FORWARD.dims(x=x, weight=weight)
        self.sizes = (self.T, self.channels, columns)
        self.consts = {"TAPS": taps, "SILU": int(silu)}
        self.wide = 8 // x.dtype.itemsize
        self.spans = ceil_div(self.T, SPAN_BACKWARD)  # number of partial gradients per sequence

    def launch(self, kernel: Kernel, spans: int, args: tuple, channels: int) -> None:
        """Launch a kernel. spans: blocks along a sequence. channels: channels of a block."""
        grid = (ceil_div(self.channels, channels), spans, self.B)
        args, cost = (*args, *self.sizes), BESIDE_ATTENTION
        self.dev.launch(kernel, grid, THREADS, args, consts=self.consts, cost=cost)


def forward(
    dev: Device,
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    starts: Tensor | None = None,
    before: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    silu: bool = True,
) -> None:
    """out[t] = silu(bias + sum over j of weight[j] * x[t - taps + 1 + j]). The sum takes only
    tokens of t's document.

    x: (B, T, columns); the first `channels` columns are convolved. starts: position where each
    token's document starts; None: 0. before: F32 (B, taps - 1, channels), the tokens in front of x,
    overwritten with the last tokens of x; None: 0. silu: False leaves out the activation.
    """
    call = _Call(dev, x, weight, silu)
    spans, channels = ceil_div(call.T, SPAN), THREADS * call.wide
    call.launch(FORWARD, spans, (out, x, weight, bias, before, starts), channels)
    if before is not None:
        call.launch(KEEP, 1, (before, x), THREADS)


def backward(
    dev: Device,
    d_x: Tensor,
    d_weight: Accumulator | None,
    d_out: Tensor,
    x: Tensor,
    weight: Tensor,
    starts: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    d_bias: Accumulator | None = None,
    silu: bool = True,
) -> None:
    """Gradients of forward's inputs but `before`. Give d_weight and d_bias both or neither. Columns
    of d_x beyond the convolved channels stay as they are.

    Workspace: with d_weight, F32, a partial gradient of weight and bias for every 512 tokens of
    each sequence.
    """
    call = _Call(dev, x, weight, silu)
    rest = (d_out, x, weight, bias, starts)
    if d_weight is None:
        call.launch(BACKWARD, call.spans, (d_x, None, None, *rest), 32 * call.wide)
        return
    expect("short_conv.backward", "d_weight", d_weight.tensor, None, weight.shape)
    rows = call.B * call.spans
    with ExitStack() as temps:
        partial = temps.enter_context(dev.scratch("short_conv partial", (rows, weight.size), F32))
        of_bias = None
        if d_bias is not None:
            shape = (rows, call.channels)
            of_bias = temps.enter_context(dev.scratch("short_conv bias", shape, F32))
        call.launch(BACKWARD, call.spans, (d_x, partial, of_bias, *rest), 32 * call.wide)
        flat = d_weight._replace(tensor=d_weight.tensor.view(weight.size))
        finish_column_sum(dev, flat, partial)
        if of_bias is not None:
            finish_column_sum(dev, d_bias, of_bias)
