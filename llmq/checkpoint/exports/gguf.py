"""GGUF files for llama.cpp and programs built on it: a model in one file, or adapters.

Names, metadata and layout follow llama.cpp's converters: the package gguf maps names of tensors,
and quantizes and writes tensors. Norms and vectors are F32 with every --dtype.
"""

import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache, partial
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from llmq.arch.matrix import HfPart
from llmq.arch.model_config import ModelConfig
from llmq.base.dtypes import BF16
from llmq.base.errors import LlmqError, warn
from llmq.base.files import make_directory, replacing, temporary_path
from llmq.checkpoint.bitnet import is_rounded
from llmq.checkpoint.exports import gguf_halves
from llmq.checkpoint.exports.bitnet import multiplied, ternary_run
from llmq.checkpoint.exports.format import SMALL, ExportFormat
from llmq.checkpoint.exports.gguf_halves import Made, kind_of
from llmq.checkpoint.exports.gguf_vocab import add_vocabulary
from llmq.checkpoint.exports.source import Source
from llmq.checkpoint.finite import all_finite
from llmq.checkpoint.hf import name_beside, stored_shape
from llmq.formats.ternary import rounded_keys
from llmq.ops.attention.rope import inverse_frequencies
from llmq.options.adapters import Adapters, adapted_tables, all_adapted
from llmq.ref.common import row_blocks
from llmq.ref.quantize.four_bits import mxfp4_encode
from llmq.state.params import PEFT_PREFIX, Param

DTYPES = {"fp32": "F32", "fp16": "F16", "bf16": "BF16", "q8_0": "Q8_0", "q4_0": "Q4_0"}
DTYPES |= {"tq2_0": "TQ2_0"}
"""GGUF's name of the tensor type, by value of --dtype."""
_WORST = {"Q8_0": 0.57 / 127, "Q4_0": 1.01 / 8, "MXFP4": 0.0, "TQ2_0": 1 / 2048}
"""Largest quantization error, relative to the block's largest value: half a step or a whole step,
plus rounding of the scale. MXFP4 is exact, because the values come from MXFP4 codes. TQ2_0 only
rounds the scale, because the values are ternary already."""
_BLOCK = 32  # number of values that share a scale
_PIECE = 1 << 18  # values that a thread encodes at once: few enough for its cache
_STILL = 1e30  # divisor of the frequency of unrotated channels, as in the converter
_ROPE_KINDS = (None, "linear", "llama3", "yarn", "proportional")
_SUFFIXES = (".weight", ".bias", ".scale")
_PLAIN = ("_norm.weight", "position_embd.weight", "_inp.weight", "_inp_shexp.weight", ".bias",
          "ssm_conv1d.weight", "ssm_a", "ssm_d", "shortconv.conv.weight")  # fmt: skip
