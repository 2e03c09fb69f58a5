"""Reading adapters in PEFT's format: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from llmq.arch.model_config import ModelConfig
from llmq.arch.mtp import MTP
from llmq.base.errors import LlmqError
from llmq.base.files import check_readable, json_object
from llmq.checkpoint.base_id import BaseId
from llmq.checkpoint.export_files import ADAPTER_CONFIG, ADAPTER_FILE, MTP_FILE, recorded_sums
from llmq.checkpoint.folder import digest_of_file, entries, is_complete
from llmq.checkpoint.hf import (
    SCORE_HEAD,
    HfWeights,
    same_values,
)
from llmq.checkpoint.safetensors_file import FileTensor
from llmq.data.identity import RUN_FILE
from llmq.options.adapters import Adapters, adapted_modules, divided_bias, matches, token_matrices
from llmq.options.groups.model import ModelOptions
from llmq.options.option_types import LORA_TARGETS, QUANTIZED
from llmq.state.params import NEW_ROWS, PEFT_PREFIX, SLABS, Param, token_tables, weight_table

# Fields of adapter_config.json that turn on features of PEFT which llmq lacks.
_UNKNOWN = ("layer_replication", "lora_bias", "use_qalora")
_UNKNOWN += ("alora_invocation_tokens", "use_bdlora", "velora_config")
_UNKNOWN += ("monteclora_config", "kasa_config", "arrow_config")
_NOT_AS_EXPECTED = (ArithmeticError, ValueError, LookupError, TypeError, AttributeError)
_NOT_AS_EXPECTED += (RecursionError,)
_IN_WRAPPER = re.compile(r"\b(modules_to_save|original_module)\.(?=\w+$)")
_OF_ADAPTED = re.compile(r"\.base_layer\.(?=(bias|weight)$)")
TIED_HEAD = "lm_head.weight"
BIASES = {"all": "biases", "lora_only": "adapted-biases"}
"""Values of --train, by value of PEFT's `bias`."""
PARTS = ("norms", "embeddings", "head")
"""Parts of the model of which an adapter file may hold untrained copies."""
INSIDE = "model.language_model."
"""Prefix that replaces "model." in names of a language model with other parts (vision tower)."""
_FUSED = ("gate_up_proj", "up_proj", "down_proj")
"""Parameters of a module of experts, in the order in which PEFT nests its wrappers."""
_WRAPPED = ".base_layer"
_CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # values of init_lora_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """Settings of adapters other than ranks, scalings and targets.

    dropout: dropout rate of LoRA inputs. base: name of the base model, or None. base_dtype:
    quantized dtype of the frozen base weights; None: not quantized, or unknown. modules: suffixes
    of the names of modules trained in full (modules_to_save). add_tokens: value of --add-tokens.
    new_tokens: for each module ("": the embedding), the ids of the only rows that are trained.
    content: adapter_config.json as parsed JSON.
    """

    dropout: float
    base: str | None
    base_dtype: str | None = None
    modules: tuple[str, ...] = ()
    add_tokens: str | None = None
    new_tokens: Mapping[str, list[int]] = field(default_factory=dict)
    content: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, options: ModelOptions) -> AdapterConfig:
        return cls(
            dropout=options.lora_dropout,
            base=options.model,
            base_dtype=options.base_dtype if options.is_quantized else None,
            add_tokens=options.add_tokens,
        )


def read_adapter_config(directory: Path) -> AdapterConfig:
    """Read adapter_config.json of a directory. LlmqError if the file is missing, is damaged, or
    asks for features that llmq does not have."""
    path = directory / ADAPTER_CONFIG
    try:
        check_readable(path)
        content = json.loads(path.read_bytes())
        if content.get("peft_type") != "LORA":
            kind = content.get("peft_type")
            raise LlmqError(f"'{path}': peft_type {kind!r} is not supported, only LORA")
        _check_features(path, content)
        _check_numbers(path, content)
        base = content.get("base_model_name_or_path")
        if not isinstance(base, str | None):
            raise TypeError(f"base_model_name_or_path is {base!r}")
        return AdapterConfig(
            content=content,
            dropout=float(content.get("lora_dropout") or 0),
            base=base,
            modules=tuple(map(str, content.get("modules_to_save") or ())),
            new_tokens=_new_tokens(content.get("trainable_token_indices") or {}),
        )
    except OSError as error:
        if any(map(is_complete, (directory, *entries(directory)))):
            raise LlmqError(
                f"--adapter: '{directory}' holds checkpoints: `llmq export` one, and give what it "
                "writes"
            ) from error
        raise LlmqError(
            f"--adapter: '{directory}' holds no adapters: cannot read {ADAPTER_CONFIG}: "
            f"{error.strerror}"
        ) from error
    except _NOT_AS_EXPECTED as error:
        raise LlmqError(f"'{path}' is damaged ({error!r}): copy it again") from error


def _check_numbers(path: Path, content: Mapping[str, Any]) -> None:
    ranks, alphas = (content.get(f"{name}_pattern") or {} for name in ("rank", "alpha"))
    for rank in map(int, (content["r"], *ranks.values())):
        for alpha in map(float, (content["lora_alpha"], *alphas.values())):
            if rank < 1 or not isfinite(alpha):
                raise LlmqError(f"'{path}': no adapters have rank {rank} and lora_alpha {alpha}")
    for pattern in (*ranks, *alphas):
        matches(pattern, "")  # raises an error for a malformed pattern


def _parameters(content: Mapping[str, Any]) -> list[str]:
    """Return target_parameters: the names, or suffixes of names, of adapted parameters."""
    return [str(name) for name in content.get("target_parameters") or ()]


def _adapts(content: Mapping[str, Any], parameter: str) -> bool:
    names = {parameter, nested_name(parameter)}
    return any(n == by or n.endswith(f".{by}") for by in _parameters(content) for n in names)


def of_parameter(name: str, content: Mapping[str, Any]) -> str:
    """Return llmq's name of an adapter's tensor. For adapters of experts, PEFT's name has the
    wrapped module, and llmq's name has the parameter: `experts.lora_A` becomes
    `experts.down_proj.lora_A`. Other names stay. name: PEFT's name. content:
    adapter_config.json."""
    module, lora, end = name.partition(".lora_")
    own = module.removeprefix(PEFT_PREFIX).removesuffix(_WRAPPED)
    fused = [each for each in _FUSED if _adapts(content, f"{own}.{each}")]
    if not lora or not fused:
        return name
    return f"{PEFT_PREFIX}{own}.{fused[0 if module.endswith(_WRAPPED) else -1]}{lora}{end}"


def by_module(name: str, adapted: Collection[str]) -> str:
    """Return PEFT's name of an adapter tensor for llmq's name, the inverse of `of_parameter`.
    adapted: names of all adapted modules and parameters."""
    whole, lora, end = name.partition(".lora_")
    module, _, fused = whole.rpartition(".")
    last = f"{module.removeprefix(PEFT_PREFIX)}.{_FUSED[-1]}"
    if not lora or fused not in _FUSED or not module.endswith(".experts"):
        return name
    inner = _WRAPPED if fused != _FUSED[-1] and last in adapted else ""
    return f"{module}{inner}{lora}{end}"


def _chosen(
    content: Mapping[str, Any], modules: Collection[str], found: Collection[str]
) -> set[str]:
    """Return those of `modules` that PEFT adapts with this adapter_config.json. found: modules with
    adapters in the file. If `found` has no single experts, the experts of a layer were one
    parameter, which PEFT does not adapt by names of modules."""
    if not any(".experts." in module for module in found):
        modules = [module for module in modules if ".experts." not in module]

    def named(by: Any, module: str) -> bool:
        if isinstance(by, str):
            return re.fullmatch(by, module) is not None
        return any(module == end or module.endswith(f".{end}") for end in by or ())

    layers, chosen = content.get("layers_to_transform"), set()
    layers = {layers} if isinstance(layers, int) else {*(layers or ())}
    patterns = content.get("layers_pattern") or [r"[^.]*"]
    patterns = [patterns] if isinstance(patterns, str) else patterns
    for module in modules:
        numbers = (re.match(rf"(?:.*?\.)?{p}\.(\d+)\.", module) for p in patterns)
        number = next((int(match[1]) for match in numbers if match), None)
        if (not layers or number in layers) and any(
            named(content["target_modules"], name)
            and not named(content.get("exclude_modules"), name)
            for name in {module, nested_name(module)}
        ):
            chosen.add(module)
    return chosen


def _check_features(path: Path, content: Mapping[str, Any]) -> None:
    for name in _UNKNOWN:
        if content.get(name):
            raise LlmqError(f"'{path}': {name} {reprlib.repr(content[name])} is not supported")
    for name in _parameters(content):
        if not name.endswith(tuple(f"experts.{fused}" for fused in _FUSED)):
            raise LlmqError(f"'{path}': target_parameters {name!r} is not supported, only experts")
    if _parameters(content) and content.get("bias", "none") != "none":
        raise LlmqError(f"'{path}': bias {content['bias']!r} beside target_parameters is not known")
    if content.get("bias", "none") not in ("none", *BIASES):
        raise LlmqError(f"'{path}': bias {content['bias']!r} is not known")
    begun = content.get("init_lora_weights")
    if isinstance(begun, str) and begun.lower().startswith(_CHANGE_THE_BASE):
        raise LlmqError(
            f"'{path}': init_lora_weights {begun!r}: these adapters belong to a model that they "
            "have changed: convert them to adapters of the model itself"
        )


def _new_tokens(ids: Any) -> dict[str, list[int]]:
    by_module = {"": ids} if isinstance(ids, list) else ids
    return {str(module): [int(i) for i in ids] for module, ids in by_module.items() if ids}


def with_additions(
    model: ModelConfig, directory: Path, adapter: AdapterConfig | None = None
) -> ModelConfig:
    """Return the model with the additions that adapters in a directory need: new token ids, whose
    rows are trained with the adapters, and a score head.

    adapter: the directory's adapter_config.json; None: read the file. LlmqError if the ids do not
    fit the model, are not consecutive, or differ between embedding and LM head.
    """
    adapter = read_adapter_config(directory) if adapter is None else adapter
    if adapter.content.get("task_type") == "SEQ_CLS" and not model.num_labels:
        with AdapterFiles(directory) as files:
            labels = files.labels
        if labels:
            model = replace(model, num_labels=labels, tied_embeddings=False)
    if not adapter.new_tokens:
        return model
    what = f"'{directory / ADAPTER_CONFIG}': trainable_token_indices"
    ids, *others = adapter.new_tokens.values()
    tables = [m.parts[0].module for m in token_tables(model).values()]
    named = tuple(name or tables[0] for name in adapter.new_tokens)
    if not tables[0].endswith(named):
        raise LlmqError(f"{what}: {tables[0]} has none, and rows of the head are not trained alone")
    first, stop = ids[0], ids[0] + len(ids)
    if ids != [*range(first, stop)] or others != [ids] * len(others) or first < 0:
        raise LlmqError(f"{what} {reprlib.repr(ids)}: only neighbouring ids, rising, are supported")
    if model.new_tokens not in (None, (first, stop)):
        raise LlmqError(
            f"--add-tokens: its ids begin at {model.new_tokens[0]}, the {len(ids)} that were "
            f"trained in '{directory}' at {first}: leave it out, or give what was given there"
        )
    if stop > model.vocab_size:
        raise LlmqError(
            f"{what} {reprlib.repr(ids)}: the model has {model.vocab_size} rows: give --add-tokens "
            "as in their training"
        )
    return replace(model, new_tokens=(first, stop))


class AdapterFiles(HfWeights):
    """The tensors of a PEFT directory, by the names of the weight table.

    The file may hold copies of embedding and LM head that were not trained (PEFT's
    save_embedding_layers). If PEFT trained only some parameters of a part, the part also counts as
    a copy. base: identity of the base model, or None. ends: EOS ids of the trained model; [] if
    unknown.
    """

    asks = "the model asks"

    def __init__(self, directory: Path) -> None:
        self.config = read_adapter_config(directory)
        super().__init__(directory)
        self._is_ours = self._agrees()
        record = json_object(directory / RUN_FILE) if self._is_ours else {}
        self.base, dtype = BaseId.of(record.get("base")), record.get("base_dtype")
        # With PiSSA (older versions) base_dtype is the dtype of the remaining weights, not of the
        # base.
        split = record.get("lora_init") == "pissa"
        tokens, ends = record.get("add_tokens"), record.get("eos_token_ids")
        self.config = replace(
            self.config,
            base_dtype=dtype if dtype in QUANTIZED and not split else None,
            add_tokens=tokens if isinstance(tokens, str) else None,
        )
        self.ends = ends if isinstance(ends, list) else []

    @property
    def labels(self) -> int:
        """Number of rows of the score head in the file; 0 without a score head."""
        return self._where[SCORE_HEAD].shape[0] if SCORE_HEAD in self._where else 0

    def _open(self) -> dict[str, FileTensor]:
        if not (self.directory / ADAPTER_FILE).is_file():
            old = "adapter_model.bin"
            if (self.directory / old).is_file():
                raise LlmqError(
                    f"'{self.directory}' has its adapters in {old}, which cannot be read: load it "
                    f"with PEFT and save it again, as {ADAPTER_FILE}"
                )
            raise LlmqError(f"'{self.directory}' has no {ADAPTER_FILE}: copy it again")
        tensors = self._file(ADAPTER_FILE)
        self._check_names(tensors)
        # With save_embedding_layers PEFT stores modules_to_save twice, once with the weights before
        # training.
        twice = {name for name in tensors if _IN_WRAPPER.sub("", name) in tensors.keys() - {name}}
        own = {_own_name(name): x for name, x in tensors.items() if name not in twice}
        found = {of_parameter(name, self.config.content): x for name, x in own.items()}
        return found | (self._file(MTP_FILE) if (self.directory / MTP_FILE).is_file() else {})

    def _check_names(self, names: Iterable[str]) -> None:
        """LlmqError if names of adapters lack the prefix without which PEFT silently ignores
        them."""
        wrong = [n for n in names if ".lora_" in n and not n.startswith(PEFT_PREFIX)]
        if wrong:
            raise LlmqError(
                f"'{self.directory / ADAPTER_FILE}': {min(wrong)} does not begin with "
                f"'{PEFT_PREFIX}', without which PEFT does not find it either: write the file with "
                "PEFT's save_pretrained, or put that before the names"
            )

    def _agrees(self) -> bool:
        """True unless another program has replaced the adapters that llmq.json describes."""
        noted = recorded_sums(self.directory).get(ADAPTER_FILE)
        return noted is None or digest_of_file(self.directory / ADAPTER_FILE) == noted

    def adapters(self, model: ModelConfig, named: tuple[str, ...] = ()) -> Adapters:
        """Return the matrices of this model that the file adapts, and the parts that were trained
        in full.

        named: parts that count as trained even if the file has only copies of them. LlmqError if
        the file has no adapters, or adapters of another model.
        """
        modules = {name.rpartition(".lora_")[0] for name in self._where if ".lora_" in name}
        ahead = model.arch.mtp is not None and any(map(self.has, _params_of(model, MTP)))
        if not modules and ahead:
            return Adapters(rank=int(self.config.content["r"]), targets=(), train=(MTP,))
        if not modules:
            raise LlmqError(f"--adapter: '{self.directory}' has no adapters in {ADAPTER_FILE}")
        every: dict[str, tuple[int | None, tuple[str, ...]]] = {
            part.module: (layer, part.targets)
            for layer in range(model.num_layers)
            for matrix in model.matrices(layer)
            for part in (*matrix.parts, matrix.fused)
            if part is not None
        }
        tables = {
            p.module: (None, p.targets) for t in token_matrices(model).values() for p in t.parts
        }
        every |= tables
        adapted, content = {m for m in every if f"{PEFT_PREFIX}{m}" in modules}, self.config.content
        fused = {module for module in every if _adapts(content, module)}
        if content.get("target_modules") not in (None, "all-linear"):
            adapted = adapted and (_chosen(content, every, adapted) - fused) | fused
        parts = [
            part
            for part in PARTS
            if any(map(self.has, _params_of(model, part)))
            and (part in named or all(self._trains(model, p) for p in _params_of(model, part)))
        ]
        parts += [MTP] if ahead else []
        biases = BIASES.get(self.config.content.get("bias"))
        parts += [biases] if biases and any(name.endswith(".bias") for name in self._where) else []
        if self.config.new_tokens:
            head = model.tied_embeddings or any(
                name.endswith("lm_head") for name in self.config.new_tokens
            )
            parts.append("new-rows" if head else "new-embeddings")
        alone = ("use_dora", *(("ensure_weight_tying",) if model.tied_embeddings else ()))
        if wrong := [name for name in alone if content.get(name) and adapted & tables.keys()]:
            raise LlmqError(
                f"'{self.directory / ADAPTER_CONFIG}': {wrong[0]} is not supported of adapters of "
                "embedding or LM head"
            )
        if not adapted:
            first = min(modules).removeprefix(PEFT_PREFIX)
            raise LlmqError(
                f"--adapter: '{self.directory}' does not fit the model: it adapts {first}, which "
                f"{model.architecture} does not have"
            )
        adapters = self._adapters(model, {m: every[m] for m in every if m in adapted}, tuple(parts))
        if "adapted-biases" in parts and (problem := divided_bias(model, adapters)):
            raise LlmqError(f"'{self.directory / ADAPTER_CONFIG}': bias 'lora_only': {problem}")
        return adapters

    def _adapters(
        self,
        model: ModelConfig,
        modules: dict[str, tuple[int | None, tuple[str, ...]]],
        train: tuple,
    ) -> Adapters:
        """Return the adapters of these modules. modules: for each module's name, the layer (None:
        embedding or LM head) and the module's names in --lora-targets. train: parts trained in
        full."""
        content = self.config.content
        targets = {name for _, names in modules.values() for name in names}
        layers = sorted({layer for layer, _ in modules.values() if layer is not None})
        ranks, alphas = (content.get(f"{name}_pattern") or {} for name in ("rank", "alpha"))
        adapters = Adapters(
            rank=int(content["r"]),
            targets=tuple(target for target in LORA_TARGETS if target in targets),
            train=train,
            layers=",".join(map(str, layers)) if 0 < len(layers) < model.num_layers else "all",
            alpha=float(content["lora_alpha"]),
            rs=bool(content.get("use_rslora")),
            ranks=tuple((pattern, int(rank)) for pattern, rank in ranks.items()),
            alphas=tuple((pattern, float(alpha)) for pattern, alpha in alphas.items()),
            dora=bool(content.get("use_dora")),
        )
        if adapted_modules(model, adapters).keys() == modules.keys():
            return adapters
        pattern = content.get("target_modules")
        adapters = replace(adapters, targets=pattern if isinstance(pattern, str) else "")
        if adapted_modules(model, adapters).keys() == modules.keys():
            return adapters
        return replace(adapters, targets="|".join(map(re.escape, modules)), layers="all")

    def _trains(self, model: ModelConfig, param: Param) -> bool:
        """True if modules_to_save names the module of this parameter."""
        names = (param.hf[0].name, *tied_names(model, param))
        modules = [each.rpartition(".")[0] for name in names for each in (name, nested_name(name))]
        return any(module.endswith(self.config.modules) for module in modules)

    def unknown_base(self, model: str) -> list[str]:
        """Return warnings if the adapters may belong to another model, because they name another
        base model, or because llmq.json describes other adapters. model: name of the base model in
        use."""
        name, lines = self.config.base, []
        if not self._is_ours:
            lines.append(
                f"--adapter: {ADAPTER_FILE} in '{self.directory}' is not the one that {RUN_FILE} "
                f"was written with: another program has replaced it, or it is damaged; {RUN_FILE} "
                "is not used"
            )
        if self.base is None and name and Path(name).name != Path(model).name:
            lines.append(
                f"--adapter: '{self.directory}' was made for the model '{name}', which cannot be "
                f"compared with {model}"
            )
        return lines

    def check_adapters(self, model: ModelConfig, adapters: Adapters) -> None:
        """LlmqError unless the file holds all trained parameters, and beside these only copies."""
        path, used = self.directory / ADAPTER_FILE, set()
        if model.tied_embeddings:
            table = _params_of(model, "embeddings")[0]
            stored = {table.hf[0].name, TIED_HEAD} & self._where.keys()
            if len(stored) == 2 or (stored and self._trains(model, table)):  # else a copy
                self._check_tied(path, table.hf[0].name)
            used.add(TIED_HEAD)
        params = [p for s in weight_table(model, 1, adapters) for p in s.params if p.of_adapter]
        others = [p for part in PARTS for p in _params_of(model, part)]
        params += [p for p in others if self.has(p) or self._trains(model, p)]
        own = (s for s in weight_table(model, 1, adapters) if s.name in ("biases", NEW_ROWS, MTP))
        params += [p for slab in own for p in slab.params]
        for param, part in [(p, part) for p in params for part in p.hf]:
            if part.name not in self._where:
                raise LlmqError(f"'{path}' lacks {part.name}: it is of another model, or damaged")
            self._check_part(part.name, param, part)
            used.add(part.name)
        unknown = self._where.keys() - used
        if unknown:
            name = min(unknown)
            raise LlmqError(
                f"'{path}' holds {name}, which the adapters of this model do not have: "
                + (
                    "they are of matrices, embedding and LM head"
                    if ".lora_" in name
                    else "beside them, only norms, embeddings and LM head can be trained"
                )
            )

    def _copies(self, model: ModelConfig, adapters: Adapters) -> list[tuple[str, Param]]:
        """Return the copies in the file, as (part, parameter), for parts of the model that are not
        trained."""
        parts = [part for part in PARTS if part not in adapters.train]
        copies = [(part, p) for part in parts for p in _params_of(model, part) if self.has(p)]
        return [(part, p) for part, p in copies if not ("biases" in adapters.train and p.is_bias)]

    def leave_copies(self, model: ModelConfig, adapters: Adapters, weights: HfWeights) -> None:
        """Drop the copies, after comparing each with the model's weights; LlmqError if a copy
        differs. weights: the base model's weights."""
        other = {}
        for part, param in self._copies(model, adapters):
            copy, name = self.read(param), param.hf[0].name
            if not np.array_equal(copy, weights.read(param).astype(copy.dtype)):
                other.setdefault(part, name)
            del self._where[name]
        if other:
            parts = " and the ".join(other)
            raise LlmqError(
                f"--adapter: '{self.directory}' holds {' and '.join(other.values())} that the "
                f"model does not have, but modules_to_save does not name all of the {parts}: "
                f"--train={','.join((*adapters.train, *other))} goes on training from what is "
                "there, `llmq merge` makes a model with it"
            )

    def _check_tied(self, path: Path, embed: str) -> None:
        """LlmqError unless the file has the same values for embedding and LM head, which are one
        matrix in this model."""
        tables = [self._where.get(name) for name in (embed, TIED_HEAD)]
        if None in tables or not same_values(*tables):
            alone, other = (embed, "LM head") if tables[0] is not None else (TIED_HEAD, "embedding")
            raise LlmqError(
                f"'{path}': {alone} was trained without the {other}, which is the same matrix in "
                "this model: train both, with ensure_weight_tying in PEFT"
            )


