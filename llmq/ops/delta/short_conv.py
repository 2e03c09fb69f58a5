"""Causal convolution of every channel with a few weights, and SiLU, inside of documents."""

from llmq.base.dtypes import F32, I32
from llmq.base.tensor import Accumulator, Tensor
from llmq.ops.common import expect_accumulator, expect_float, finish_column_sum
from llmq.runtime.cost import BESIDE_ATTENTION
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div, expect

SIZES = "i32 seq_len, i32 channels, i32 columns"
FORWARD = Kernel(
    "delta/short_conv.cu",
    "short_conv_forward",
    args=f"T* out, const T* x, const T* weight, const f32*? before, const i32*? starts, {SIZES}",
)
KEEP = Kernel(
    "delta/short_conv.cu", "short_conv_keep", args=f"inout f32* before, const T* x, {SIZES}"
)
BACKWARD = Kernel(
    "delta/short_conv.cu",
    "short_conv_backward",
    args="T* d_x, f32*? partial, const T* d_out, const T* x, const T* weight, "
    f"const i32*? starts, {SIZES}",
)

THREADS, SPAN, SPAN_BACKWARD = 128, 32, 512  # of a block; tokens


class _Call:
    """The launches for tensors that fit."""

    def __init__(self, op: str, dev: Device, x: Tensor, weight: Tensor, starts: Tensor | None):
        expect_float(op, "x", x)
        if len(x.shape) != 3 or len(weight.shape) != 2 or weight.shape[1] < 2:
            raise ValueError(
                f"{op}: x must have shape (B, T, columns) and weight (channels, at least 2), "
                f"got {x.shape} and {weight.shape}"
            )
        self.dev, (self.B, self.T, columns), (channels, taps) = dev, x.shape, weight.shape
        if channels > columns:
            raise ValueError(f"{op}: x has fewer columns than the {channels} channels: {columns}")
        self.wide = 8 // x.dtype.itemsize
        if dev.spec.capability > 0 and (channels % self.wide or columns % self.wide):
            raise ValueError(
                f"{op}: channels and columns must be multiples of {self.wide} on a GPU, got "
                f"{channels} and {columns}"
            )
        expect(op, "weight", weight, x.dtype, (channels, taps))
        if starts is not None:
            expect(op, "starts", starts, I32, (self.B, self.T))
        self.out, self.before = (self.B, self.T, channels), (self.B, taps - 1, channels)
        self.sizes, self.consts = (self.T, channels, columns), {"TAPS": taps}
        self.spans = ceil_div(self.T, SPAN_BACKWARD)  # of sums

    def launch(self, kernel: Kernel, spans: int, args: tuple, channels: int) -> None:
        """channels: of a block."""
        grid = (ceil_div(self.out[2], channels), spans, self.B)
        args, cost = (*args, *self.sizes), BESIDE_ATTENTION
        self.dev.launch(kernel, grid, THREADS, args, consts=self.consts, cost=cost)


def forward(
    dev: Device,
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    starts: Tensor | None = None,
    before: Tensor | None = None,
) -> None:
    """out[t] = silu(sum over j of weight[j] * x[t - taps + 1 + j]), of tokens of its document.

    Args:
        out     out    T   (B,T,channels)              F32 or BF16
        x       in     T   (B,T,columns)               its first channels; both multiples of 4 (on a
                                                       GPU), F32 of 2
        weight  in     T   (channels,taps)             at least 2 taps
        starts  in     I32 (B,T) or None               where each one's document starts; None: 0
        before  inout  F32 (B,taps-1,channels) or None the tokens in front, then the last ones of
                                                       them and x; None: 0
    """
    op = "short_conv.forward"
    call = _Call(op, dev, x, weight, starts)
    expect(op, "out", out, x.dtype, call.out)
    if before is not None:
        expect(op, "before", before, F32, call.before)
    spans, channels = ceil_div(call.T, SPAN), THREADS * call.wide
    call.launch(FORWARD, spans, (out, x, weight, before, starts), channels)
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
) -> None:
    """The gradients of forward's inputs, where nothing is in front.

    Args as forward's, and
        d_x       out    T          as x            the other columns stay as they are
        d_weight  inout  F32, BF16  as weight       or None; added to when accumulating
        d_out     in     T          as out

    Workspace: with d_weight F32, as the weight for every 512 tokens.
    """
    op = "short_conv.backward"
    call = _Call(op, dev, x, weight, starts)
    expect(op, "d_x", d_x, x.dtype, x.shape)
    expect(op, "d_out", d_out, x.dtype, call.out)
    expect_accumulator(op, "d_weight", d_weight, weight.shape)
    rest = (d_out, x, weight, starts)
    if d_weight is None:
        call.launch(BACKWARD, call.spans, (d_x, None, *rest), 32 * call.wide)
        return
    with dev.scratch("short_conv partial", (call.B * call.spans, weight.size), F32) as partial:
        call.launch(BACKWARD, call.spans, (d_x, partial, *rest), 32 * call.wide)
        flat = d_weight._replace(tensor=d_weight.tensor.view(weight.size))
        finish_column_sum(dev, flat, partial)