"""Suffixes of names of tensors that are F32 whatever --dtype is."""
_EXPERT = re.compile(r"\.experts\.\d+\.")
_TOGETHER = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""For the name of a parameter of all experts: the tensors whose rows alternate in the parameter."""
_LORA = re.compile(r"\.lora_([AB])\.weight$")


def _library() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise LlmqError("--format gguf needs the package gguf: pip install gguf") from error
    logging.getLogger("gguf").setLevel(logging.ERROR)  # its warnings mean nothing to our users
    return gguf


class _Tensor(NamedTuple):
    """A tensor of the file. kind: GGUF's name of the tensor's type. made: function that computes
    the tensor's rows from the parameter's rows."""

    name: str
    shape: tuple[int, ...]
    kind: str
    made: Callable[[np.ndarray], np.ndarray]

    @property
    def quantized(self) -> bool:
        return self.kind in _WORST

    @property
    def nbytes(self) -> int:
        block, size = _library().GGML_QUANT_SIZES[_library().GGMLQuantizationType[self.kind]]
        return prod(self.shape) // block * size


class Gguf(ExportFormat):
    """One GGUF file (--format gguf): `out` if the path ends in .gguf, else a file in `out`."""

    name, dtypes = "gguf", tuple(DTYPES)

    def check(self, source: Source, dtype: str) -> None:
        _library()
        model = source.model
        if model.num_labels:
            raise LlmqError("--format gguf: models with a score head are not written")
        if kind_of(model) is None:
            raise LlmqError(f"--format gguf: {model.architecture} has no name in GGUF files")
        parts = () if source.began_as is None else source.began_as.parts
        if source.adapters is None and parts and not _ahead(source):
            raise LlmqError(
                f"--format gguf: {source.began_as.described} of '{source.name}' are not trained, "
                "and have no place in the file: leave them out with --text-only"
            )
        if lacks := next(_lacks(model), None):
            raise LlmqError(f"--format gguf: llama.cpp has no {model.arch.label} {lacks}")
        if source.adapters is not None and (lacks := _not_of_adapters(source, source.adapters)):
            raise LlmqError(f"--format gguf: a file of adapters has no {lacks}: add --merge")
        warn(*_otherwise(model))
        if source.coded == "mxfp4" and not source.exact:
            warn("experts are written decoded: after a merge codes of 4 bits may not hold them")
        if dtype == "tq2_0":
            ternary_run(source, "--dtype tq2_0")
        if source.adapters is None and source.tokenizer is None:
            warn("no tokenizer is known of this model: the file has none")
        made = {tensor.name for each in _tensors(source, dtype).values() for tensor in each}
        lacking = {*kind_of(model).needs} - made if source.adapters is None else {}
        if lacking:
            raise LlmqError(
                f"--format gguf: llama.cpp loads no {model.arch.label} without {min(lacking)}"
            )

    def occupied(self, out: Path) -> list[Path]:
        if out.suffix == ".gguf":
            return [out] if os.path.lexists(out) else []
        return sorted(out.glob("*.gguf"))

    def write(self, source: Source, out: Path, dtype: str, *, verify: bool | None) -> list[str]:
        path, source = out, replace(source, read=multiplied(source))
        if out.suffix != ".gguf":
            make_directory(out)
            what = "adapter" if source.adapters is not None else "model"
            path = out / f"{what}-{dtype}.gguf"
        with replacing(path) as file:
            _write(source, file, dtype)
            file.flush()
            if verify or (verify is None and file.tell() <= SMALL):
                _verify(source, temporary_path(path), dtype, path)
        return [path.name]


def _lacks(model: ModelConfig) -> Iterator[str]:
    """Yield the properties of this model that llama.cpp's implementation of the architecture
    lacks."""
    kind, scaling = kind_of(model), model.rope_scaling
    if not kind.heads and model.num_heads * model.head_dim != model.hidden_size:
        yield (
            f"with {model.num_heads} heads of {model.head_dim} channels and a hidden size of "
            f"{model.hidden_size}"
        )
    if not kind.grouped and model.num_kv_heads != model.num_heads:
        yield "with fewer keys than queries"
    own = model.attention_scale if kind.factors else _own_scale(model)
    if model.attention_scale not in (None, own):
        yield f"with scores of attention times {model.attention_scale:.6g}, only {own:.6g}"
    if model.logit_softcap is not None and not kind.softcap:
        yield "with a soft cap of logits, which not all of its versions read"
    positions = None if scaling is None else scaling.kind
    if positions not in _ROPE_KINDS and not (positions == "longrope" and kind.longrope):
        yield f"with positions stretched as {positions}"
    if (
        positions == "yarn"
        and abs(scaling.attention(0) / (own := gguf_halves.own_factor(model, scaling)) - 1) > 1e-6
    ):
        yield f"with an attention factor of {scaling.attention(0):.6g}, only {own:.6g}"
    every, last = kind.full_every, model.num_layers + 1
    if every is not None and _windows(model) != [layer % every != 0 for layer in range(1, last)]:
        yield f"with windows in other layers than those whose number is no multiple of {every}"
    yield from gguf_halves.lacks(model)


def _otherwise(model: ModelConfig) -> Iterator[str]:
    """Yield warnings about small differences between this model and llama.cpp's implementation."""
    if model.sliding_window is not None and not kind_of(model).windows:
        window = model.sliding_window
        yield f"llama.cpp attends to all positions, where this model sees the last {window}"
    yield from gguf_halves.otherwise(model)
    scaling = model.rope_scaling
    if scaling is not None and scaling.kind == "yarn" and not scaling.truncate:
        yield "llama.cpp truncates the bounds of yarn to whole channels, this model does not"


