"""Precision options: number formats of weights, products and gradients, with their rules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from llmq.options.conditions import instead_of_fp8, uncoded_product, why_not_half
from llmq.options.option_types import FP8_DTYPES, dtype_option, option
from llmq.options.rule import REFUSE, Options, Rule, default, each, refused

FP8_BASES = ("e4m3", "nf4")  # bases whose weights fp8 products can multiply
FP8_CAPABILITY = 89  # Ada is the first with fp8 tensor cores

_INT8_TERMS = (2**31 - 1) // 127**2 // 16 * 16  # most products of two codes in an int32 sum
_INT8_WIDTH = 65536  # widest quantized row
_AS_MODEL = "as --model-dtype if not given"


def _formats(name: str, *codes: str) -> Iterator[Rule]:
    """Rules that permit the model's format for an option, and `codes` beside a bf16 model."""

    def others(v: str, o: Options) -> str | None:
        allowed = (o.model_dtype, *(codes if o.model_dtype == "bf16" else ()))
        return (
            None if v in (*allowed, "ternary") else f"{o.model_dtype}, use {' or '.join(allowed)}"
        )

    return refused(name, others, "{value} does not go with --model-dtype {found}")


@dataclass(frozen=True, kw_only=True)
class PrecisionOptions:
    """Options of number formats of weights, products and gradients."""

    model_dtype: str = dtype_option("bf16", "Format of weights and activations", group="Precision")
    master_dtype: str | None = dtype_option(None, "Format of the weights the optimizer updates")
    grad_accum_dtype: str | None = dtype_option(None, "Format in which gradients are summed")
    matmul_dtype: str | None = dtype_option(
        None,
        "Format in which the products of the blocks run; ternary: forward with weights -1, 0 and 1",
        *("e4m3", "int8", "ternary"),
    )
    ternary_of: str = option(
        "all",
        "Matrices with --matmul-dtype ternary; the others have products in --model-dtype",
        choices=("all", "mlp", "attention"),
    )
    gradient_dtype: str | None = dtype_option(
        None, "Format of output gradients in these products", *FP8_DTYPES, "int8"
    )
    head_dtype: str | None = dtype_option(
        None, "Format in which the LM head's products run", "e4m3"
    )
    mlp_dtype: str | None = dtype_option(
        None,
        "Format in which the MLP's activation gets what products write for it, forward and "
        "backward; e4m3: as fp8 codes",
        "e4m3",
    )
    fp8_recipe: str = option(
        "jit",
        "Scales of fp8 tensors; jit: from their own values, delayed: from those of earlier steps",
        choices=("jit", "delayed"),
    )
    fp8_fast_accumulation: str = option(
        "activations",
        "fp8 products that may sum with fewer bits, which is faster; activations: forward and the "
        "gradients of activations in blocks",
        choices=("none", "forward", "activations", "all"),
    )
    fp8_accumulate: str = option(
        "fp32",
        "Sums of the fp8 products that --fp8-fast-accumulation permits; fp16: of 64 in half "
        "precision, which GeForce cards multiply faster, of codes that are small enough",
        choices=("fp32", "fp16"),
    )

    @property
    def is_fp8(self) -> bool:
        """True if matrix products of the blocks run in fp8."""
        return self.matmul_dtype == "e4m3"

    @property
    def product_dtype(self) -> str | None:
        """Format of the products of backward: --matmul-dtype, or --model-dtype where rounding is
        passed straight through."""
        return self.model_dtype if self.matmul_dtype == "ternary" else self.matmul_dtype

    @property
    def own_master(self) -> bool:
        """True if master weights have another dtype than the model's weights."""
        return self.master_dtype != self.model_dtype


