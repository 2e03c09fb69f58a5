"""Model directories in Hugging Face's format: reading, writing and identifying them."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from llmq.arch.matrix import HfPart
from llmq.arch.model_config import ModelConfig
from llmq.base.dtypes import BF16, F32, OPTION_DTYPES, DType
from llmq.base.errors import LlmqError, warn
from llmq.base.files import Closing, check_readable, json_object
from llmq.checkpoint.coded import CodedMatrix, decoded, quantization_of
from llmq.checkpoint.export_files import (
    CONFIG_FILE,
    GENERATION_FILE,
    INDEX_FILE,
    SINGLE_FILE,
    run_record,
    staged_export,
    write_json,
)
from llmq.checkpoint.finite import all_finite
from llmq.checkpoint.grown_table import GrownTable
from llmq.checkpoint.safetensors_file import (
    CopiedSpec,
    FileTensor,
    SafetensorsFile,
    TensorSpec,
    open_foreign,
    write_safetensors,
)
from llmq.checkpoint.source_model import SourceModel
from llmq.data.identity import RUN_FILE
from llmq.state.params import Param, Slab, weight_table
from llmq.text.tokenizer import Tokenizer

IMPORTED_DTYPES = ("BF16", "F16", "F32")

# Tensors in old models that config.json determines, such as causal masks and rotary frequencies.
_BUFFERS = re.compile(r"(^|\.)attn\.(bias|masked_bias)$|(^|\.)rotary_emb\.inv_freq$")
_PREFIXES = {"language_model.": "", "model.language_model.": "model.", "backbone.": "model."}
"""Prefixes of tensor names in files, each with our own prefix. Published files of a model with
other parts (vision tower) have the first prefix, transformers 5 may write the second, and an
architecture's own files have the third (`Architecture.file_prefix`)."""
_KNOWN_PARTS = re.compile(r"(^|\.)(mtp|visual|vision\w*|audio\w*|multi_modal_projector)(\.|$)")
"""Names of parts that many models have beside the language model."""
SCORE_HEAD = "score.weight"