def _not_of_adapters(source: Source, adapters: Adapters) -> str | None:
    """Return the first feature of these adapters that a GGUF file cannot hold; None if it can hold
    all."""
    if adapters.train:
        return f"{', '.join(adapters.train)}, which were trained beside them"
    if adapters.dora:
        return "magnitudes (--lora-dora)"
    if source.model.latent is not None:
        return "adapters of latent attention"
    if adapted_tables(source.model, adapters):
        return "adapters of embedding and head"
    if any(matrix.groups > 1 for _, matrix in all_adapted(source.model, adapters)):
        return "adapters of experts"
    return "more than one numerator of their scalings" if len(_alphas(source)) > 1 else None


def _windows(model: ModelConfig) -> list[bool]:
    return [model.window_of(layer) is not None for layer in range(model.num_layers)]


def _own_scale(model: ModelConfig) -> float:
    """Return llama.cpp's factor of attention scores. llama.cpp recognizes Gemma 3 27B by its 62
    layers."""
    if (scale := kind_of(model).scale) is not None:
        return scale
    size = model.hidden_size // model.num_heads if model.num_layers == 62 else model.head_dim
    return size**-0.5


# ------------------------------------------------------------------------------------------------
# The contents of the file


def _alphas(source: Source) -> set[float]:
    parts = (p for _, matrix in all_adapted(source.model, source.adapters) for p in matrix.parts)
    return {float(np.float32(part.scale * part.rank)) for part in parts}


def _params(source: Source) -> Iterator[Param]:
    return (param for slab in source.table for param in slab.params)


class _Beside(NamedTuple):
    """Tensors beside the language model that form one tensor of the GGUF file: a single tensor, or
    one for each expert. name: Hugging Face's name of them together."""

    name: str
    tensors: tuple[Any, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        stacked = ".experts." in self.name
        return (len(self.tensors),) * stacked + tuple(self.tensors[0].shape)

    def read(self) -> np.ndarray:
        each = [np.concatenate([x for _, x in tensor.pieces()]) for tensor in self.tensors]
        return np.stack(each).reshape(self.shape)

    def by_row(self, values: np.ndarray) -> np.ndarray:
        return values


def _ahead(source: Source) -> list[_Beside]:
    """Return the tensors of the heads for multi-token prediction; [] if there are others beside the
    language model, or if GGUF has no such heads for this architecture."""
    began, first, found = source.began_as, source.model.num_layers, {}
    if source.adapters is not None or began is None or not kind_of(source.model).nextn:
        return []
    for name in sorted(began.extra):
        number = re.match(r"model\.layers\.(\d+)\.", name)
        if number is None or int(number[1]) < first:
            return []
        found.setdefault(_EXPERT.sub(".experts.", name), []).append(name)
    for names in found.values():
        names.sort(key=lambda name: [int(number) for number in re.findall(r"\d+", name)])
    return [_Beside(name, tuple(began.extra[n] for n in names)) for name, names in found.items()]


def _heads_ahead(source: Source) -> int:
    """Return the number of heads for multi-token prediction."""
    return len({re.search(r"\d+", each.name)[0] for each in _ahead(source)})


def _tensors(source: Source, dtype: str) -> dict[Param | _Beside, list[_Tensor]]:
    gguf, model = _library(), source.model
    arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == kind_of(model).name)
    names = gguf.get_tensor_name_map(arch, model.num_layers + _heads_ahead(source))
    prefix = model.arch.file_prefix

    def tensor(hf: str, shape: tuple[int, ...], made: Callable) -> _Tensor:
        adapter = _LORA.search(hf)
        own = _LORA.sub(".weight", hf).removeprefix(PEFT_PREFIX)
        own += ".weight" if own.endswith((".sinks", ".layer_scalar")) else ""
        own = own.replace("e_score_correction_bias", "e_score_correction.bias")
        own = own.replace(".mixer.experts.", ".mlp.experts.")
        every = (names.get_name(each, _SUFFIXES) for each in (own, name_beside(prefix, own)))
        name = next(filter(None, every), None)
        if name is None:
            raise LlmqError(
                f"--format gguf: {own} has no name in GGUF files of {kind_of(model).name}"
            )
        name += f".lora_{adapter[1].lower()}" if adapter else ""
        return _Tensor(name, shape, _kind(name, shape, dtype=dtype, source=source), made)

    made = {param: [tensor(*each) for each in _made_of(model, param)] for param in _params(source)}
    if dtype == "tq2_0":
        keys = rounded_keys(model, ternary_run(source, "--dtype tq2_0").ternary_of)
        for param in (param for param in made if is_rounded(param, keys)):
            made[param] = [_ternary(tensor) for tensor in made[param]]
    return made | {each: [tensor(each.name, each.shape, each.by_row)] for each in _ahead(source)}


