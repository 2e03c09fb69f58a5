"""e4m3: products multiply fp8 codes with one scale per tensor, which is just-in-time or delayed.

Codes have two layouts: (rows, features) for products, (features, rows) for weight gradients
(`model/linear.py` says why). A tensor that backward recomputes keeps the scale that forward
computed. The kernel that recomputes a tensor therefore writes only codes, with either kind of
scale.

Scratch is allocated as a stack: codes that outlive their tensor are allocated before the tensor.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from copy import copy
from dataclasses import replace

import numpy as np

from llmq.arch.matrix import HalfSpec, halves_gradients, halves_inputs
from llmq.arch.model_config import ModelConfig
from llmq.base.dtypes import E4M3, E4M3_HALF, F32, FP8_MAX, DType, parse_dtype
from llmq.base.operand import (
    CODES_MULTIPLE,
    Bytes,
    BytesRun,
    Fp8,
    Operand,
    OutBuffers,
    ProductOutput,
    Result,
    turned,
)
from llmq.base.tensor import Tensor
from llmq.formats.operands import BACKWARD, FORWARD, HEAD, WEIGHT, Activation, Operands, id_of
from llmq.formats.scales import DelayedScales, Scales
from llmq.formats.storage import Encoder, Frozen, Storage, StorageLayout
from llmq.ops.quantize import fp8_scale, quantize
from llmq.options.adapters import needed_inputs
from llmq.options.groups.precision import PrecisionOptions
from llmq.options.options import StepOptions
from llmq.ref.quantize import quantize as ref

# Values of --fp8-fast-accumulation, each with its consequences. A fast product loses precision with
# the length of its sums: features in most products, tokens in weight gradients, the vocabulary in
# the gradient of the head's input.
FAST = {
    "none": ((), ()),
    "forward": ((FORWARD,), (FORWARD,)),
    "activations": ((FORWARD, BACKWARD), (FORWARD,)),
    "all": ((FORWARD, BACKWARD, WEIGHT), (FORWARD, BACKWARD, WEIGHT)),
}
"""By flag value: whether products of blocks, and products of the LM head, accumulate fast."""


def e4m3_of(precision: PrecisionOptions) -> DType:
    return E4M3_HALF if precision.fp8_accumulate == "fp16" else E4M3


class E4m3Operands(Operands):
    """Operands that are fp8 codes, whose scales are just-in-time or delayed.

        just in time  The kernel writes the tensor and records its largest |x|; a second kernel
                      makes codes.
        delayed       The kernel writes codes with a scale from earlier steps. Until the first scale
                      exists, codes are made just in time.

    formats: dtype of a tensor's codes, by the tensor's name in a layer. products: ids of tensors
    whose codes the epilogue of a product writes. outs: ids of the gradients of the outputs of
    attention, MLP and other halves of layers. limits: by tensor id, the largest finite value of the
    codes' dtype. whole: ids of tensors that are also read in bf16, by adapters, routers or the
    weight gradients of experts. turned: ids of tensors whose transposed codes weight gradients
    read.
    """

    weights, makes_codes = E4M3, True

    def prepare(self, config: ModelConfig, options: StepOptions, scalars: Tensor | None) -> None:
        super().prepare(config, options, scalars)
        precision = options.precision
        self.delayed = precision.fp8_recipe == "delayed"
        self.multiplied = self.e4m3 = e4m3_of(precision)
        self.fast, self._head_fast = map(frozenset, FAST[precision.fp8_fast_accumulation])
        gradient = parse_dtype(precision.gradient_dtype)
        self.gradient_dtype = self.e4m3 if gradient is E4M3 else gradient
        self.formats: dict[str, DType] = {}
        self.products: list[str] = []
        self.outs: set[str] = set()
        self.limits: dict[str, float] = {}
        self.whole: set[str] = set()
        self.turned = {HEAD}
        for layer in range(config.num_layers):
            self._add_layer(config, layer, coded=precision.mlp_dtype == "e4m3")
            self._add_readers(config, options, layer)
        if precision.head_dtype == "e4m3":
            self.formats[HEAD], self.limits[HEAD] = self.e4m3, FP8_MAX[self.e4m3]
        if not self.delayed:
            self.scales = Scales(self.dev, self.limits)
            return
        self.scales = DelayedScales(self.dev, self.limits, self.products)
        name, dtype = "d_residual", self.gradient_dtype
        q = self.dev.alloc(f"{name}.q", self.shape, dtype, "Activations")
        q_t = None
        if self.turned & self.outs:
            q_t = self.dev.alloc(f"{name}.q_t", turned(self.shape), dtype, "Activations")
        self._half_gradient = (q, q_t)

    @property
    def head(self) -> Operands:
        if HEAD not in self.formats:
            return super().head
        head = copy(self)
        head.fast = self._head_fast
        return head

    def _add_layer(self, config: ModelConfig, layer: int, *, coded: bool) -> None:
        """Add the code dtypes of a layer's tensors, and their largest finite values. coded: True if
        products write codes."""
        halves, parts = config.halves(layer), _parts(config, layer)
        names = dict.fromkeys(halves_inputs(halves), self.e4m3)
        names |= dict.fromkeys(halves_gradients(halves), self.gradient_dtype)
        for name in [name for half in parts for name in half.coded] if coded else ():
            names[name] = self.gradient_dtype if name.startswith("d_") else self.e4m3
            self.products.append(id_of(layer, name))
        self.outs |= {id_of(layer, f"d_{half.name}") for half in parts}
        self.formats |= names
        self.limits |= {id_of(layer, name): FP8_MAX[dtype] for name, dtype in names.items()}

    def _add_readers(self, config: ModelConfig, options: StepOptions, layer: int) -> None:
        needed, adapts = needed_inputs(config, options.model, layer), options.model.freezes_model
        for half in _parts(config, layer):
            if any(module.kind == "router" for module in half.modules):
                self.whole.add(id_of(layer, half.norm))
            for matrix in half.matrices:
                x, d_y = (id_of(layer, name) for name in (matrix.input, matrix.gradient))
                read = {d_y} if matrix.input in half.made_again and not adapts else {x, d_y}
                if matrix.of_experts:
                    self.whole |= read - {d_y}
                elif not adapts:
                    self.turned |= {x, d_y}
                if matrix.key in needed and (adapts or matrix.of_experts):
                    self.whole |= read
                if matrix.of_experts and matrix.bias:
                    self.whole.add(d_y)

    def kept_codes(self, tensor_id: str) -> DType | None:
        return None if tensor_id in self.whole else self.e4m3

    def _codes(
        self,
        temps: ExitStack,
        tensor_id: str,
        shape: tuple[int, int],
        *,
        product: bool = True,
        transposed: bool = True,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return scratch for codes (rows, features) and for transposed codes (features, rows). None
        stands for a layout that no product reads."""
        name = tensor_id.rpartition(".")[2]
        dtype, q, q_t = self.formats[name], None, None
        if product:
            q = temps.enter_context(self.dev.scratch(f"{name}.q", shape, dtype))
        if transposed and tensor_id in self.turned:
            q_t = temps.enter_context(self.dev.scratch(f"{name}.q_t", turned(shape), dtype))
        return q, q_t

    def _fp8(
        self, tensor_id: str, source: Tensor | None, q: Tensor | None, q_t: Tensor | None
    ) -> Fp8:
        return Fp8(source=source, codes=q, transposed=q_t, scale=self.scales.scale(tensor_id))

    def _direct(
        self, tensor_id: str, out: Tensor | None, q: Tensor | None, q_t: Tensor | None
    ) -> OutBuffers:
        """Return the buffers of a kernel that writes codes with a scale known beforehand."""
        codes = self.scales.fp8_out(tensor_id, q, q_t)
        operand = self._fp8(tensor_id, out, q, q_t)
        return OutBuffers(tensor_id, out, self.scales.abs_max(tensor_id), codes, operand=operand)

    @property
    def _known(self) -> bool:
        """True if scales are known before their tensors are computed."""
        return self.delayed and self.scales.ready

    # -- tensors that kernels make ----------------------------------------------------------------

    def buffers(self, temps: ExitStack, x: Activation) -> OutBuffers:
        name = x.tensor_id
        kept = x.place(self.dev, temps) if name in self.whole else None
        q, _ = self._codes(temps, name, x.shape, transposed=False)
        if self._known:
            return self._direct(name, kept, q, x.codes)
        scratch = temps.enter_context(ExitStack())
        out = self.measured(name, kept or x.place(self.dev, scratch))
        out.pending = self.scales.fp8_out_again(name, q, x.codes)
        out.operand, out.scratch = self._fp8(name, kept, q, x.codes), scratch
        return out

    def buffers_again(self, temps: ExitStack, x: Activation, *, product: bool) -> OutBuffers:
        kept = x.place(self.dev, temps) if x.tensor_id in self.whole else None
        q, q_t = self._codes(temps, x.tensor_id, x.shape, product=product)
        codes = self.scales.fp8_out_again(x.tensor_id, q, q_t) if q or q_t else None
        operand = self._fp8(x.tensor_id, kept, q, q_t)
        return OutBuffers(x.tensor_id, kept, None, codes, operand=operand)

    def gradient_buffers(
        self,
        temps: ExitStack,
        tensor_id: str,
        shape: tuple[int, int],
        out: Tensor | None,
        *,
        bias: bool = False,
        both: bool = True,
        of_product: bool = False,
    ) -> OutBuffers:
        keeps = tensor_id in self.whole
        known = self._known or (of_product and self.products)
        follows = of_product and not (bias or keeps)
        if (keeps and not both) or not (known or follows):
            return self.measured(tensor_id, out)
        q, q_t = self._codes(temps, tensor_id, shape)
        if not known:
            buffers = OutBuffers(tensor_id, out, self.scales.abs_max(tensor_id))
            buffers.pending = self.scales.fp8_out_again(tensor_id, q, q_t)
            buffers.operand = self._fp8(tensor_id, None, q, q_t)
            return buffers
        buffers = self._direct(tensor_id, out if bias or keeps else None, q, q_t)
        if of_product and self.products:
            buffers.first = self.scales.first_of(tensor_id)
        return buffers

    def measured(self, tensor_id: str, out: Tensor) -> OutBuffers:
        if self._known and tensor_id in self.outs:
            return self._direct(tensor_id, out, *self._half_gradient)
        return OutBuffers(tensor_id, out, self.scales.abs_max(tensor_id))

    def finalize(self, temps: ExitStack, out: OutBuffers) -> Operand:
        if out.operand is None:  # the codes are allocated only now, after the kernel's scratch
            return self.quantize(temps, out.name, out.tensor, measured=True, transposed=True)
        if out.pending is not None:
            codes, transposed, scale, _ = out.pending
            quantize.quantize(self.dev, codes, transposed, scale, out.tensor, out.abs_max)
        if out.scratch is not None:
            out.scratch.close()
        return out.operand

    def kept(self, x: Activation) -> Operand | None:
        if x.codes is None and x.tensor is None:
            return None
        return self._fp8(x.tensor_id, x.tensor, None, x.codes)

    # -- tensors that are there already ----------------------------------------------------------

    def quantize(
        self, temps: ExitStack, tensor_id: str, x: Tensor, *, measured: bool, transposed: bool
    ) -> Operand:
        if measured and self._known and tensor_id in self.outs:
            return self._fp8(tensor_id, x, *self._half_gradient)
        q, q_t = self._codes(temps, tensor_id, x.shape, transposed=transposed)
        largest, scale = self.scales.abs_max(tensor_id), self.scales.scale(tensor_id)
        if self._known:
            codes = self.scales.fp8_out(tensor_id, q, q_t)
            quantize.scaled(self.dev, x, codes, abs_max=None if measured else largest)
            return self._fp8(tensor_id, x, q, q_t)
        if not measured:
            fp8_scale.abs_max(self.dev, largest, x)
        quantize.quantize(self.dev, q, q_t, scale, x, largest)
        return self._fp8(tensor_id, x, q, q_t)

    def quantize_again(
        self, temps: ExitStack, tensor_id: str, x: Tensor, *, product: bool
    ) -> Operand:
        q, q_t = self._codes(temps, tensor_id, x.shape, product=product)
        if q or q_t:
            quantize.scaled(self.dev, x, self.scales.fp8_out_again(tensor_id, q, q_t))
        return self._fp8(tensor_id, x, q, q_t)

    def largest(self) -> dict[tuple[int, str], float]:
        values, largest = self.dev.download(self.scales.abs_maxes)[:, 0].tolist(), {}
        for name, value in zip(self.scales.names, values, strict=True):
            if name != HEAD:
                _, layer, tensor = name.split(".")
                largest[int(layer), tensor] = value
        return largest

    # -- results of products that an activation reads ---------------------------------------------
    # Before the first scales are known, a product that writes codes runs twice: first with any
    # scale, to find the largest |x|, then with the scale that follows from this |x|. Running such a
    # product once would need memory that no later step uses.

    def result_dtype(self, name: str) -> DType:
        return self.formats[name] if self.products else self.dtype

    def product_output(
        self, tensor_id: str, shape: tuple[int, int], tensor: Tensor | None = None
    ) -> ProductOutput:
        out = super().product_output(tensor_id, shape, tensor)
        return replace(out, codes=self.scales.product(tensor_id, None)) if self.products else out

    def result_again(self, tensor_id: str, out: Tensor) -> Result:
        return self.scales.product(tensor_id, out, again=True) if self.products else out