PRECISION_RULES = (
    default(
        "master_dtype",
        lambda o: "fp32" if o.wants_adapters else o.model_dtype,  # adapters are small
        help=f"{_AS_MODEL}, with adapters fp32",
    ),
    default(
        "grad_accum_dtype",
        lambda o: "fp32" if o.wants_adapters else o.model_dtype,
        help=f"{_AS_MODEL}, with adapters fp32",
    ),
    # Products multiply the 8-bit codes of adapter bases directly.
    default(
        "matmul_dtype",
        lambda o: o.base_dtype,
        lambda v, o: (
            (o.wants_adapters or o.only_scores)
            and o.model_dtype == "bf16"
            and o.base_dtype in ("e4m3", "int8")
            and not o.lora_dora
        ),
    ),
    default("matmul_dtype", lambda o: o.model_dtype, help=_AS_MODEL),
    default("head_dtype", lambda o: o.model_dtype, help=_AS_MODEL),
    default("mlp_dtype", lambda o: o.model_dtype, help=_AS_MODEL),
    default(
        "gradient_dtype",
        lambda o: o.product_dtype,
        help="as --matmul-dtype if not given, with ternary as --model-dtype",
    ),
    *refused(
        "head_dtype",
        lambda v, o: o.head == "score" and v == "e4m3",
        "a score head is too small for e4m3: use bf16",
    ),
    *each(
        "head_dtype",
        REFUSE,
        lambda v, o: (o.loss != "ce" or o.token_weights) and v == "e4m3",
        "--loss {loss}: an fp8 head rounds the weights of rows to within 1/8: use --head-dtype "
        "bf16",
    ),
    *refused(
        "head_dtype",
        lambda v, o, model: (
            o.trains_new_rows
            and v != o.model_dtype
            and (model.tied_embeddings or "new-rows" in o.train)
        ),
        "{value} has no gradient of new rows alone: leave it out, or give --train=embeddings,head",
    ),
    *refused(
        "master_dtype grad_accum_dtype",
        lambda v, o: o.model_dtype == "fp32" and v == "bf16",
        "bf16 is too coarse for --model-dtype fp32, use fp32",
    ),
    # Products run in the model's format, or in 8 bits with 8-bit output gradients.
    *refused(
        "matmul_dtype",
        lambda v, o: o.freezes_model and v == "e4m3" and o.base_dtype not in FP8_BASES,
        "e4m3 needs --base-dtype e4m3 or nf4 beside adapters: no weight changes, "
        "so that one in a wider format would be memory for nothing",
    ),
    *refused(
        "matmul_dtype",
        lambda v, o: v == "ternary" and (o.wants_adapters or o.is_quantized),
        "ternary is for weights that are trained: leave it out beside adapters and --base-dtype",
    ),
    *_formats("matmul_dtype", "e4m3", "int8"),
    *refused(
        "gradient_dtype",
        lambda v, o: v != o.matmul_dtype and "int8" in (v, o.matmul_dtype),
        "must be int8 with --matmul-dtype int8, and with that only, got {value} "
        "with {matmul_dtype}",
    ),
    *refused(
        "gradient_dtype",
        lambda v, o: o.is_fp8 and v not in FP8_DTYPES,
        "must be e4m3 or e5m2 with --matmul-dtype e4m3, got {value}",
    ),
    *refused(
        "gradient_dtype",
        lambda v, o: not o.is_fp8 and v != o.product_dtype,
        "{value} needs --matmul-dtype e4m3, which is {matmul_dtype}",
    ),
    *refused(
        "head_dtype",
        lambda v, o: not o.is_fp8 and v != o.model_dtype,
        "{value} does not go with --matmul-dtype {matmul_dtype} and --model-dtype {model_dtype}",
    ),
    *_formats("head_dtype", "e4m3"),
    *refused("fp8_accumulate", lambda v, o: v == "fp16" and why_not_half(o), "fp16 {found}"),
    *refused(
        "fp8_recipe",
        lambda v, o: v == "delayed" and not o.is_fp8,
        "delayed needs --matmul-dtype e4m3",
    ),
    # Products write codes only with a scale known in advance.
    *_formats("mlp_dtype", "e4m3"),
    *refused(
        "mlp_dtype",
        lambda v, o: v == "e4m3" and o.freezes_model,
        "e4m3 does not go with adapters, which add to what products write",
    ),
    *refused(
        "mlp_dtype",
        lambda v, o: v == "e4m3" and not (o.is_fp8 and o.fp8_recipe == "delayed"),
        "e4m3 needs --matmul-dtype e4m3 and --fp8-recipe delayed: only fp8 products "
        "write codes, and only with a scale that they know beforehand",
    ),
    *refused(
        "mlp_dtype",
        lambda v, o, model: v == "e4m3" and not model.gated,
        "e4m3 is for MLPs with a gate (SwiGLU, GeGLU), and this model's has none",
    ),
    *refused(
        "mlp_dtype",
        lambda v, o, model: v == "e4m3" and model.experts is not None,
        "products of experts write no codes: use {model_dtype}",
    ),
    *refused(
        "matmul_dtype",
        lambda v, o, model: v in ("int8", "ternary") and model.experts is not None,
        "there is no {value} product for experts: use {model_dtype}",
    ),
    *refused(
        "matmul_dtype",
        lambda v, o, model: uncoded_product(o, model),
        "{value} needs multiples of {found[2]}, but the {found[0]} is {found[1]}",
    ),
    *refused(
        "matmul_dtype",
        lambda v, o, model: v == "int8" and o.micro_tokens > _INT8_TERMS,
        f"int8 sums over at most {_INT8_TERMS} tokens of a micro-step, but there "
        "are {micro_tokens}: use a smaller --batch-size",
    ),
    *refused(
        "matmul_dtype",
        lambda v, o, model: (
            v == "int8"
            and (width := model.intermediate_size * (1 + model.gated)) > _INT8_WIDTH
            and width
        ),
        f"int8 takes matrices of at most {_INT8_WIDTH} rows, but the MLP's first has {{found}}",
    ),
    *refused(
        "matmul_dtype",
        lambda v, o, gpu: v == "e4m3" and gpu.capability < FP8_CAPABILITY and instead_of_fp8(o),
        "e4m3 needs compute capability 8.9, {gpu.name} has {gpu.version}: {found}",
    ),
)