def _ternary(tensor: _Tensor) -> _Tensor:
    """Return the tensor with ternary codes if blocks of 256 divide its rows, else with F16."""
    return tensor._replace(kind="F16" if tensor.shape[-1] % 256 else "TQ2_0")


def _made_of(model: ModelConfig, param: Param) -> Iterator[Made]:
    """Yield the tensors that a parameter has in the file."""
    modules: dict[str, list[HfPart]] = {}
    for part in param.hf:  # parts of single experts are stacked into one tensor
        if (own := gguf_halves.made_of(model, param, part)) is not None:
            yield from own
        elif part.experts:
            yield from _of_paired(param, part)
        else:
            modules.setdefault(_EXPERT.sub(".experts.", part.name), []).append(part)
    for module, parts in modules.items():
        shape = stored_shape(param, replace(parts[0], transposed=False, depthwise=False))
        shape = (len(parts), *shape) if module != parts[0].name else shape
        yield module, shape, partial(_made, [_rows_of(model, part) for part in parts], len(shape))


def _of_paired(param: Param, part: HfPart) -> Iterator[Made]:
    """Yield the tensors, each (experts, rows, ...), between which the rows of a part alternate."""
    stem, _, last = part.name.removesuffix("_bias").rpartition(".")
    names, end = _TOGETHER[last], "bias" if part.name.endswith("_bias") else "weight"
    shape = (part.experts, -1, len(names), *param.row_shape)
    rows = (part.stop - part.start) // (part.experts * len(names))
    for number, each in enumerate(names):
        made = lambda values, n=number: values.reshape(shape)[:, :, n]  # noqa: E731
        yield f"{stem}.{each}.{end}", (part.experts, rows, *param.row_shape), made


def _keeps_codes(source: Source) -> bool:
    """True if experts keep the MXFP4 codes of the model's files, with every --dtype."""
    return source.coded == "mxfp4" and source.exact


def _made(rows: list[Callable], dimensions: int, values: np.ndarray) -> np.ndarray:
    made = [each(values) for each in rows]
    return np.stack(made) if made[0].ndim < dimensions else made[0]