class HfWeights(Closing):
    """The tensors of a model directory: model.safetensors, else the files of the index. Threads may
    share an object.

    Names may lack their first component ("wte.weight" for "transformer.wte.weight"), and files may
    hold the combined matrices of llm.q's exports (self_attn.qkv, mlp.up). Quantized matrices are
    read as their values. prefix: prefix of the language model's names in these files, see
    _PREFIXES, or "". coded: quant_method, or None. After `check`, `extra` has the tensors, by name,
    that the language model lacks, and `fused` is True if the experts of a layer are one tensor.
    """

    asks = "config.json asks"  # before a shape, in messages

    def __init__(self, directory: Path) -> None:
        """LlmqError if files are missing or damaged."""
        self.directory = directory
        self._files: dict[str, SafetensorsFile] = {}
        every, self.coded = self._open(), None
        config = json_object(directory / CONFIG_FILE)
        self._is_classifier = str(config.get("architectures")).endswith("Classification']")
        first, more = (config.get(n) for n in ("num_hidden_layers", "num_nextn_predict_layers"))
        given = type(first) is type(more) is int
        self._predicting = [str(first + i) for i in range(more)] if given else []
        if (coded := quantization_of(directory, config)) is not None:
            every, self.coded = decoded(every, coded), coded["quant_method"]
        self._own_names, self.prefix = _language_model(every)
        self._where = {own: every[name] for own, name in self._own_names.items()}
        self.extra = {n: every[n] for n in every.keys() - set(self._own_names.values())}
        self.fused = False

    @property
    def nested(self) -> bool:
        """True if the model has other parts, so that transformers wraps the language model."""
        return self.prefix.endswith("language_model.")

    def source_model(self, name: str, revision: str | None = None) -> SourceModel:
        """Return the source model; call `check` before, and keep this object open while extra
        tensors are read. name, revision: fields of SourceModel. Warns of tensors of unknown
        parts."""
        unknown = sorted(name for name in self.extra if not self._is_known_part(name))
        if unknown:
            warn(f"'{self._path}' holds {_list(unknown)}, which no model here has: exports keep it")
        return SourceModel.of(
            name, revision, self.directory, self.extra, prefix=self.prefix, fused=self.fused
        )

    def has(self, param: Param) -> bool:
        """True if all stored tensors of a parameter exist."""
        return all(self._name(part.name) is not None for part in self._parts(param))

    @property
    def dtype(self) -> str:
        """The dtype of most elements outside of quantized matrices: "bf16", "fp32", or "fp16"."""
        sizes: Counter[str] = Counter()
        for tensor in self._where.values():
            sizes[tensor.dtype] += 0 if isinstance(tensor, CodedMatrix) else prod(tensor.shape)
        return {"F32": "fp32", "F16": "fp16"}.get(max(sizes, key=sizes.__getitem__), "bf16")

    @property
    def kept_by(self) -> str | None:
        """The --base-dtype that can keep the codes of most quantized matrices; None without such
        codes."""
        coded = [t.kept_by for t in self._where.values() if isinstance(t, CodedMatrix)]
        return max(coded, key=coded.count, default=None)

    def grow(self, model: ModelConfig, first: int, count: int) -> None:
        """Enlarge embedding and LM head to the model's vocabulary. Rows [first, first + count), the
        new tokens, become the mean of the rows before `first`."""
        embed = weight_table(model)[0].params[0]  # a tied head may be stored, too
        for stored in (self._name(embed.hf[0].name), self._name("lm_head.weight")):
            if stored is not None:
                table = GrownTable(self._where[stored], model.vocab_size, first, count)
                self._where[stored] = table

    def _open(self) -> dict[str, FileTensor]:
        if (self.directory / SINGLE_FILE).exists():
            return self._file(SINGLE_FILE)
        index = self.directory / INDEX_FILE
        if not index.exists():
            raise LlmqError(
                f"'{self.directory}' has neither {SINGLE_FILE} nor {INDEX_FILE}: give a directory "
                "with safetensors weights, or train a new model with --from-scratch"
            )
        try:
            check_readable(index)
            weight_map = json.loads(index.read_text("utf-8"))["weight_map"]
            if outside := [file for file in weight_map.values() if Path(file).name != file]:
                raise LlmqError(f"'{index}' names '{outside[0]}', which is not in its directory")
            where = {name: (file, self._file(file)) for name, file in weight_map.items()}
        except OSError as error:
            raise LlmqError(f"cannot read '{index}': {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise LlmqError(f"'{index}' is damaged ({error!r}): copy it again") from error
        for name, (file, tensors) in where.items():
            if name not in tensors:
                path = self.directory / file
                raise LlmqError(f"'{index}' says that '{path}' holds {name}, but it does not")
        return {name: tensors[name] for name, (_, tensors) in where.items()}

    def _file(self, name: str) -> dict[str, FileTensor]:
        if name not in self._files:
            self._files[name] = open_foreign(self.directory / name)
        file = self._files[name]
        return {key: FileTensor(file, key) for key in file.tensors}

    def _name(self, name: str) -> str | None:
        """Return the name that a tensor has in the files, which may lack the first component; None
        if the files lack the tensor."""
        short = name.partition(".")[2]
        return next((n for n in (name, short) if n in self._where), None)

    def _parts(self, param: Param) -> tuple[HfPart, ...]:
        """Return the stored tensors of a parameter: Hugging Face's parts, or one tensor of all
        experts, or llm.q's combined matrix."""
        if param.fused is not None and self._name(param.fused.name) is not None:
            return (param.fused,)
        if len(param.hf) > 1 and self._name(param.name) is not None:
            return (HfPart(name=param.name, start=0, stop=param.rows),)
        return param.hf

    def check(self, table: tuple[Slab, ...]) -> None:
        """LlmqError unless the files hold this model's tensors in the right shapes, and no other
        tensors in the model's modules.

        Weights are read only if a tied model also stores an LM head, which must equal the
        embedding.
        """
        missing, used, names = [], set(), set()
        for param in (p for slab in table for p in slab.params):
            parts = self._parts(param)
            self.fused |= parts == (param.fused,)
            for part in parts:
                names.add(part.name)
                stored = self._name(part.name)
                if stored is None and part.name == SCORE_HEAD and not self._is_classifier:
                    continue  # a new score head starts from random weights, without an LM head
                if stored is None:
                    missing.append(part.name)
                else:
                    used.add(stored)
                    self._check_part(stored, param, part)
        if missing:
            hint = ""
            if missing == ["lm_head.weight"]:
                hint = "; if the LM head is the embedding, set tie_word_embeddings in config.json"
            raise LlmqError(
                f"'{self._path}' lacks {_list(missing)}, which config.json asks for{hint}"
            )
        unexpected = [n for n in self._where if n not in used and not _BUFFERS.search(n)]
        if SCORE_HEAD in names and "lm_head.weight" in unexpected:
            unexpected.remove("lm_head.weight")
        if "lm_head.weight" in unexpected:  # a tied model: the weight table has no LM head
            embed = table[0].params[0]
            self._check_part("lm_head.weight", embed, embed.hf[0])
            self._check_tied_head(self._name(embed.hf[0].name))
            unexpected.remove("lm_head.weight")
        self._check_extra(unexpected, {_module_of(name) for name in {*names, SCORE_HEAD}})

    def claim(self, params: Iterable[Param]) -> None:
        """Let `read` also read these parameters, whose tensors are in `extra`. LlmqError unless the
        files hold them in the right shapes."""
        for param in params:
            for part in (*param.hf, *([param.fused] if param.fused else ())):
                if part.name in self.extra:
                    self._where[part.name] = self.extra[part.name]
            if not self.has(param):
                raise LlmqError(f"--train: '{self._path}' lacks {param.hf[0].name}")
            for part in self._parts(param):
                self._check_part(self._name(part.name), param, part)

    def replace_extra(self, param: Param, values: np.ndarray) -> None:
        """Replace the values of a parameter in `extra`. values: in the parameter's shape. LlmqError
        if `extra` lacks the parameter."""
        fused = param.fused if param.fused and param.fused.name in self.extra else None
        rows = param.by_row(values.astype(np.float32))
        for part in (fused,) if fused else param.hf:
            if part.name not in self.extra:
                raise LlmqError(f"'{self._path}' lacks {part.name}, which was trained")
            stored = part.stored(rows[part.start : part.stop])
            before = self.extra[part.name]
            self.extra[part.name] = CodedMatrix(before, stored.shape, lambda a, b, x=stored: x[a:b])

    def _check_extra(self, unexpected: list[str], modules: set[str]) -> None:
        """Move unexpected tensors, which belong to other parts, to `extra`. LlmqError if a tensor
        is in a module of the language model, because our computation would ignore the tensor."""
        modules |= {module.partition(".")[2] for module in modules} | {"lm_head"}
        beside = (name for name in unexpected if not self._is_known_part(name))
        inside = [name for name in beside if _module_of(name) in modules]
        if inside:
            raise LlmqError(
                f"'{self._path}' holds {_list(inside)}, which a model of this config.json does "
                "not have: the two do not belong together, or this kind of model is not supported"
            )
        self.extra |= {self._own_names[name]: self._where.pop(name) for name in unexpected}

    def _is_known_part(self, name: str) -> bool:
        """True for a tensor of a known part, or of an MTP layer behind the model's last layer."""
        layer = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
        return bool(_KNOWN_PARTS.search(name) or (layer and layer[1] in self._predicting))

    @property
    def _path(self) -> Path:
        return self.directory / (SINGLE_FILE if SINGLE_FILE in self._files else INDEX_FILE)

    def _check_part(self, stored: str, param: Param, part: HfPart) -> None:
        tensor, expected = self._where[stored], stored_shape(param, part)
        if tensor.shape != expected:
            raise LlmqError(
                f"'{tensor.path}': {stored} has shape {list(tensor.shape)}, but {self.asks} for "
                f"{list(expected)}: the two do not belong together"
            )
        if tensor.dtype not in IMPORTED_DTYPES:
            raise LlmqError(
                f"'{tensor.path}': {stored} is {tensor.dtype}; only {', '.join(IMPORTED_DTYPES)} "
                "can be imported: use the unquantized model"
            )

    def _check_tied_head(self, embed: str) -> None:
        head = self._where["lm_head.weight"]
        if not same_values(self._where[embed], head):
            raise LlmqError(
                f"'{head.path}': lm_head.weight differs from {embed}, but config.json says "
                "tie_word_embeddings: true; set it to false to train both"
            )

    def read(self, param: Param) -> np.ndarray:
        """Return a parameter in its shape, with zeros as padding: BF16 if the file has BF16, else
        F32. Rows of new tokens are read from the embedding or LM head unless the file has them
        separately. LlmqError for NaN or infinity."""
        parts = [(part, self._name(part.name)) for part in self._parts(param)]
        if param.first_row is not None and parts[0][1] is None:
            return self._rows_of_table(param)
        bf16 = all(self._where[name].dtype == "BF16" for _, name in parts)
        out = np.zeros(param.shape, (BF16 if bf16 else F32).numpy)
        by_row = param.by_row(out)
        for part, name in parts:
            tensor, target = self._where[name], by_row[part.start : part.stop]
            target = part.as_stored(target)
            for rows, values in tensor.pieces():
                self._check_finite(name, values)
                target[part.rows_of(rows)] = values.reshape(-1, *target.shape[1:])
        return out

    def _rows_of_table(self, param: Param) -> np.ndarray:
        table = self._where[self._name(f"{param.table}.weight")]
        values = table.rows(param.first_row, param.first_row + param.rows)
        out = np.zeros(param.shape, (BF16 if table.dtype == "BF16" else F32).numpy)
        out[: param.rows] = values
        return out

    def elements(self, param: Param, start: int, stop: int) -> np.ndarray:
        """Return elements [start, stop) of a matrix without padding, in one dimension, in the dtype
        of `read`. Only these elements' rows are read from the file."""
        columns, blocks = param.columns, []
        first, last = start // columns, -(-stop // columns)
        bf16 = True
        for part in self._parts(param):
            name = self._name(part.name)
            bf16 &= self._where[name].dtype == "BF16"
            low, high = max(first, part.start) - part.start, min(last, part.stop) - part.start
            for rows in part.stored_ranges(low, high) if low < high else ():
                values = self._where[name].rows(*rows, transposed=part.transposed)
                self._check_finite(name, values)
                blocks.append(values)
        dtype = (BF16 if bf16 else F32).numpy
        rows = np.concatenate([values.astype(dtype, copy=False) for values in blocks])
        return rows.reshape(-1)[start - first * columns : stop - first * columns]

    def codes(self, part: HfPart, kept_by: str) -> dict[str, Iterator[np.ndarray]] | None:
        """Return the tensors of a matrix's codes, in our order of rows; see `CodedMatrix.codes`.
        None unless the file has codes that the --base-dtype `kept_by` can keep. LlmqError for NaN
        or infinity."""
        name = self._name(part.name)
        stored = self._where.get(name)
        as_ours = not (part.transposed or part.experts or part.columns)
        if not isinstance(stored, CodedMatrix) or stored.kept_by != kept_by or not as_ours:
            return None
        found = stored.codes(part.stored_ranges(0, part.stop - part.start))
        return found and {key: self._finite(name, pieces) for key, pieces in found.items()}

    def _finite(self, name: str, pieces: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
        for piece in pieces:
            if piece.dtype != np.uint8:
                self._check_finite(name, piece)
            yield piece

    def _check_finite(self, name: str, values: np.ndarray) -> None:
        if not all_finite(values):
            raise LlmqError(
                f"'{self._where[name].path}': {name} holds NaN or infinity: the model is damaged, "
                "copy it again or use another one"
            )

    def digest(self, param: Param) -> str:
        """Return the SHA-256 of a parameter's stored tensors (names, dtypes, shapes, values) in
        hex."""
        digest = hashlib.sha256()
        for part in self._parts(param):
            tensor = self._where[self._name(part.name)]
            digest.update(f"{part.name} {tensor.dtype} {list(tensor.shape)}".encode())
            for _, values in tensor.pieces():
                digest.update(np.ascontiguousarray(values).reshape(-1).view(np.uint8))
        return digest.hexdigest()

    def close(self) -> None:
        self._where.clear()
        self.extra.clear()
        for file in self._files.values():
            file.close()
        self._files.clear()


def _language_model(names: Iterable[str]) -> tuple[dict[str, str], str]:
    """Return our name -> name in the files for each of the language model's tensors, and the prefix
    of the names in the files, "" if they are our own."""
    names = list(names)
    for prefix, own in _PREFIXES.items():
        stored = {own + n.removeprefix(prefix): n for n in names if n.startswith(prefix)}
        if stored:
            heads = ("lm_head.weight", SCORE_HEAD)
            return stored | {name: name for name in names if name in heads}, prefix
    return {name: name for name in names}, ""


def name_beside(prefix: str, name: str) -> str:
    """Return the name in files of a language model's tensor. prefix: HfWeights.prefix of the
    files."""
    own = _PREFIXES.get(prefix)
    return name if own is None or not name.startswith(own) else prefix + name.removeprefix(own)


def _module_of(name: str) -> str:
    """Return the name of a tensor's module; for a tensor of a layer, the module that contains all
    layers."""
    parts = name.split(".")
    layer = next((i for i, part in enumerate(parts) if part.isdecimal()), len(parts) - 1)
    return ".".join(parts[:layer])


def same_values(one: FileTensor, other: FileTensor) -> bool:
    """True if two tensors of the same shape have the same values; their dtypes may differ."""
    return all(
        np.array_equal(a.astype(np.float32), b.astype(np.float32), equal_nan=True)
        for (_, a), (_, b) in zip(one.pieces(), other.pieces(), strict=True)
    )


def stored_shape(param: Param, part: HfPart) -> tuple[int, ...]:
    """Return the shape that a part of a parameter has in a Hugging Face file."""
    rows, columns = part.stop - part.start, param.row_shape
    columns = columns if part.columns is None else (part.columns,)
    if part.depthwise:
        return (rows, 1, *columns)
    if part.by_rank:
        return (rows // part.experts, columns[0] * part.experts)
    outer, rows = ((part.experts,), rows // part.experts) if part.experts else ((), rows)
    return (*outer, *columns, rows) if part.transposed else (*outer, rows, *columns)


def _list(names: list[str]) -> str:
    """Return the first three names, and the number of further names, as text."""
    more = f" and {len(names) - 3} more tensors" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


# ------------------------------------------------------------------------------------------------


MAX_SHARD_BYTES = 5_000_000_000
"""Maximum bytes of a weight file; a larger export is split, so that no reader maps a huge file."""


class StoredAs:
    """The layout of parameters in exported files: tensors of Hugging Face's modules, with constants
    in F32.

    fields: fields to add to config.json. prefix, fused: see HfWeights.
    """

    fields: Mapping[str, Any] = {}
    prefix, fused = "", False

    def __init__(self, dtype: DType):
        self.dtype = dtype

    def parts(self, param: Param) -> tuple[HfPart, ...]:
        return param.hf if param.fused is None or not self.fused else (param.fused,)

    def dtype_of(self, param: Param) -> DType:
        return F32 if param.kind == "constant" else self.dtype

    def specs(self, param: Param) -> list[TensorSpec]:
        """Return names, dtypes and shapes of a parameter's tensors, in the order of the file."""
        dtype = self.dtype_of(param)
        return [
            TensorSpec(name_beside(self.prefix, p.name), dtype, stored_shape(param, p))
            for p in self.parts(param)
        ]

    def values(self, param: Param, values: np.ndarray) -> np.ndarray:
        """Return the values that a reader of the file gets for a parameter with these values."""
        return values.astype(self.dtype_of(param).numpy, copy=False)

    def arrays(self, param: Param, values: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the tensors of a parameter, in the order of `specs`. values: in the parameter's
        shape."""
        for part in self.parts(param):
            yield part.stored(self.values(param, param.by_row(values)[part.start : part.stop]))


def export_model(
    out_dir: Path,
    config: ModelConfig,
    read: Callable[[Param], np.ndarray],
    dtype: DType,
    tokenizer: Tokenizer | Path | None = None,
    *,
    source: SourceModel | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    check: Callable[[Path], None] | None = None,
    stored: StoredAs | None = None,
    **origin: Any,
) -> list[str]:
    """Write a directory that transformers loads; return the names of its files.

    read(param): function that returns a parameter in its shape, F32 or BF16; called once per
    parameter, in the order of the weight table. dtype: the written weights' dtype, F32 or BF16.
    tokenizer: a tokenizer to save, or a directory whose tokenizer files are copied; AutoTokenizer
    makes the same ids. source: the initial model, whose other files, fields and tensors go into the
    export. check: see staged_export. stored: the layout of parameters; None: StoredAs(dtype).
    origin: see run_record. Files appear in out_dir when all are on the disk. LlmqError if the disk
    is full or fails.
    """
    option = next(option for option, d in OPTION_DTYPES.items() if d == dtype)
    stored, names = StoredAs(dtype) if stored is None else stored, []
    fields, texts, wrapped = config.to_hf(option), {}, False
    stored.prefix = config.arch.file_prefix
    if source is not None:
        fields, texts = source.config_json(config, option), source.copied
        stored.prefix = source.prefix or stored.prefix
        stored.fused, wrapped = source.fused, source.has_parts
    with staged_export(out_dir, config, tokenizer, check, names, wrapped=wrapped) as staging:
        write_json(staging / CONFIG_FILE, fields | stored.fields)
        if not config.num_labels:
            write_json(staging / GENERATION_FILE, _generation_config(config, source))
        for name, text in texts.items():
            (staging / name).write_text(text, "utf-8")
        extra = {} if source is None else source.extra
        params = [param for slab in weight_table(config) for param in slab.params]
        specs = [spec for param in params for spec in stored.specs(param)]
        specs += [_copied_spec(name, extra[name], dtype) for name in sorted(extra)]
        arrays = (array for param in params for array in stored.arrays(param, read(param)))
        copies = (_copied(extra[name], dtype) for name in sorted(extra))
        sums = _write_weights(staging, specs, chain(arrays, copies), max_shard_bytes)
        if record := run_record(**origin):
            write_json(staging / RUN_FILE, record | {"sha256": sums})
    return names


def _generation_config(config: ModelConfig, source: SourceModel | None) -> dict[str, Any]:
    """Return the content of generation_config.json: the special tokens and, if the source has such
    a file, the source's fields and EOS ids."""
    fields = None if source is None else source.generation_config(config)
    config = config.without_foreign_tokens()
    eos = config.eos_token_ids
    ids = {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(eos) if len(eos) > 1 else config.eos_token_id,
        "pad_token_id": config.pad_token_id,
    }
    ids = {name: value for name, value in ids.items() if value is not None}
    return ids | fields if fields is not None else {"_from_model_config": True} | ids


def _copied_spec(name: str, tensor: Any, dtype: DType) -> TensorSpec | CopiedSpec:
    """Return the spec of an extra tensor. Exports copy its bytes unchanged, but write a quantized
    matrix as values in dtype."""
    if isinstance(tensor, CodedMatrix):
        return TensorSpec(name, dtype, tensor.shape)
    return CopiedSpec(name, tensor.dtype, tensor.shape, tensor.nbytes)


def _copied(tensor: Any, dtype: DType) -> Any:
    """Return an extra tensor in the form that write_safetensors takes for the tensor's spec."""
    if isinstance(tensor, CodedMatrix):
        return np.concatenate([values for _, values in tensor.pieces()]).astype(dtype.numpy)
    return tensor


def _write_weights(
    directory: Path,
    specs: Sequence[TensorSpec | CopiedSpec],
    arrays: Iterator[Any],
    max_shard_bytes: int,
) -> dict[str, str]:
    """Write tensors in the order of specs; return the SHA-256 of each file by name. arrays: see
    write_safetensors. max_shard_bytes: largest size of a file with several tensors."""
    shards: list[list[TensorSpec | CopiedSpec]] = [[]]
    filled = 0  # bytes of the last shard
    for spec in specs:
        if shards[-1] and filled + spec.nbytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(spec)
        filled += spec.nbytes
    names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = [SINGLE_FILE]
    else:
        metadata = {
            "total_parameters": sum(prod(s.shape) for s in specs),
            "total_size": sum(s.nbytes for s in specs),
        }
        files = {s.name: name for name, shard in zip(names, shards, strict=True) for s in shard}
        write_json(directory / INDEX_FILE, {"metadata": metadata, "weight_map": files})
    sums = {}
    for name, shard in zip(names, shards, strict=True):
        with open(directory / name, "wb") as file:
            of_shard = islice(arrays, len(shard))
            _, sums[name] = write_safetensors(file, shard, of_shard, {"format": "pt"})
    return sums
