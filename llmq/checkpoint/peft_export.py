"""Writing adapters as PEFT's directory: adapter_config.json and adapter_model.safetensors."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from llmq.arch.model_config import ModelConfig
from llmq.arch.mtp import MTP
from llmq.base.dtypes import DTYPES
from llmq.checkpoint.export_files import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    MTP_FILE,
    run_record,
    staged_export,
    write_json,
)
from llmq.checkpoint.peft import (
    BIASES,
    INSIDE,
    AdapterConfig,
    biases_of,
    by_module,
    nested_name,
    tied_names,
)
from llmq.checkpoint.safetensors_file import TensorSpec, write_safetensors
from llmq.data.identity import RUN_FILE
from llmq.options.adapters import Adapters, adapted_modules, adapted_tables, all_adapted
from llmq.options.option_types import LORA_TARGETS, layer_set
from llmq.state.params import PEFT_PREFIX, Param, trained_slabs, weight_table
from llmq.text.tokenizer import Tokenizer


def export_adapter(
    out_dir: Path,
    model: ModelConfig,
    adapters: Adapters,
    config: AdapterConfig,
    read: Callable[[Param], np.ndarray],
    tokenizer: Tokenizer | Path | None = None,
    check: Callable[[Path], None] | None = None,
    **origin: Any,
) -> list[str]:
    """Write a directory that PEFT loads; return the names of its files.

    read: function that returns a parameter of the weight table with adapters in its shape, F32 or
    BF16. tokenizer, check: see export_model. origin: see run_record. LlmqError if the disk is full
    or fails.
    """
    table, trained = weight_table(model, 1, adapters), trained_slabs(adapters)
    params, names = [p for slab in table if slab.name in trained for p in slab.params], []
    ahead = [param for param in params if param.block == MTP]
    params = [param for param in params if param.block != MTP]
    nested = origin.get("base") is not None and origin["base"].nested
    with staged_export(out_dir, model, tokenizer, check, names) as staging:
        write_json(staging / ADAPTER_CONFIG, _peft_config(model, adapters, config, params, nested))
        values = {param.name: read(param) for param in params}
        parts = [(param, part) for param in params for part in param.hf]
        specs, arrays = [], []
        biases, adapted = biases_of(model, adapters), adapted_modules(model, adapters)
        for param, part in parts:
            array = part.stored(values[param.name][part.start : part.stop])
            dtype = next(d for d in DTYPES.values() if d.numpy == array.dtype)
            for name in (by_module(part.name, adapted), *tied_names(model, param)):
                module = name.removesuffix(".bias")
                if param in biases and module in adapted:  # PEFT wraps adapted modules
                    name = f"{module}.base_layer.bias"
                name = name.removeprefix(PEFT_PREFIX)
                name = PEFT_PREFIX + (nested_name(name) if nested else name)
                specs.append(TensorSpec(name, dtype, array.shape))
                arrays.append(array)
        with open(staging / ADAPTER_FILE, "wb") as file:
            _, digest = write_safetensors(file, specs, arrays, {"format": "pt"})
        sums = {ADAPTER_FILE: digest}
        if ahead:
            sums[MTP_FILE] = _write_mtp(staging / MTP_FILE, ahead, read)
        kept = {"base_dtype": config.base_dtype} if config.base_dtype else {}
        kept |= {"add_tokens": config.add_tokens} if config.add_tokens else {}
        kept |= {"eos_token_ids": model.eos_token_ids} if model.eos_token_ids else {}
        write_json(staging / RUN_FILE, run_record(**origin) | kept | {"sha256": sums})
    return names


def _write_mtp(path: Path, params: list[Param], read: Callable[[Param], np.ndarray]) -> str:
    """Write a head for multi-token prediction under its published names; return the SHA-256."""
    specs, arrays = [], []
    for param in params:
        rows = param.by_row(read(param))
        for part in param.hf:
            arrays.append(part.stored(rows[part.start : part.stop]))
            dtype = next(d for d in DTYPES.values() if d.numpy == rows.dtype)
            specs.append(TensorSpec(part.name, dtype, arrays[-1].shape))
    with open(path, "wb") as file:
        return write_safetensors(file, specs, arrays, {"format": "pt"})[1]


def _peft_config(
    model: ModelConfig, adapters: Adapters, config: AdapterConfig, params: list[Param], nested: bool
) -> dict[str, Any]:
    whole = [p for p in params if not p.of_adapter and p.first_row is None]
    whole = [p for p in whole if p not in biases_of(model, adapters)]
    trained = [part.name for p in whole for part in p.hf]
    tied = [name for p in params for name in tied_names(model, p)]
    modules = sorted({name.split(".")[-2] for name in trained + tied})
    targets, layers = _targets(model, adapters, nested)
    if nested:
        modules = sorted({nested_name(name).rpartition(".")[0] for name in trained + tied})
    tables = [p.table for p in params if p.first_row is not None]
    own_rows = {nested_name(t) if nested else _last(t): [*range(*model.new_tokens)] for t in tables}
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if model.num_labels else "CAUSAL_LM",
        "base_model_name_or_path": config.base,
        "r": adapters.rank,
        "lora_alpha": _number(adapters.alpha),
        "use_rslora": adapters.rs,
        "use_dora": adapters.dora,
        "rank_pattern": dict(adapters.ranks),
        "alpha_pattern": {pattern: _number(alpha) for pattern, alpha in adapters.alphas},
        "layers_to_transform": layers,
        "lora_dropout": config.dropout,
        "target_modules": targets,
        "modules_to_save": modules or None,
        "fan_in_fan_out": model.arch.transposed,
        "bias": next((bias for bias, part in BIASES.items() if part in adapters.train), "none"),
        "inference_mode": True,
        "trainable_token_indices": own_rows or None,
        "target_parameters": _parameters(model, adapters, nested) or None,
    } | ({"ensure_weight_tying": True} if tied else {})


def _number(alpha: float) -> float | int:
    return int(alpha) if float(alpha).is_integer() else alpha


def _targets(
    model: ModelConfig, adapters: Adapters, nested: bool
) -> tuple[list[str] | str, list[int] | None]:
    """Return PEFT's target_modules and layers_to_transform. layers_to_transform is None if
    target_modules is a regular expression, with which PEFT accepts no layers.

    nested: True if the model has other parts, whose modules may have the same names.
    """
    targets, every = adapters.targets, adapters.layers == "all"
    names = target_modules(model, adapters)
    if not names:
        return [], None
    if isinstance(targets, str) and every and not nested:
        return targets, None
    tables = adapted_tables(model, adapters)
    if isinstance(targets, str) or (nested and (tables or not every)) or (tables and not every):
        fused = _parameters(model, adapters, nested=False)
        modules = [m for m in adapted_modules(model, adapters) if not m.endswith((*fused, " "))]
        return "|".join(re.escape(nested_name(m) if nested else m) for m in modules), None
    if nested:
        return rf"{re.escape(INSIDE)}.*\.({'|'.join(map(re.escape, names))})", None
    layers = sorted(layer_set(adapters.layers, model.num_layers))
    return names, None if every else layers


def target_modules(model: ModelConfig, adapters: Adapters) -> list[str]:
    """Return names for PEFT's target_modules: the last component of a module's name if no unadapted
    module has the same last component, else the module's path within the layer."""
    whole = replace(adapters, layers="all")
    every, chosen = (
        {
            (module, module.partition(f".{block.partition('.')[2]}.")[2] or module)
            for block, matrix in all_adapted(model, each)
            for module in (() if matrix.fused else matrix.modules)
        }
        for each in (replace(whole, targets=LORA_TARGETS), whole)
    )
    others = {_last(module) for module, _ in every - chosen}
    names = {path if _last(module) in others else _last(module) for module, path in chosen}
    return sorted(names)


def _parameters(model: ModelConfig, adapters: Adapters, nested: bool) -> list[str]:
    """Return PEFT's target_parameters, which cannot select layers: suffixes of names if all
    parameters with these suffixes are adapted, else full names."""
    every, chosen = [], {m.fused.module for _, m in all_adapted(model, adapters) if m.fused}
    for layer in range(model.num_layers):
        fused = (matrix.fused for matrix in model.matrices(layer) if matrix.fused)
        every += [(part.module, part.module.partition(f".{layer}.")[2]) for part in fused]
    some = {end for module, end in every if module not in chosen}
    if not nested and chosen and some.isdisjoint(end for name, end in every if name in chosen):
        return sorted({end for module, end in every if module in chosen})
    return [nested_name(name) if nested else name for name, _ in every if name in chosen]


def _last(module: str) -> str:
    return module.rpartition(".")[2]