def _kind(name: str, shape: tuple[int, ...], *, dtype: str, source: Source) -> str:
    """Return GGUF's type of a tensor, as llama.cpp's converter chooses it. name: the tensor's name
    in GGUF. shape: the tensor's shape."""
    if len(shape) == 1 or name.endswith(_PLAIN):
        return "F32"
    if len(shape) == 3 and _keeps_codes(source):
        return "MXFP4"
    head = "token_embd.weight" if source.model.tied_embeddings else "output.weight"
    kind = "Q8_0" if dtype == "q4_0" and name == head else DTYPES[dtype]
    kind = "F16" if kind == "TQ2_0" else kind  # _ternary gives rounded matrices TQ2_0
    return "F16" if kind in _WORST and shape[-1] % _BLOCK else kind


def _rows_of(model: ModelConfig, part: Any) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function that computes the rows of a part's tensor from the rows of its
    parameter."""
    to_pairs = kind_of(model).pairs and re.search(r"\.[qk]_proj\.(?!lora_A)", part.name)
    offset = model.arch.norm_offset and re.search(r"norm\.weight$", part.name)

    def made(values: np.ndarray) -> np.ndarray:
        rows = values[part.start : part.stop]
        rows = rows if part.columns is None else rows[:, : part.columns]
        rows = rows[part.rows_of(slice(None))]
        if to_pairs:
            halves = rows.reshape(-1, 2, model.head_dim // 2, *rows.shape[1:])
            rows = halves.swapaxes(1, 2).reshape(rows.shape)
        return rows.astype(np.float32) + np.float32(1) if offset else rows

    return made


def _rope_factors(model: ModelConfig) -> dict[str, np.ndarray]:
    """Return divisors of rotary frequencies, F32 (rotary channels / 2,), by tensor name, for
    scalings that metadata cannot express; {} for all others."""
    scaling = model.rope_scaling
    if scaling is not None and scaling.kind == "proportional":
        half = model.heads_of(model.num_layers - 1).channels // 2
        turned = int(half * scaling.partial_rotary_factor)
        still = np.full(half - turned, _STILL, np.float32)
        return {"rope_freqs.weight": np.concatenate([np.ones(turned, np.float32), still])}
    if scaling is not None and scaling.kind == "longrope":
        both = {"long": scaling.long_factor, "short": scaling.short_factor}
        return {f"rope_factors_{n}.weight": np.array(x, np.float32) for n, x in both.items()}
    if scaling is None or scaling.kind != "llama3":
        return {}
    both = (inverse_frequencies(model.head_dim, model.rope_theta, s) for s in (None, scaling))
    return {"rope_freqs.weight": next(both) / next(both)}


def _metadata(writer: Any, source: Source, dtype: str) -> None:
    gguf = _library()
    writer.add_type("model" if source.adapters is None else "adapter")
    writer.add_name(source.name)
    mostly = "MXFP4_MOE" if _keeps_codes(source) else DTYPES[dtype]
    writer.add_file_type(gguf.LlamaFileType["ALL_F32" if mostly == "F32" else f"MOSTLY_{mostly}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    if source.adapters is not None:
        writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
        writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, *_alphas(source))
        return
    model = source.model
    writer.add_size_label(gguf.size_label(sum(p.count for p in _params(source)), 0, 0, 0))
    heads = _heads_ahead(source)
    writer.add_block_count(model.num_layers + heads)
    if heads:
        writer.add_nextn_predict_layers(heads)
    writer.add_context_length(model.max_positions)
    writer.add_embedding_length(model.hidden_size)
    writer.add_feed_forward_length(gguf_halves.widths(model))
    writer.add_vocab_size(model.vocab_size)
    if model.norm == "layernorm":
        writer.add_layer_norm_eps(model.norm_eps)
    else:
        writer.add_layer_norm_rms_eps(model.norm_eps)
    gguf_halves.add_metadata(gguf, writer, model)
    _positions(writer, model)
    add_vocabulary(gguf, writer, model, source.tokenizer)


def _positions(writer: Any, model: ModelConfig) -> None:
    if model.positions != "rope":
        return
    gguf = _library()
    writer.add_rope_freq_base(model.rope_theta)
    if model.local_rope_theta is not None:
        writer.add_rope_freq_base_swa(model.local_rope_theta)
    scaling = model.rope_scaling
    if scaling is not None and scaling.kind == "proportional":
        writer.add_rope_dimension_count(model.heads_of(model.num_layers - 1).channels)
        writer.add_rope_dimension_count_swa(model.head_dim)
    else:
        writer.add_rope_dimension_count(model.rotary_dim)
    if scaling is not None and scaling.kind not in ("llama3", "proportional"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling.kind))
    if scaling is not None and scaling.kind in ("linear", "yarn"):
        writer.add_rope_scaling_factor(scaling.factor)
    if scaling is not None and scaling.kind in ("yarn", "longrope"):
        writer.add_rope_scaling_orig_ctx_len(scaling.original_max_positions)
    if scaling is not None and scaling.kind == "yarn":
        writer.add_rope_scaling_yarn_beta_fast(scaling.beta_fast)
        writer.add_rope_scaling_yarn_beta_slow(scaling.beta_slow)
    if scaling is not None and scaling.kind == "longrope":
        writer.add_rope_scaling_attn_factors(scaling.attention(model.max_positions))
    if model.sliding_window is not None:
        writer.add_sliding_window(model.sliding_window)
        if kind_of(model).windows and kind_of(model).full_every is None:
            writer.add_sliding_window_pattern(_windows(model))


# ------------------------------------------------------------------------------------------------
# Writing and reading back


class _Data:
    """Arrays to write. `tofile` raises the system's OSError; NumPy's `tofile` loses it."""

    def __init__(self, nbytes: int, pieces: Iterable[np.ndarray]):
        self.nbytes, self._pieces = nbytes, pieces

    def tofile(self, file: BinaryIO) -> None:
        for piece in self._pieces:
            file.write(piece.reshape(-1).view(np.uint8).data)


def _write(source: Source, file: BinaryIO, dtype: str) -> None:
    gguf = _library()
    writer = gguf.GGUFWriter(None, kind_of(source.model).name)
    _metadata(writer, source, dtype)
    tensors = _tensors(source, dtype)
    factors = _rope_factors(source.model) if source.adapters is None else {}
    for name, values in factors.items():
        writer.add_tensor_info(name, values.shape, values.dtype, values.nbytes)
    for tensor in (tensor for each in tensors.values() for tensor in each):
        kind = gguf.GGMLQuantizationType[tensor.kind]
        plain = np.dtype(np.float32)
        writer.add_tensor_info(tensor.name, tensor.shape, plain, tensor.nbytes, kind)
    # Given a path, GGUFWriter would create the final name before the file is complete.
    writer.fout, writer.state = [file], gguf.gguf_writer.WriterState.EMPTY
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for values in factors.values():
        writer.write_tensor_data(_Data(values.nbytes, [values]))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for param, values in _read_ahead(source, tensors):
            for tensor in tensors[param]:
                rows = tensor.made(values)
                pieces = (rows[piece] for piece in _pieces(tensor))
                pieces = pool.map(partial(_codes, tensor), pieces)
                writer.write_tensor_data(_Data(tensor.nbytes, pieces))


def _read_ahead(
    source: Source, params: Iterable[Param | _Beside]
) -> Iterator[tuple[Param | _Beside, np.ndarray]]:
    """Yield the parameters with their rows, while a thread reads the next parameter."""
    with ThreadPoolExecutor(1) as reader:
        coming: list[tuple[Param | _Beside, Future[np.ndarray]]] = []
        for param in params:
            read = param.read if isinstance(param, _Beside) else partial(source.read, param)
            coming.append((param, reader.submit(read)))
            if len(coming) > 1:
                first, values = coming.pop(0)
                yield first, first.by_row(values.result())
        for last, values in coming:
            yield last, last.by_row(values.result())


def _pieces(tensor: _Tensor) -> list[slice]:
    return row_blocks(tensor.shape[0], prod(tensor.shape[1:]), _PIECE)


def _codes(tensor: _Tensor, rows: np.ndarray) -> np.ndarray:
    """Encode rows of a tensor in its type, as contiguous bytes."""
    if tensor.kind == "BF16":
        return np.ascontiguousarray(rows, BF16.numpy).view(np.uint8)
    if tensor.kind == "F16" and rows.dtype == BF16.numpy:
        codes = np.take(_halves(), rows.view(np.uint16))
    elif tensor.kind == "MXFP4":
        return _mxfp4(rows.astype(np.float32))
    else:
        with np.errstate(over="ignore"):
            kind = _library().GGMLQuantizationType[tensor.kind]
            codes = _library().quants.quantize(rows.astype(np.float32), kind)
    if tensor.kind == "F16" and not all_finite(codes) and all_finite(rows):
        raise LlmqError(f"{tensor.name} has values that fp16 cannot hold: give --dtype bf16")
    return np.ascontiguousarray(codes).view(np.uint8)


@lru_cache(maxsize=1)
def _halves() -> np.ndarray:
    """Return the F16 value of each BF16 bit pattern, (65536,). A lookup takes a third of the time
    of NumPy's rounding."""
    with np.errstate(over="ignore"):
        every = np.arange(1 << 16, dtype=np.uint16).view(BF16.numpy)
        return every.astype(np.float32).astype(np.float16)


