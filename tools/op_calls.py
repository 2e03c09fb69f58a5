"""Calls that tools/bench_ops.py times: for each operation a function that makes the calls of a
case.

Arguments are descriptions, so that a plan can size the device before tensors are made.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import llmq.ref
from llmq.base.dtypes import (
    BF16,
    E4M3,
    E5M2,
    F32,
    F64,
    I8,
    I32,
    I64,
    STATS,
    STEP_SCALARS,
    STEP_SCALARS_WORDS,
    U8,
    DType,
)
from llmq.base.operand import (
    CODES_MULTIPLE,
    Bytes,
    BytesRun,
    Fp8Out,
    Mxfp4,
    Nf4,
    Nf4Run,
    ProductCodes,
    turned,
)
from llmq.base.tensor import Tensor
from llmq.ops.attention import (
    attention,
    attention_backward,
    attention_gate,
    heads,
    paged,
    qk_norm,
    rope,
    value_norm,
)
from llmq.ops.common import ROWS_MULTIPLE, SCALE_BLOCK, LogitRows, padded_columns
from llmq.ops.delta import delta_gates, delta_rule, gated_norm, short_conv, ssd
from llmq.ops.experts import expert_rows, expert_scale, grouped, route
from llmq.ops.loss import cross_entropy, distill, grpo, labels, mtp, pairs, sample
from llmq.ops.pointwise import clock, elementwise, embedding, gelu, norm, reduce, swiglu
from llmq.ops.product import adapter, matmul, matmul_fused, skinny
from llmq.ops.quantize import (
    four_bits,
    fp8_blocks,
    fp8_scale,
    nvfp4,
    quantize,
    quantize_int8,
    ternary,
)
from llmq.ops.update import adamw, galore, global_norm, muon
from llmq.ref.experts.route import sums_size
from llmq.ref.quantize.four_bits import scale_levels
from llmq.runtime.attention_parts import divisions
from llmq.runtime.device import FUSED, Device
from llmq.runtime.kernel import ceil_div

SEED = 1
ADAMW = {"beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "weight_decay": 0.1, "salt": 1}
EPS = 1e-6


@dataclass(frozen=True)
class Spec:
    """Description of a tensor. value: value of all elements; None: normally distributed elements.
    gradient: True for a gradient to add to. In an Fp8Out or ProductCodes, Specs stand for the
    tensors of these."""

    shape: tuple[int, ...]
    dtype: DType
    value: float | None = None
    gradient: bool = False


@dataclass(frozen=True)
class Call:
    """One call of an operation. args: arguments by name, as Specs, lists of Specs, arrays or plain
    values. bytes, flops: bytes that the call must move, and FLOPs that it must compute; None: the
    numbers that the kernels declare."""

    name: str
    function: Callable[..., None]
    args: dict[str, Any]
    bytes: int | None = None
    flops: int | None = None


def bf16(*shape: int) -> Spec:
    return Spec(shape, BF16)


def f32(*shape: int, value: float | None = None) -> Spec:
    return Spec(shape, F32, value)


def gradient(*shape: int) -> Spec:
    return Spec(shape, BF16, gradient=True)


def fp8_out(rows: int, features: int, *, codes: bool = True, transposed: bool = True) -> Fp8Out:
    return Fp8Out(
        Spec((rows, features), E4M3) if codes else None,
        Spec(turned((rows, features)), E4M3) if transposed else None,
        f32(1, value=0.1),  # a value at which nothing saturates, as in most steps
        Spec((1,), I32),
    )


def product_codes(rows: int, features: int, dtype: DType = E4M3) -> ProductCodes:
    scale, factor, seen = f32(1, value=0.01), f32(1, value=100.0), f32(1, value=1.0)
    codes, saturated = Spec((rows, features), dtype), Spec((1,), I32)
    return ProductCodes(codes, scale, factor, seen, seen, saturated)


def fits_fp8(rows: int, features: int) -> bool:
    return rows % ROWS_MULTIPLE == features % CODES_MULTIPLE == 0


def tokens(vocab: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(SEED).integers(0, vocab, shape, np.int32)


def scalars() -> np.ndarray:
    words = np.zeros(STEP_SCALARS_WORDS, np.int32)
    record = words.view(STEP_SCALARS)[0]
    record["lr"], record["grad_scale"], record["seed"] = 1e-5, 1e-3, SEED
    record["beta1_correction"] = record["beta2_correction"] = 1
    return words


def abs_max_calls(*shape: int) -> list[Call]:
    args = {"abs_max": f32(1, value=0.0), "x": bf16(*shape)}
    return [Call("abs_max", fp8_scale.abs_max, args)]


def adapter_calls(rows: int, rank: int, *edges: int) -> list[Call]:
    spans = tuple(zip(edges[::2], edges[1::2], strict=True))
    whole = bf16(rows, padded_columns(len(spans), rank))
    args = {"whole": whole, "b": bf16(sum(stop - start for start, stop in spans), rank)}
    args |= {"spans": spans, "scales": [2.0] * len(spans)}
    K, tokens, vector = 3584, 4096, f32(rows, value=1.0)
    normed = args | {"out": vector, "w": bf16(rows, K), "a": bf16(whole.shape[1], K)}
    del normed["whole"]
    x = bf16(tokens, rows)
    columns = {"out": x, "x": x, "norms": vector}
    return [
        Call("expand", adapter.expand, args),
        Call("collect", adapter.collect, args),
        Call("norms", adapter.norms, normed),
        Call("scale", adapter.scale, columns | {"magnitudes": vector}),
        Call("magnitude_gradient", adapter.magnitude_gradient, columns | {"y": x}),
    ]


def adapter_backward_calls(rows: int, N: int, rank: int, *edges: int) -> list[Call]:
    spans = tuple(zip(edges[::2], edges[1::2], strict=True))
    n = sum(stop - start for start, stop in spans)
    h = bf16(rows, padded_columns(len(spans), rank))
    args = {"d_h": h, "d_b": gradient(n, rank), "d_out": bf16(rows, N), "h": h, "b": bf16(n, rank)}
    args |= {"spans": spans, "scale": 2.0}
    return [Call("backward", adapter.backward, args, flops=0)]  # bound by memory


def adamw_calls(*ends: int) -> list[Call]:
    n = ends[-1]
    segments = np.array([[end, i % 2] for i, end in enumerate(ends)], np.int64)
    # The second moment is never negative.
    all_bf16 = {"param": bf16(n), "work": None, "m": bf16(n), "v": Spec((n,), BF16, value=1e-4)}
    all_f32 = {"param": f32(n), "work": bf16(n), "m": f32(n), "v": f32(n, value=1e-4)}
    scale = f32(n // SCALE_BLOCK, value=2.0**-20)
    eight_bit = {name: Spec((n,), E4M3) for name in ("m", "v")}
    eight_bit |= {"param": bf16(n), "work": None, "m_scale": scale, "v_scale": scale}
    shared = {"grad": bf16(n), "segments": segments, "scalars": scalars(), **ADAMW}
    return [
        Call("bf16", adamw.update, all_bf16 | shared),
        Call("f32 master and moments", adamw.update, all_f32 | shared),
        Call("bf16, 8-bit moments", adamw.update, eight_bit | shared),
    ]


def muon_calls(rows: int, columns: int) -> list[Call]:
    n = rows * columns
    proposed = {"change": bf16(n), "grad": bf16(n), "scalars": scalars(), "salt": 1}
    proposed |= {"momentum": 0.95}
    eight_bit = {"m": Spec((n,), E4M3), "m_scale": f32(n // SCALE_BLOCK, value=2.0**-20)}
    applied = {"param": bf16(n), "work": None, "change": bf16(n), "scalars": scalars(), "salt": 1}
    applied |= {"lr_scale": 1.0, "weight_decay": 0.1}
    of_norm = {"out": bf16(1, rows, columns), "x": bf16(1, rows, columns)}
    return [
        Call("propose, bf16", muon.propose, proposed | {"m": bf16(n)}),
        Call("propose, 8-bit momentum", muon.propose, proposed | eight_bit),
        Call("apply, bf16", muon.apply, applied),
        Call("apply, f32 master", muon.apply, applied | {"param": f32(n), "work": bf16(n)}),
        Call("normalize", muon.normalize, of_norm),
        Call("even", muon.even, {"x": bf16(1, rows, columns), "v": f32(1, rows), "decay": 0.95}),
    ]


def galore_calls(count: int, side: int) -> list[Call]:
    projection = {"projection": bf16(count, side), "x": f32(count, side), "scalars": scalars()}
    return [
        Call("eigen", galore.eigen, {"s": f32(count, side, side)}),
        Call("renew", galore.renew, projection),
    ]


def _forward_documents(dev: Device, starts: Tensor, **args: Any) -> None:
    attention.forward(dev, mask=attention.AttentionMask(starts), **args)


def _backward_documents(dev: Device, starts: Tensor, **args: Any) -> None:
    attention.backward(dev, mask=attention.AttentionMask(starts), **args)


def attention_calls(B: int, T: int, Hq: int, Hkv: int, Hd: int) -> list[Call]:
    out, qkv = bf16(B, T, Hq, Hd), bf16(B, T, Hq + 2 * Hkv, Hd)
    lse = f32(B, Hq, T, value=float(np.log(T)))  # about the value for these scores
    heads = {"qkv": qkv, "num_heads": Hq, "num_kv_heads": Hkv}
    forward = heads | {"out": out, "lse": lse}
    backward = forward | {"d_qkv": qkv, "d_out": out}
    square, length = B * Hq * T * T * Hd, max(T // 8, 1)  # length: of a document, and of a window
    seen = square * (2 * T - length) * length // T**2
    window = {"mask": attention.AttentionMask(window=length)}
    starts = {"starts": np.tile(np.arange(T, dtype=np.int32) // length * length, (B, 1))}
    calls = []
    for backend in attention.BACKENDS:  # FLOPs without recomputation in the kernel
        chosen = {"backend": backend}
        ahead, back = forward | chosen, backward | chosen
        calls += [
            Call(f"forward {backend}", attention.forward, ahead),
            Call(f"backward {backend}", attention.backward, back, flops=5 * square),
            Call(f"forward {backend} window", attention.forward, ahead | window),
            Call(f"backward {backend} window", attention.backward, back | window, flops=5 * seen),
        ]
    if B == 1:
        back, flops = backward | {"backend": "cudnn"}, 5 * square
        numbers = divisions(1, Hq, Hkv)[1:]
        calls += [
            Call(f"backward cudnn / {n}", attention.backward, back | {"chunks": n}, flops=flops)
            for n in numbers
        ]
        d_kv = {"d_qkv": qkv, "d_kv": bf16(2, Hq, T, Hd)}
        calls.append(Call("sum of heads", attention.sum_heads, d_kv))
    square = square * length // T  # FLOPs of all documents together
    return [
        *calls,
        Call("forward documents", _forward_documents, forward | starts, flops=2 * square),
        Call("backward documents", _backward_documents, backward | starts, flops=5 * square),
    ]


def attention_backward_calls(B: int, T: int, Hq: int, Hkv: int, Hd: int) -> list[Call]:
    """Calls of attention's backward; FLOPs exclude the kernel's recomputation."""
    out, qkv = bf16(B, T, Hq, Hd), bf16(B, T, Hq + 2 * Hkv, Hd)
    args = {"d_qkv": qkv, "d_out": out, "out": out, "qkv": qkv, "num_heads": Hq}
    args |= {"lse": f32(B, Hq, T, value=float(np.log(T))), "num_kv_heads": Hkv}  # as above
    args["kernel"] = partial(attention_backward.backward, micro_batch=B)
    return [Call("backward", attention.backward, args, flops=5 * B * Hq * T * T * Hd)]


def paged_calls(S: int, n: int, Hq: int, Hkv: int, Hd: int, size: int, blocks: int) -> list[Call]:
    """Calls of attention through full block tables; bytes count the cache and the new tokens. S:
    texts. n: new tokens of a text. size: tokens of a block. blocks: blocks of a text."""
    pool, qkv = bf16(S * blocks, size, Hkv, Hd), bf16(S, n, Hq + 2 * Hkv, Hd)
    args = {"qkv": qkv, "k_cache": pool, "v_cache": pool, "num_heads": Hq, "num_kv_heads": Hkv}
    args["table"] = np.arange(S * blocks, dtype=np.int32).reshape(S, blocks)
    args |= {"lengths": np.full(S, size * blocks - n, np.int32), "new": np.full(S, n, np.int32)}
    out, stored = bf16(S, n, Hq, Hd), 4 * S * n * Hkv * Hd
    read = 4 * S * size * blocks * Hkv * Hd + 4 * S * n * Hq * Hd
    flops = 2 * S * n * Hq * (2 * size * blocks - n) * Hd
    attend = {"out": out, "arrived": np.zeros(paged.arrivals(S, Hq), np.int32)}
    return [
        Call("store", paged.store, args, bytes=2 * stored),
        Call("attend", paged.attend, args | attend, bytes=read, flops=flops),
    ]


def paged_latent_calls(
    S: int, n: int, Hq: int, Hd: int, Vd: int, size: int, blocks: int
) -> list[Call]:
    """Calls of paged attention to keys whose first Vd channels are the values. S to blocks: as in
    `paged_calls`."""
    attend = paged_calls(S, n, Hq, 1, Hd, size, blocks)[1]
    args = attend.args | {"v_cache": None, "out": bf16(S, n, Hq, Vd)}
    read = 2 * S * (size * blocks * Hd + n * Hq * (Hd + Vd))
    flops = S * n * Hq * (2 * size * blocks - n) * (Hd + Vd)
    return [Call("attend", paged.attend, args, bytes=read, flops=flops)]


def heads_calls(rows: int, count: int, size: int, step: int) -> list[Call]:
    """Calls that copy `count` heads of `size` channels out of heads of `step` channels, and that
    add the heads up."""
    apart, moved = heads.Place(0, count * step, step), 2 * rows * count * size
    args = {"x": bf16(rows, count * step), "rows": rows, "heads": count, "size": size}
    to = {"out": bf16(rows, count * size), "to": heads.Place(0, count * size, size)}
    args |= to | {"of": apart}
    return [
        Call("copy", heads.copy, args, bytes=2 * moved),
        Call("add up", heads.add_up, args, bytes=moved + moved // count),
    ]


def cross_entropy_calls(rows: int, vocab: int, padded: int) -> list[Call]:
    shared = {"losses": f32(rows), "lse": f32(rows), "targets": tokens(vocab, rows)}
    shared |= {"logits": bf16(rows, padded), "vocab_size": vocab}
    both = shared | {"z_loss": 0.0}
    codes = {"codes": Spec((rows, padded), E5M2), "code_scale": 2.0**-15}
    return [
        Call("forward_backward", cross_entropy.forward_backward, both),
        Call("forward_backward codes", cross_entropy.forward_backward, both | codes),
        Call("weighted", cross_entropy.forward_backward, both | {"weights": f32(rows)}),
        Call("forward", cross_entropy.forward, shared),
    ]


def dropout_calls(sequences: int, per_sequence: int) -> list[Call]:
    x = bf16(sequences, per_sequence)
    args = {"out": x, "x": x, "scalars": scalars(), "salt": 1, "sequences": sequences}
    args |= {"probability": 0.1}
    return [
        Call("dropout", elementwise.dropout, args),
        Call("added", elementwise.dropout, args | {"add": True}),
    ]


def embedding_calls(B: int, T: int, C: int, V: int) -> list[Call]:
    ids = tokens(V, B, T)
    rows, touched = 2 * B * T * C, 2 * np.unique(ids).size * C
    target = {"d_weight": gradient(V, C), "d_out": bf16(B, T, C), "tokens": ids}
    looked_up = {"out": bf16(B, T, C), "tokens": ids, "weight": bf16(V, C), "position_weight": None}
    positions = {"d_position": gradient(T, C), "d_out": bf16(B, T, C)}
    return [
        Call("forward", embedding.forward, looked_up, bytes=2 * rows + ids.nbytes),
        Call("backward", embedding.backward, target, bytes=rows + 2 * touched + ids.nbytes),
        Call("backward_positions", embedding.backward_positions, positions),
    ]


def fp8_scale_calls(length: int, n: int) -> list[Call]:
    history = {"history": f32(length, n, value=1.0), "limits": f32(n, value=224.0)}
    slots = {"scales": f32(n, 4), "abs_maxes": f32(n, 4, value=1.0)}
    return [Call("update", fp8_scale.update, slots | history)]


def gelu_calls(*shape: int) -> list[Call]:
    x, (*leading, features) = bf16(*shape), shape
    rows = math.prod(leading)
    codes = {"abs_max": f32(1, value=5.0), "fp8": fp8_out(rows, features)}
    backward = {"d_out": x, "x": x}
    calls = [
        Call("forward", gelu.forward, {"out": x, "x": x}),
        Call("backward", gelu.backward, backward | {"d_x": x}),
        Call("backward out", gelu.backward, backward | {"d_x": x, "out": x}),
    ]
    if fits_fp8(rows, features):
        again = {"out_fp8": fp8_out(rows, features, codes=False)}
        abs_max = {"d_x": x, "abs_max": f32(1, value=5.0)}
        calls += [
            Call("forward fp8", gelu.forward, {"out": None, "x": x, **codes}),
            Call("backward fp8", gelu.backward, backward | codes | {"d_x": None}),
            Call("backward out_fp8", gelu.backward, backward | abs_max | again),
            Call("backward fp8 out_fp8", gelu.backward, backward | codes | again | {"d_x": None}),
        ]
    return calls


def matmul_calls(M: int, N: int, K: int, trans_a: bool, trans_b: bool) -> list[Call]:
    args = {
        "out": bf16(M, N),
        "a": bf16(*((K, M) if trans_a else (M, K))),
        "b": bf16(*((N, K) if trans_b else (K, N))),
        "trans_a": trans_a,
        "trans_b": trans_b,
    }
    more = {"addend": args["out"]}
    return [Call("matmul", matmul.matmul, args), Call("addend", matmul.matmul, args | more)]


def matmul_fp8_calls(M: int, N: int, K: int) -> list[Call]:
    one = f32(1, value=1.0)
    args = {"out": bf16(M, N), "a": Spec((M, K), E4M3), "b": Spec((N, K), E4M3)}
    args |= {"scale_a": one, "scale_b": one}
    fast = args | {"fast_accumulation": True}
    return [
        Call("matmul_fp8", matmul.matmul_fp8, args),
        Call("fast accumulation", matmul.matmul_fp8, fast),
        Call("addend", matmul.matmul_fp8, fast | {"addend": args["out"]}),
        Call("codes", matmul.matmul_fp8, fast | {"out": product_codes(M, N)}),
    ]


def matmul_adapted_calls(M: int, N: int, K: int, R: int, transposed: bool) -> list[Call]:
    one = f32(1, value=1.0)
    low = {"h": bf16(M, R), "tail": bf16(*((R, N) if transposed else (N, R)))}
    low |= {"out": bf16(M, N), "transposed": transposed}
    halves = {"a": bf16(M, K), "b": bf16(*((K, N) if transposed else (N, K)))}
    codes = {"a": Spec((M, K), E4M3), "b": Spec((N, K), E4M3), "scale_a": one, "scale_b": one}
    return [
        Call("bf16", matmul_fused.adapted, low | halves),
        Call("fp8", matmul_fused.adapted, low | codes),
    ]


def matmul_grouped_calls(M: int, N: int, K: int, E: int, transposed: bool) -> list[Call]:
    args = {"out": bf16(M, N), "starts": np.linspace(0, M, E + 1).astype(np.int32)}
    args |= {"transposed": transposed}
    one, shape = f32(1, value=1.0), (E, K, N) if transposed else (E, N, K)
    codes = {"a": Spec((M, K), E4M3), "b": Spec((E, N, K), E4M3), "scale_a": one, "scale_b": one}
    calls = [Call("bf16", matmul_fused.grouped, args | {"a": bf16(M, K), "b": bf16(*shape)})]
    return [*calls, Call("fp8", matmul_fused.grouped, args | codes)]


def matmul_grouped_gradient_calls(R: int, M: int, N: int, E: int) -> list[Call]:
    args = {"acc": gradient(E, M, N), "a": bf16(R, M), "b": bf16(R, N)}
    args |= {"starts": np.linspace(0, R, E + 1).astype(np.int32)}
    return [Call("bf16", matmul_fused.grouped_gradient, args)]


def matmul_swiglu_backward_calls(M: int, F: int, K: int, R: int) -> list[Call]:
    one, wide = f32(1, value=1.0), bf16(M, 2 * F)
    operands = {"up_gate": wide}
    if R:
        operands |= {"h": bf16(M, R), "tail": bf16(R, F)}
    halves = operands | {"a": bf16(M, K), "b": bf16(K, F), "d_up_gate": wide}
    codes = operands | {"a": Spec((M, K), E4M3), "b": Spec((F, K), E4M3)}
    codes |= {"scale_a": one, "scale_b": one, "d_up_gate": wide if R else None}
    codes |= {"abs_max": f32(1, value=5.0), "fp8": fp8_out(M, 2 * F, transposed=not R)}
    function = matmul_fused.swiglu_backward
    return [Call("bf16", function, halves), Call("fp8", function, codes)]


def matmul_gradient_calls(M: int, N: int, K: int) -> list[Call]:
    one, acc = f32(1, value=1.0), {"acc": gradient(M, N)}
    codes = {"a": Spec((M, K), E4M3), "b": Spec((N, K), E4M3), "scale_a": one, "scale_b": one}
    function = matmul_fused.gradient
    return [
        Call("fp8", function, acc | codes),
        Call("fp8 fast", function, acc | codes | {"fast_accumulation": True}),
    ]


def matmul_int8_calls(M: int, N: int, K: int) -> list[Call]:
    args = {"out": bf16(M, N), "a": Spec((M, K), I8), "b": Spec((N, K), I8)}
    args |= {"scale_a": f32(M, value=1.0), "scale_b": f32(N, value=1.0)}
    return [Call("matmul_int8", matmul.matmul_int8, args)]


def matmul_swiglu_calls(M: int, F: int, K: int, R: int) -> list[Call]:
    one, abs_max = f32(1, value=1.0), f32(1, value=5.0)
    low = {"h": bf16(M, R), "tail": bf16(2 * F, R)} if R else {}
    low |= {"up_gate": bf16(M, 2 * F), "out": bf16(M, F)}
    halves = {"a": bf16(M, K), "b": bf16(2 * F, K)}
    codes = {"a": Spec((M, K), E4M3), "b": Spec((2 * F, K), E4M3), "scale_a": one, "scale_b": one}
    both = {"out": None, "abs_max": abs_max, "fp8": fp8_out(M, F)}
    return [
        Call("bf16", matmul_fused.swiglu, low | halves),
        Call("bf16 gelu", matmul_fused.swiglu, low | halves | {"gelu": True}),
        Call("fp8", matmul_fused.swiglu, low | codes),
        Call("fp8 both", matmul_fused.swiglu, low | codes | both),
    ]


def mxfp4_calls(n: int) -> list[Call]:
    both = {"codes": Spec((n // 2,), U8), "exponents": Spec((n // 32,), U8, 127)}
    return [
        Call("encode", four_bits.encode_mxfp4, both | {"x": bf16(n)}),
        Call("decode", four_bits.decode_mxfp4, both | {"out": bf16(n)}),
    ]


def nvfp4_calls(n: int) -> list[Call]:
    coded = {"codes": Spec((n // 2,), U8), "scales": Spec((n // 16,), E4M3)}
    one = {"factor": f32(1), "abs_max": f32(1, value=5.0)}
    return [
        Call("encode", nvfp4.encode, coded | one | {"x": bf16(n)}),
        Call("decode", nvfp4.decode, coded | {"out": bf16(n), "factors": f32(1, value=0.01)}),
    ]


def fp8_blocks_calls(rows: int, columns: int) -> list[Call]:
    blocks = -(-rows // 128) * -(-columns // 128)
    one, codes = (rows, columns), Spec((1, rows, columns), E4M3)
    scales = {"scales": f32(blocks, value=0.01)}
    return [
        Call("encode", fp8_blocks.encode, scales | {"codes": Spec(one, E4M3), "x": bf16(*one)}),
        Call("decode", fp8_blocks.decode, scales | {"codes": codes, "out": bf16(1, *one)}),
    ]


def nf4_calls(n: int) -> list[Call]:
    half, blocks, groups = four_bits.sizes(n)
    codes, scales = Spec((half,), U8, value=7), f32(blocks)
    mean, levels = f32(1, value=0.0), scale_levels()
    second = {"groups": f32(groups), "mean": mean, "levels": levels}
    kept = {"codes": codes, "scale_codes": Spec((blocks,), U8, value=7)} | second
    fp8 = {"out": Spec((n,), E4M3), "fp8_scale": f32(1, value=0.01)}
    made = {"codes": kept["scale_codes"], "scales": scales}
    return [
        Call("quantize", four_bits.quantize, {"codes": codes, "scales": scales, "x": bf16(n)}),
        Call("scales", four_bits.quantize_scales, made | second),
        Call("decode", four_bits.decode, {"out": bf16(n)} | kept),
        Call("decode fp8", four_bits.decode, kept | fp8),
    ]


def norm_calls(rows: int, C: int, centred: bool) -> list[Call]:
    """Calls of norms, also with codes if C allows them; only `post` writes `out`."""
    x, w = bf16(rows, C), bf16(C)
    mean = f32(rows, value=0.0) if centred else None
    stats = {"mean": mean, "rstd": f32(rows, value=1.0), "weight": w}
    forward = stats | {"out": x, "bias": w if centred else None, "eps": EPS}
    fused = forward | {"residual_out": x, "residual": x, "branch": x}
    backward = stats | {"d_x": x, "d_out": x, "x": x, "d_residual": x}
    backward |= {"d_weight": gradient(C), "d_bias": gradient(C) if centred else None}
    calls = [
        Call("forward", norm.forward, forward | {"x": x}),
        Call("forward_residual", norm.forward_residual, fused),
        Call("backward", norm.backward, backward),
    ]
    more = {"abs_max": f32(1, value=5.0), "fp8": fp8_out(rows, C, transposed=False)}
    if fits_fp8(rows, C):
        calls += [
            Call(
                f"{c.name} fp8", c.function, c.args | more | dict.fromkeys({"out"} & c.args.keys())
            )
            for c in calls
        ]
    if not centred:
        post = {"out": x, "x": x, "residual": x, "eps": EPS, "weight": w, "rstd": stats["rstd"]}
        calls.append(Call("post", norm.post, post))
        calls += [Call("post fp8", norm.post, post | more)] * fits_fp8(rows, C)
    return calls


def outliers_calls(rows: int, cols: int, outs: int) -> list[Call]:
    most = 64
    index = np.arange(most, dtype=np.int32) * (cols // most) if cols > most else np.arange(cols)
    index = np.resize(index.astype(np.int32), most)
    found = {"mask": f32(cols), "index": Spec((most,), I32), "column_max": f32(cols, value=1.0)}
    x = bf16(rows, cols)
    weight = {"q": Spec((outs, cols), I8, value=7), "scale": f32(outs, value=1.0)}
    return [
        Call("select", quantize_int8.select_outliers, found | {"threshold": 6.0}),
        Call(
            "take", quantize_int8.take_outliers, {"out": bf16(rows, most), "x": x, "index": index}
        ),
        Call(
            "weight",
            quantize_int8.outlier_weight,
            {"out": bf16(outs, most), **weight, "index": index},
        ),
    ]


def pairs_calls(B: int, T: int, count: int) -> list[Call]:
    """Calls of losses of pairs of documents, which fill the rows."""
    edges = np.linspace(0, T, 2 * count + 1).astype(np.int32)
    starts, other = np.repeat(edges[:-1], np.diff(edges)), edges[:-1].reshape(-1, 2)[:, ::-1]
    partner = np.repeat(other.reshape(-1) + 1, np.diff(edges))
    rows = {"targets": np.zeros((B, T), np.int32), "starts": np.tile(starts, (B, 1))}
    rows["partner"] = np.tile(partner.astype(np.float32), (B, 1))
    sums = {"sums": f32(3, B, T, value=1.0)}
    return [
        Call("sums", _pair_sums, sums | rows | {"losses": f32(B, T, value=1.0)}),
        Call("weights", _pair_weights, sums | rows | {"weights": f32(B, T)}),
    ]


def _pair_sums(dev: Device, *, starts: Tensor, partner: Tensor, **tensors: Tensor) -> None:
    pairs.sums(dev, **tensors, reference=None, places=pairs.Places(starts, partner))


def _pair_weights(dev: Device, *, starts: Tensor, partner: Tensor, **tensors: Tensor) -> None:
    form = pairs.Form(0, 0, 0.1, 0.0, 0.0, 0.0)
    pairs.weights(dev, **tensors, shift=None, places=pairs.Places(starts, partner), form=form)


def grpo_calls(B: int, T: int, count: int) -> list[Call]:
    """Calls of losses of documents, which fill the rows."""
    rows = {"targets": np.zeros((B, T), np.int32), "starts": None}
    if count:
        first = np.arange(T) // -(-T // count) * -(-T // count)
        rows["starts"] = np.tile(first.astype(np.int32), (B, 1))
    tensors = rows | {n: f32(B, T) for n in ("losses", "old", "reference", "advantages")}
    tensors |= {"sums": f32(3, B, T, value=1.0)}
    return [
        Call("sums", _sample_sums, tensors),
        Call("weights", _sample_weights, tensors | {"weights": f32(B, T)}),
    ]


def _sample_sums(dev: Device, *, sums: Tensor, **tensors: Tensor) -> None:
    grpo.sums(dev, sums, grpo.Samples(**tensors))


def _sample_weights(dev: Device, *, sums: Tensor, weights: Tensor, **tensors: Tensor) -> None:
    form = grpo.Form(0, 0.8, 1.2, 0.1, 1, 0.0)
    grpo.weights(dev, weights, sums, grpo.Samples(**tensors), form)


def _teacher(rows: int, vocab: int, k: int) -> np.ndarray:
    """A teacher whose k columns of each row are equally likely."""
    ids = np.sort(np.random.default_rng(SEED).choice(vocab, k, replace=False)).astype(np.int32)
    row = np.concatenate([ids.view(np.float32), np.full(k, -np.log(k + 1.0), np.float32)])
    return np.tile(row, (rows, 1))


def distill_calls(rows: int, vocab: int, padded_vocab: int, k: int) -> list[Call]:
    of_rows = {name: f32(rows) for name in ("losses", "lse", "kl")}
    args = {"logits": bf16(rows, padded_vocab), **of_rows, "targets": tokens(vocab, rows)}
    args |= {"logprobs": _teacher(rows, vocab, k), "vocab_size": vocab}
    largest = {"top": f32(rows, 2 * k), "logits": bf16(rows, padded_vocab), "lse": f32(rows)}
    top_k = Call("top k", distill.top_k, largest | {"vocab_size": vocab})
    return [Call("distill", _distill, args), top_k]


def _distill(dev: Device, *, logprobs: Tensor, kl: Tensor, **rows: Any) -> None:
    teacher = distill.Teacher(logprobs, kl, 0.5, 2.0, False)
    teacher.launch(dev, LogitRows(**rows, weights=None))


def labels_calls(rows: int, vocab: int, padded_vocab: int, linear: int) -> list[Call]:
    args = {"logits": bf16(rows, padded_vocab), "losses": f32(rows), "lse": f32(rows)}
    args |= {"hits": f32(rows), "targets": np.zeros(rows, np.int32), "weights": f32(rows)}
    how = {"linear": bool(linear), "vocab_size": vocab}
    return [Call("labels", _labels, args | how)]


def _labels(dev: Device, *, hits: Tensor, linear: bool, **rows: Any) -> None:
    labels.Labels(hits, linear).launch(dev, LogitRows(**rows), gradient=True)


def mtp_calls(B: int, T: int) -> list[Call]:
    ids = np.zeros((B, T), np.int32)
    shifted = {name: Spec((B, T), I32) for name in ("tokens", "targets")}
    shifted |= {"of_tokens": ids, "of_targets": ids, "starts": ids}
    ahead = np.append(np.zeros(B * T - 1, np.int32), np.int32(-100))
    flat = {"losses": f32(B * T), "trunk": f32(B * T), "stats": Spec((2,), F64)}
    flat |= {"targets": ahead, "of_targets": ids.reshape(-1)}
    return [Call("shift", mtp.shift, shifted), Call("stats", mtp.stats, flat)]


def qk_norm_calls(B: int, T: int, Hq: int, Hkv: int, Hd: int, wide: bool) -> list[Call]:
    heads, qkv = bf16(B, T, Hq + Hkv, Hd), bf16(B, T, Hq + 2 * Hkv, Hd)
    q, k, norms = (Hq * Hd, Hkv * Hd, 2) if wide else (Hd, Hd, Hq + Hkv)
    shared = {"raw": heads, "rstd": f32(B, T, norms, value=1.0)}
    shared |= {"q_weight": bf16(q), "k_weight": bf16(k)}
    shared |= {"num_heads": Hq, "num_kv_heads": Hkv, "wide": wide}
    d_weights = {"d_q_weight": gradient(q), "d_k_weight": gradient(k)}
    moved = (3 * 2 * (Hq + Hkv) * Hd + norms * 4) * B * T  # three tensors of heads, and rstd
    return [
        Call("forward", qk_norm.forward, shared | {"qkv": qkv, "eps": EPS}, bytes=moved),
        Call("backward", qk_norm.backward, shared | {"d_qkv": qkv, **d_weights}, bytes=moved),
    ]


def value_norm_calls(B: int, T: int, Hq: int, Hkv: int, Hd: int, keys: bool) -> list[Call]:
    qkv, heads = bf16(B, T, Hq + 2 * Hkv, Hd), {"num_heads": Hq, "num_kv_heads": Hkv}
    shared = {"qkv": qkv, "rstd": f32(B, T, Hkv, value=1.0)} | heads
    product = bf16(B * T, (Hq + Hkv) * Hd) if keys else None
    read, written = 2 * B * T * Hd * Hkv, 2 * B * T * Hd * Hkv
    if keys:
        read, written = 2 * B * T * Hd * (Hq + Hkv), 2 * B * T * Hd * (Hq + 2 * Hkv)
    moved = read + written + 4 * B * T * Hkv
    back = shared | {"d_qkv": qkv, "d_product": product}
    return [
        Call("forward", value_norm.forward, shared | {"product": product, "eps": EPS}, bytes=moved),
        Call("backward", value_norm.backward, back, bytes=moved + 2 * B * T * Hd * Hkv),
    ]


def attention_gate_calls(rows: int, Hq: int, Hkv: int, Hd: int) -> list[Call]:
    gate, heads = bf16(rows, Hq * Hd), {"heads": Hq, "kv_heads": Hkv}
    packed = {"qkv": bf16(rows, (Hq + 2 * Hkv) * Hd), "gate": gate}
    packed |= {"product": bf16(rows, 2 * (Hq + Hkv) * Hd)} | heads
    back = dict.fromkeys(("d_x", "d_gate", "d_out", "x", "gate"), gate)
    return [
        Call("split", attention_gate.split, packed),
        Call("merge", attention_gate.merge, packed),
        Call("forward", attention_gate.forward, dict.fromkeys(("out", "x", "gate"), gate)),
        Call("backward", attention_gate.backward, back),
    ]


def attention_sinks_calls(B: int, T: int, Hq: int, Hd: int) -> list[Call]:
    shared = {"out": bf16(B, T, Hq, Hd), "lse": f32(B, Hq, T), "sinks": bf16(Hq)}
    back = shared | {"d_sinks": gradient(Hq), "d_out": bf16(B, T, Hq, Hd)}
    return [
        Call("forward", attention_gate.sinks_forward, shared | {"without": f32(B, Hq, T)}),
        Call("backward", attention_gate.sinks_backward, back),
    ]


def clamped_swiglu_calls(rows: int, F: int) -> list[Call]:
    shared = {"pairs": bf16(rows, 2 * F), "alpha": 1.702, "limit": 7.0}
    back = shared | {"d_pairs": bf16(rows, 2 * F), "d_out": bf16(rows, F)}
    return [
        Call("forward", swiglu.clamped_forward, shared | {"out": bf16(rows, F)}),
        Call("backward", swiglu.clamped_backward, back),
    ]


def delta_gates_calls(rows: int, heads: int, columns: int, offset: int, parts: int) -> list[Call]:
    shared = {"gates": f32(rows, 2, heads, value=0.5), "x": bf16(rows, columns)}
    shared |= {"a_log": bf16(heads), "dt_bias": bf16(heads), "offset": offset, "parts": parts}
    sums = {"d_a_log": gradient(heads), "d_dt_bias": gradient(heads)}
    back = shared | sums | {"d_x": bf16(rows, columns), "d_gates": f32(rows, 2, heads)}
    read = rows * heads * parts
    return [
        Call("forward", delta_gates.forward, shared, bytes=read * 2 + rows * heads * 8),
        Call("backward", delta_gates.backward, back, bytes=read * 4 + rows * heads * 16),
    ]


def delta_rule_calls(B: int, T: int, Hk: int, Hv: int, DK: int, DV: int) -> list[Call]:
    heads = delta_rule.Heads(Hk, Hv, DK, DV)
    qkv, out = bf16(B, T, heads.channels), bf16(B, T, Hv * DV)
    gates, state = f32(B, T, 2, Hv, value=-0.1), f32(B, Hv, DK, DV)
    shared = {"qkv": qkv, "gates": gates, "heads": heads}
    back = shared | {"d_qkv": qkv, "d_gates": f32(B, T, 2, Hv), "d_out": out}
    tokens = shared | {"qkv": bf16(B, 1, heads.channels), "gates": f32(B, 1, 2, Hv, value=-0.1)}
    tokens |= {"out": bf16(B, 1, Hv * DV), "state": state}
    return [
        Call("forward", delta_rule.forward, shared | {"out": out}),
        Call("backward", delta_rule.backward, back),
        Call("recurrence", delta_rule.recurrence, tokens),
    ]


def ssd_calls(B: int, T: int, Hk: int, Hv: int, DK: int, DV: int) -> list[Call]:
    heads = ssd.Heads(Hk, Hv, DK, DV)
    qkv, out = bf16(B, T, heads.channels), bf16(B, T, Hv * DV)
    shared = {"qkv": qkv, "gates": f32(B, T, 2, Hv, value=-0.1), "skip": bf16(Hv), "heads": heads}
    back = shared | {
        "d_qkv": qkv,
        "d_gates": f32(B, T, 2, Hv),
        "d_out": out,
        "d_skip": gradient(Hv),
    }
    tokens = shared | {"qkv": bf16(B, 1, heads.channels), "gates": f32(B, 1, 2, Hv, value=-0.1)}
    tokens |= {"out": bf16(B, 1, Hv * DV), "state": f32(B, Hv, DK, DV)}
    return [
        Call("forward", ssd.forward, shared | {"out": out}),
        Call("backward", ssd.backward, back),
        Call("recurrence", ssd.recurrence, tokens),
    ]


def gated_norm_calls(
    rows: int, heads: int, size: int, columns: int, offset: int, gate_first: bool
) -> list[Call]:
    x, gate = bf16(rows, heads * size), bf16(rows, columns)
    weight = (heads if gate_first else 1, size)
    shared = {"x": x, "gate": gate, "weight": bf16(*weight), "eps": EPS, "offset": offset}
    shared["gate_first"] = gate_first
    back = shared | {"d_x": x, "d_gate": gate, "d_out": x, "d_weight": gradient(math.prod(weight))}
    moved = rows * heads * size * 2
    return [
        Call("forward", gated_norm.forward, shared | {"out": x}, bytes=3 * moved),
        Call("backward", gated_norm.backward, back, bytes=5 * moved),
    ]


def sample_calls(rows: int, vocab: int, padded: int) -> list[Call]:
    """Calls of each filter, on logits whose largest values have a small part of the probability."""
    args = {"tokens": Spec((rows,), I32), "logprobs": f32(rows), "logits": bf16(rows, padded)}

    def call(name: str, temperature: float, top_k: int, top_p: float) -> Call:
        numbers = {"temperature": temperature, "top_p": top_p, "min_p": 0, "repetition": 1}
        how = {name: np.full(rows, value, np.float32) for name, value in numbers.items()}
        how |= {"top_k": np.full(rows, top_k, np.int32), "seed": np.arange(rows)}
        how["position"] = np.zeros(rows, np.int32)
        return Call(name, partial(_choose, vocab), args | how)

    return [
        call("highest", 0, 0, 1),
        call("draw", 1, 0, 1),
        call("top_k", 1, 20, 1),
        call("top_p", 1, 0, 0.95),
        call("top_k, top_p", 1, 20, 0.95),
    ]


def _choose(
    vocab: int, dev: Device, tokens: Tensor, logprobs: Tensor, logits: Tensor, **how: Tensor
) -> None:
    requests = sample.Requests(**how)
    sample.choose(dev, tokens, logprobs, logits, requests, vocab_size=vocab)


def short_conv_calls(B: int, T: int, channels: int, columns: int, taps: int) -> list[Call]:
    out, x = bf16(B, T, channels), bf16(B, T, columns)
    shared = {"x": x, "weight": bf16(channels, taps)}
    back = shared | {"d_x": x, "d_out": out, "d_weight": gradient(channels, taps)}
    moved = B * T * channels * 2
    return [
        Call("forward", short_conv.forward, shared | {"out": out}, bytes=2 * moved),
        Call("backward", short_conv.backward, back, bytes=3 * moved),
    ]


def quantize_scaled(dev: Device, x: Tensor, abs_max: Tensor, **fp8: Tensor) -> None:
    names = ("q", "q_t", "scale", "saturated")
    quantize.scaled(dev, x, Fp8Out(*(fp8[name] for name in names)), abs_max=abs_max)


def quantize_calls(rows: int, cols: int) -> list[Call]:
    q, q_t = {"q": Spec((rows, cols), E4M3)}, {"q_t": Spec(turned((rows, cols)), E4M3)}
    shared = {"scale": f32(1), "x": bf16(rows, cols), "abs_max": f32(1, value=5.0)}
    known = {"scale": f32(1, value=0.01), "saturated": Spec((1,), I32)}
    back = {"out": bf16(rows * cols), "q": Spec((rows * cols,), E4M3), "scale": known["scale"]}
    return [
        Call("rows", quantize.quantize, shared | q | {"q_t": None}),
        Call("columns", quantize.quantize, shared | q_t | {"q": None}),
        Call("both", quantize.quantize, shared | q | q_t),
        Call("scaled", quantize_scaled, {**shared, **q, **q_t, **known}),
        Call("transpose", quantize.transpose, q_t | q),
        Call("back", quantize.dequantize, back),
    ]


def _rows_stochastic(dev: Device, scalars: Tensor, **args: Any) -> None:
    rounding = quantize_int8.Stochastic(scalars, 1, args["x"].shape[0])
    quantize_int8.rows(dev, **args, stochastic=rounding)


def _columns_stochastic(dev: Device, scalars: Tensor, **args: Any) -> None:
    rounding = quantize_int8.Stochastic(scalars, 1, args["x"].shape[0])
    quantize_int8.columns(dev, **args, stochastic=rounding)


def _ternary_scales(dev: Device, scale: Tensor, w: Tensor) -> None:
    ternary.scales(dev, scale, w, w.shape[:1])


def ternary_calls(rows: int, cols: int) -> list[Call]:
    shared = {"w": bf16(rows, cols), "scale": f32(rows, value=0.7)}
    return [
        Call("scales", _ternary_scales, shared),
        Call("codes", ternary.codes, shared | {"q": Spec((rows, cols), I8)}),
        Call("round", ternary.round_, shared | {"out": bf16(rows, cols)}),
    ]


def quantize_int8_calls(rows: int, cols: int) -> list[Call]:
    x = bf16(rows, cols)
    by_rows = {"q": Spec((rows, cols), I8), "scale": f32(rows), "x": x}
    by_columns = {"q_t": Spec(turned((rows, cols)), I8), "scale": f32(cols), "x": x}
    random_numbers = {"scalars": scalars()}
    return [
        Call("rows", quantize_int8.rows, by_rows),
        Call("rows stochastic", _rows_stochastic, by_rows | random_numbers),
        Call("columns", quantize_int8.columns, by_columns),
        Call("columns stochastic", _columns_stochastic, by_columns | random_numbers),
    ]


def rope_calls(B: int, T: int, Hq: int, Hkv: int, Hd: int) -> list[Call]:
    qkv = bf16(B, T, Hq + 2 * Hkv, Hd)
    table = rope.make_table(T, Hd, 1e6, None)
    shared = {"table": table, "num_heads": Hq, "num_kv_heads": Hkv}
    features = (Hq + 2 * Hkv) * Hd
    moved = 2 * 2 * B * T * (Hq + Hkv) * Hd + table.nbytes
    values, codes = 2 * B * T * Hkv * Hd, 2 * B * T * features
    backward = shared | {"d_qkv": qkv}
    with_bias = backward | {"d_bias": gradient(features)}
    fp8 = {"abs_max": f32(1, value=5.0), "fp8": fp8_out(B * T, features)}
    calls = [
        Call("forward", rope.forward, shared | {"qkv": qkv}, bytes=moved),
        Call("backward", rope.backward, backward, bytes=moved),
        Call("backward bias", rope.backward, with_bias, bytes=moved + values),
    ]
    if fits_fp8(B * T, features):
        moved = 2 * codes + table.nbytes
        calls += [
            Call("backward fp8", rope.backward, backward | fp8, bytes=moved),
            Call("backward bias fp8", rope.backward, with_bias | fp8, bytes=moved),
        ]
    return calls


def skinny_calls(M: int, N: int, K: int) -> list[Call]:
    args = {"out": bf16(M, N), "a": bf16(M, K), "b": bf16(N, K)}
    return [
        Call("skinny", skinny.skinny, args),
        Call("matmul", matmul.matmul, args | {"trans_b": True}),
    ]


def skinny_nf4_calls(M: int, N: int, K: int, first: int, end: int, modules: int) -> list[Call]:
    n = (end - first) * K
    half, blocks, groups = four_bits.sizes(n // modules)
    codes = {"codes": Spec((modules * half,), U8), "scale_codes": Spec((modules * blocks,), U8)}
    codes |= {"groups": f32(modules * groups), "mean": f32(modules, value=1.0)}
    args = {"out": bf16(M, N), "a": bf16(M, K), "levels": scale_levels(), **codes}
    return [Call("skinny_nf4", partial(_multiply_nf4, (N, K), first), args)]


def _multiply_nf4(
    shape: tuple[int, int], first: int, dev: Device, out: Tensor, a: Tensor, levels: Tensor,
    **codes: Tensor,
) -> None:  # fmt: skip
    run = Nf4Run(first, codes["codes"].size * 2 // shape[1], **codes)
    skinny.skinny_nf4(dev, out, a, Nf4(shape=shape, runs=(run,), levels=levels))


def skinny_mxfp4_calls(M: int, N: int, K: int) -> list[Call]:
    args = {"out": bf16(M, N), "a": bf16(M, K), "codes": Spec((N * K // 2,), U8)}
    args["exponents"] = Spec((N * K // 32,), U8)
    return [Call("skinny_mxfp4", partial(_multiply_mxfp4, (N, K)), args)]


def _multiply_mxfp4(
    shape: tuple[int, int], dev: Device, out: Tensor, a: Tensor, **codes: Tensor
) -> None:
    skinny.skinny_mxfp4(dev, out, a, Mxfp4(shape=shape, **codes))


def skinny_bytes_calls(
    M: int, N: int, K: int, first: int, end: int, of_module: int, of_scale: int
) -> list[Call]:
    scales = (end - first) // of_module * ceil_div(of_module, of_scale)
    args = {"out": bf16(M, N), "a": bf16(M, K), "scales": f32(scales, value=1.0)}
    return [
        Call(
            f"skinny_bytes {dtype}",
            partial(_multiply_bytes, (N, K), (first, end - first), (of_module, of_scale)),
            args | {"codes": Spec(((end - first) * K,), dtype)},
        )
        for dtype in (E4M3, I8)
    ]


def _multiply_bytes(
    shape: tuple[int, int], span: tuple[int, int], form: tuple[int, int], dev: Device, out: Tensor,
    a: Tensor, codes: Tensor, scales: Tensor,
) -> None:  # fmt: skip
    run = BytesRun(*span, codes, scales, *form)
    skinny.skinny_bytes(dev, out, a, Bytes(shape=shape, runs=(run,)))


def swiglu_calls(rows: int, F: int) -> list[Call]:
    x, wide = bf16(rows, F), bf16(rows, 2 * F)
    forward, backward = {"up_gate": wide}, {"d_out": x, "up_gate": wide}
    calls = [
        Call("forward", swiglu.forward, forward | {"out": x}),
        Call("backward", swiglu.backward, backward | {"d_up_gate": wide}),
        Call("backward out", swiglu.backward, backward | {"d_up_gate": wide, "out": x}),
        Call("forward gelu", swiglu.forward, forward | {"out": x, "gelu": True}),
        Call("backward gelu", swiglu.backward, backward | {"d_up_gate": wide, "gelu": True}),
        Call(
            "backward weighted",
            swiglu.weighted_backward,
            backward
            | {"d_up_gate": wide, "weighted": x, "order": np.arange(rows, dtype=np.int32)}
            | dict.fromkeys(("weights", "d_weights"), f32(rows, 1)),
        ),
    ]
    if fits_fp8(rows, F):
        abs_max = {"abs_max": f32(1, value=5.0)}
        again = {"out_fp8": fp8_out(rows, F, codes=False)}
        stored = backward | abs_max | {"d_up_gate": wide}
        forward, backward = forward | {"out": None}, backward | {"d_up_gate": None}
        codes = abs_max | {"fp8": fp8_out(rows, F, transposed=False)}
        transposed = abs_max | {"fp8": fp8_out(rows, F, codes=False)}
        both = abs_max | {"fp8": fp8_out(rows, F)}
        d_both = abs_max | {"fp8": fp8_out(rows, 2 * F)}
        calls += [
            Call("forward fp8 codes", swiglu.forward, forward | codes),
            Call("forward fp8 transposed", swiglu.forward, forward | transposed),
            Call("forward fp8 both", swiglu.forward, forward | both),
            Call("backward fp8 both", swiglu.backward, backward | d_both),
            Call("backward out_fp8", swiglu.backward, stored | again),
            Call("backward fp8 out_fp8", swiglu.backward, backward | d_both | again),
        ]
        up = {"up_gate": product_codes(rows, 2 * F)}
        down = {"d_out": product_codes(rows, F)}
        calls += [
            Call("forward of codes", swiglu.forward, forward | both | up),
            Call("backward of codes", swiglu.backward, backward | d_both | up | down),
        ]
    return calls


def even_choice(rows: int, experts: int, top_k: int) -> np.ndarray:
    """Different experts for each row, drawn at random."""
    order = np.random.default_rng(SEED).uniform(size=(rows, experts)).argsort(axis=1)
    return order[:, :top_k].astype(np.int32)


def expert_rows_calls(rows: int, C: int, E: int, top_k: int) -> list[Call]:
    chosen, n = even_choice(rows, E, top_k), rows * top_k
    order = chosen.reshape(-1).argsort(kind="stable").astype(np.int32)
    place = np.empty(n, np.int32)
    place[order] = np.arange(n)
    sort = {"order": Spec((n,), I32), "place": Spec((rows, top_k), I32), "chosen": chosen}
    x, y, shares = bf16(rows, C), bf16(n, C), f32(rows, top_k)
    starts = np.bincount(chosen.reshape(-1), minlength=E).cumsum()
    sums = {"target": gradient(E, C), "x": y, "starts": np.append(0, starts).astype(np.int32)}
    back = {"place": place.reshape(rows, top_k), "weights": shares, "y": y}
    return [
        Call("sort", expert_rows.sort_rows, sort | {"starts": Spec((E + 1,), I32)}),
        Call("gather", expert_rows.gather_rows, {"out": y, "x": x, "place": back["place"]}),
        Call("combine", expert_rows.combine, back | {"out": x}),
        Call(
            "combine backward",
            expert_rows.combine_backward,
            back | {"d_y": y, "d_weights": shares, "weighted": y},
        ),
        Call("sum", expert_rows.sum_rows, sums),
    ]


def grouped_calls(R: int, N: int, K: int, E: int) -> list[Call]:
    starts = np.linspace(0, R, E + 1).astype(np.int32)
    x, y, shared = bf16(R, K), bf16(R, N), {"starts": starts}
    forward = shared | {"out": y, "x": x, "w": bf16(E, N, K), "trans_b": True}
    backward = shared | {"out": x, "x": y, "w": bf16(E, N, K)}
    of_weight = shared | {"d_w": gradient(E, N, K), "d_y": y, "x": x}
    return [
        Call("forward", grouped.grouped_matmul, forward),
        Call("data gradient", grouped.grouped_matmul, backward),
        Call("weight gradient", grouped.grouped_gradient, of_weight),
    ]


def route_calls(rows: int, E: int, top_k: int) -> list[Call]:
    chosen, shares, logits = Spec((rows, top_k), I32), f32(rows, top_k), f32(rows, E)
    sums = Spec((1, sums_size(E)), I64, 0)
    forward = {"chosen": chosen, "weights": shares, "logits": logits}
    backward = {"d_logits": bf16(rows, E), "d_weights": shares, "logits": logits}
    backward |= {"chosen": even_choice(rows, E, top_k)}
    factors, renormalized = f32(E + 1), {"renormalize": True}
    balance = {"factors": factors, "losses": Spec((4,), F64), "totals": sums, "sums": sums}
    balance |= {"targets": tokens(1000, rows), "aux": 0.01, "z": 0.001}
    return [
        Call("forward", route.route, forward | renormalized),
        Call("backward", route.route_backward, backward | renormalized | {"factors": factors}),
        Call("balance", route.balance, balance),
    ]


def expert_scale_calls(rows: int, E: int, top_k: int) -> list[Call]:
    chosen = even_choice(rows, E, top_k)
    order = chosen.reshape(-1).argsort(kind="stable").astype(np.int32)
    starts = np.searchsorted(np.sort(chosen, axis=None), np.arange(E + 1)).astype(np.int32)
    shared = {"weights": f32(rows, top_k), "scale": bf16(E)}
    back = shared | {"d_weights": f32(rows, top_k), "d_scale": gradient(E)}
    back |= {"order": order, "starts": starts}
    forward = shared | {"out": f32(rows, top_k), "chosen": chosen}
    return [
        Call("forward", expert_scale.forward, forward),
        Call("backward", expert_scale.backward, back),
    ]


def bias_calls(rows: int, N: int) -> list[Call]:
    return [Call("backward", reduce.bias_gradient, {"d_bias": gradient(N), "d_out": bf16(rows, N)})]


def clock_calls(*shape: int) -> list[Call]:
    at, total = Spec(shape, I64, value=0), Spec(shape, F64, value=0)
    return [
        Call("start", clock.start, {"at": at}),
        Call("stop", clock.stop, {"total": total, "at": at}),
    ]


def average_calls(n: int) -> list[Call]:
    given = {"average": f32(n), "param": bf16(n)}
    return [
        Call("update", elementwise.average, given | {"scalars": scalars(), "decay": 0.999}),
        Call("exchange", elementwise.exchange_average, given | {"back": False}),
    ]


def elementwise_calls(*shape: int) -> list[Call]:
    add, convert, x = elementwise.add, elementwise.convert, bf16(*shape)
    rows, columns = math.prod(shape[:-1]), shape[-1] // 16 * 8
    wide, moved = bf16(rows, max(columns, 8) * 2), 2 * 3 * rows * max(columns, 8)
    products = {"out": wide, "a": wide, "b": wide, "channels": max(columns, 8), "at": (0, 0, 8)}
    return [
        Call("add", add, dict.fromkeys(("out", "a", "b"), bf16(*shape))),
        Call("scale", elementwise.scale, {"out": x, "x": x, "by": bf16(1)}),
        Call("multiply", elementwise.multiply, products, bytes=moved),
        Call("to bf16", convert, {"out": bf16(*shape), "x": f32(*shape)}),
        Call("to f32", convert, {"out": f32(*shape), "x": bf16(*shape)}),
        Call("fill", elementwise.fill, {"x": bf16(*shape), "value": 1.0}),
    ]


def global_norm_calls(*sizes: int) -> list[Call]:
    args = {"stats": Spec((len(STATS),), F64), "xs": [bf16(size) for size in sizes]}
    return [Call("squared", _norm_squared, args)]


def _norm_squared(dev: Device, stats: Tensor, xs: list[Tensor]) -> None:
    with dev.scratch("sums", (sum(global_norm.num_partials(dev, x) for x in xs),), F64) as sums:
        for x, part in zip(xs, global_norm.split(dev, sums, xs), strict=True):
            global_norm.partials(dev, part, x)
        global_norm.total(dev, stats, sums)


def random_calls(*shape: int) -> list[Call]:
    return [Call("normal", elementwise.normal, {"out": bf16(*shape), "std": 1.0, "seed": SEED})]


def reduce_calls(*shape: int) -> list[Call]:
    acc = gradient(*shape)
    parts = {"acc": acc, "parts": [bf16(*shape)] * 8}
    return [
        Call("add", reduce.add, {"acc": acc, "x": bf16(*shape)}),
        Call("sum of 8 parts", reduce.sum_parts, parts),
    ]


OPS: dict[str, Callable[..., list[Call]]] = {
    "abs_max": abs_max_calls,
    "adamw": adamw_calls,
    "adapter": adapter_calls,
    "adapter_backward": adapter_backward_calls,
    "attention": attention_calls,
    "attention_backward": attention_backward_calls,
    "attention_gate": attention_gate_calls,
    "attention_sinks": attention_sinks_calls,
    "bias": bias_calls,
    "clamped_swiglu": clamped_swiglu_calls,
    "clock": clock_calls,
    "average": average_calls,
    "cross_entropy": cross_entropy_calls,
    "delta_gates": delta_gates_calls,
    "delta_rule": delta_rule_calls,
    "distill": distill_calls,
    "dropout": dropout_calls,
    "elementwise": elementwise_calls,
    "embedding": embedding_calls,
    "expert_rows": expert_rows_calls,
    "fp8_scale": fp8_scale_calls,
    "gated_norm": gated_norm_calls,
    "gelu": gelu_calls,
    "global_norm": global_norm_calls,
    "grouped": grouped_calls,
    "matmul": matmul_calls,
    "matmul_fp8": matmul_fp8_calls,
    "matmul_adapted": matmul_adapted_calls,
    "matmul_gradient": matmul_gradient_calls,
    "matmul_grouped": matmul_grouped_calls,
    "matmul_grouped_gradient": matmul_grouped_gradient_calls,
    "matmul_int8": matmul_int8_calls,
    "matmul_swiglu": matmul_swiglu_calls,
    "matmul_swiglu_backward": matmul_swiglu_backward_calls,
    "galore": galore_calls,
    "muon": muon_calls,
    "mtp": mtp_calls,
    "mxfp4": mxfp4_calls,
    "expert_scale": expert_scale_calls,
    "four_bits": nf4_calls,
    "fp8_blocks": fp8_blocks_calls,
    "grpo": grpo_calls,
    "norm": norm_calls,
    "nvfp4": nvfp4_calls,
    "outliers": outliers_calls,
    "paged": paged_calls,
    "paged_latent": paged_latent_calls,
    "pairs": pairs_calls,
    "qk_norm": qk_norm_calls,
    "quantize": quantize_calls,
    "quantize_int8": quantize_int8_calls,
    "random": random_calls,
    "reduce": reduce_calls,
    "rope": rope_calls,
    "route": route_calls,
    "sample": sample_calls,
    "short_conv": short_conv_calls,
    "ssd": ssd_calls,
    "skinny": skinny_calls,
    "skinny_bytes": skinny_bytes_calls,
    "skinny_mxfp4": skinny_mxfp4_calls,
    "skinny_nf4": skinny_nf4_calls,
    "swiglu": swiglu_calls,
    "heads": heads_calls,
    "labels": labels_calls,
    "ternary": ternary_calls,
    "value_norm": value_norm_calls,
}


# Cases of operations with several kinds of kernels: the file of llmq/ref, and the cases' name in
# this file.
KINDS = {
    "abs_max": ("fp8_scale", "ABS_MAX_CASES"),
    "adapter_backward": ("adapter", "BACKWARD_CASES"),
    "attention_sinks": ("attention_gate", "SINKS_CASES"),
    "average": ("elementwise", "AVERAGE_CASES"),
    "bias": ("reduce", "BIAS_CASES"),
    "clamped_swiglu": ("swiglu", "CLAMPED_CASES"),
    "dropout": ("elementwise", "DROPOUT_CASES"),
    "matmul_fp8": ("matmul", "FP8_CASES"),
    "matmul_int8": ("matmul", "INT8_CASES"),
    "mxfp4": ("four_bits", "MXFP4_CASES"),
    "outliers": ("quantize_int8", "OUTLIERS_CASES"),
    "paged_latent": ("paged", "LATENT_CASES"),
    "random": ("elementwise", "CASES"),
    "skinny_bytes": ("skinny", "BYTES_CASES"),
    "skinny_mxfp4": ("skinny", "MXFP4_CASES"),
    "skinny_nf4": ("skinny", "NF4_CASES"),
}


def cases(op: str) -> dict[str, tuple]:
    """Return the named shapes of an operation, of one of its kinds, or of a kernel of
    matmul_fused."""
    if op in FUSED:
        return importlib.import_module("llmq.ref.product.matmul_fused").CASES[op]
    file, name = KINDS.get(op, (op, "CASES"))
    modules = pkgutil.walk_packages(llmq.ref.__path__, "llmq.ref.")
    (module,) = (m.name for m in modules if not m.ispkg and m.name.endswith(f".{file}"))
    return getattr(importlib.import_module(module), name)