class E4m3Storage(Storage):
    """Frozen matrices stored as fp8 codes, with one scale per matrix."""

    def layout(self, matrix: Frozen) -> StorageLayout:
        return {"codes": (matrix.shape, E4M3), "scale": ((1,), F32)}

    def encode(self, encoder: Encoder) -> None:
        """Encode the matrix with one scale, which is computed from the largest |x| of the
        matrix."""
        largest, scale, size = encoder.number(0), encoder.number(1), encoder.matrix.size
        self.dev.zero(largest)
        for start, count in encoder.pieces(size):
            fp8_scale.abs_max(self.dev, largest, encoder.read(start, count))
        for start, count in encoder.pieces(size):
            x, codes = encoder.read(start, count), encoder.codes.view_as(E4M3).rows(0, count)
            quantize.quantize(self.dev, codes, None, scale, x, largest)
            encoder.put("codes", codes, start)
        encoder.put("scale", scale, 0)

    def decode(
        self, matrix: Frozen, kept: Mapping[str, Tensor], out: Tensor, scale: Tensor | None = None
    ) -> None:
        flat = (tensor.view(matrix.size) for tensor in (out, kept["codes"]))
        quantize.dequantize(self.dev, *flat, kept["scale"])

    def weight(self, kept: Mapping[str, Tensor], transposed: Tensor) -> Operand:
        return Fp8(source=None, codes=kept["codes"], transposed=transposed, scale=kept["scale"])

    def has_coded(self, matrix: Frozen) -> bool:
        return matrix.columns % CODES_MULTIPLE == 0

    def coded(self, matrix: Frozen, kept: Mapping[str, Tensor]) -> Operand:
        rows, codes = matrix.size // matrix.columns, kept["codes"].view(matrix.size)
        run = BytesRun(0, rows, codes, kept["scale"], of_module=rows, of_scale=rows)
        return Bytes(shape=matrix.shape, runs=(run,))

    @staticmethod
    def rounded(matrix: Frozen, x: np.ndarray) -> np.ndarray:
        codes, scale = np.empty(x.size, E4M3.numpy), np.empty(1, np.float32)
        largest, out = np.array([np.abs(x).max()], np.float32), np.empty(x.size, np.float32)
        ref.quantize(codes, scale, x, largest, x.size)
        ref.dequantize(out, codes, scale, x.size)
        return out


def _parts(config: ModelConfig, layer: int) -> tuple[HalfSpec, ...]:
    """Return the halves of a layer; a half with parts is replaced by its parts."""
    return tuple(part for half in config.halves(layer) for part in half.parts or (half,))