def _own_name(name: str) -> str:
    """Return a tensor's name in the weight table for PEFT's name. Names of parts lose PEFT's
    prefix, names of adapters keep it, and all names lose the prefix of a wrapping model."""
    name = _OF_ADAPTED.sub(".", name)
    for inside, own in ((INSIDE, "model."), ("language_model.", "")):
        name = name.replace(PEFT_PREFIX + inside, PEFT_PREFIX + own, 1)
    return name if ".lora_" in name else name.removeprefix(PEFT_PREFIX)


def biases_of(model: ModelConfig, adapters: Adapters) -> list[Param]:
    table = weight_table(model, 1, adapters)
    return [p for slab in table if slab.name == "biases" for p in slab.params]


def _params_of(model: ModelConfig, part: str) -> list[Param]:
    table = weight_table(model, 1, Adapters(rank=1, targets=("o",), train=(part,)))
    return [p for slab in table if slab.name == SLABS[part] for p in slab.params]


def nested_name(name: str) -> str:
    """Return the name that a tensor has in a model with other parts (vision tower); the LM head's
    name stays."""
    return INSIDE + name.removeprefix("model.") if name.startswith("model.") else name


def tied_names(model: ModelConfig, param: Param) -> tuple[str, ...]:
    """Return the second name that PEFT expects for a tied embedding, the LM head's; () for any
    other parameter."""
    return (TIED_HEAD,) if param.key == "embed" and model.tied_embeddings else ()