def _mxfp4(values: np.ndarray) -> np.ndarray:
    """Return MXFP4 blocks of F32 values, uint8 (blocks, 17): an exponent and 16 bytes. Byte i has
    the code of value i in the lower bits, and the code of value i + 16 in the upper bits. The
    package gguf needs ten times the memory, and wraps exponents of tiny numbers."""
    blocks = values.size // _BLOCK
    codes, out = np.empty((blocks, _BLOCK // 2), np.uint8), np.empty((blocks, 17), np.uint8)
    mxfp4_encode(codes.reshape(-1), out[:, 0], values.reshape(-1), values.size)
    each = np.stack([codes & 15, codes >> 4], axis=2).reshape(blocks, 2, _BLOCK // 2)
    out[:, 1:] = each[:, 0] | each[:, 1] << 4
    return out


def _verify(source: Source, path: Path, dtype: str, shown: Path) -> None:
    """Read a file back; LlmqError unless each tensor is equal, or within rounding if quantized."""
    gguf = _library()
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    tensors = _tensors(source, dtype)
    for param, values in _read_ahead(source, tensors):
        for tensor in tensors[param]:
            read = stored.pop(tensor.name, None)
            shape = None if read is None else tuple(reversed(read.shape.tolist()))
            same = shape == tensor.shape and read.tensor_type.name == tensor.kind
            rows = tensor.made(values)
            if not same or not all(
                _agrees(tensor, rows[piece], read.data[piece]) for piece in _pieces(tensor)
            ):
                raise LlmqError(f"'{shown}': {tensor.name} is not what was written: write it again")
    unknown = stored.keys() - _rope_factors(source.model).keys()
    if unknown:
        raise LlmqError(f"'{shown}' holds {min(unknown)}, which was not written: write it again")


def _agrees(tensor: _Tensor, rows: np.ndarray, data: np.ndarray) -> bool:
    gguf = _library()
    rows = rows.astype(np.float32)
    values = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[tensor.kind])
    if not tensor.quantized:
        return np.array_equal(_codes(tensor, rows), _codes(tensor, values), equal_nan=True)
    blocks = rows.reshape(-1, _BLOCK)
    errors = np.abs(values.reshape(-1, _BLOCK) - blocks)
    return bool((errors <= _WORST[tensor.kind] * np.abs(blocks).max(1, keepdims=True)).all())
