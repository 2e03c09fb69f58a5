"""Weights of runs with --matmul-dtype ternary in the terms of transformers' BitNet."""

from collections.abc import Collection, Iterable
from typing import Any

import numpy as np

from llmq.arch.model_config import ModelConfig
from llmq.base.dtypes import DType
from llmq.checkpoint.hf import StoredAs
from llmq.formats.ternary import rounded_keys
from llmq.options.options import TrainConfig
from llmq.ref.quantize.ternary import ternary_of
from llmq.state.params import Param, weight_table

ONLINE = "online"  # quantization_mode of weights that are stored as they are, and then rounded


def is_rounded(param: Param, keys: Collection[str]) -> bool:
    """Whether products round a parameter. keys: of rounded matrices."""
    return param.kind == "matrix" and param.block.startswith("layers.") and param.key in keys


def rounded(param: Param, values: np.ndarray) -> np.ndarray:
    """The values (rows, columns) that products multiply, F32: codes times each module's scale."""
    out = np.empty(values.shape, np.float32)
    for part in param.hf:
        codes, scale = ternary_of(values[part.start : part.stop])
        out[part.start : part.stop] = codes * (1 / (1 / scale))  # as readers compute
    return out


def bitnet_fields(
    model: ModelConfig, of: str, others: Iterable[str] = (), **how: str
) -> dict[str, Any]:
    """Fields of config.json. of: value of --ternary-of. others: modules that stay as they are,
    beside those that training does not round. how: linear_class and quantization_mode."""
    keys = rounded_keys(model, of)
    params = (param for slab in weight_table(model) for param in slab.params)
    plain = [param for param in params if param.kind == "matrix" and not is_rounded(param, keys)]
    kept = [part.name.removesuffix(".weight") for param in plain for part in param.hf]
    kept += ["lm_head", "score", *others]
    return {"quantization_config": {"quant_method": "bitnet", "modules_to_not_convert": kept} | how}


def stored_as_trained(dtype: DType, model: ModelConfig, config: TrainConfig) -> StoredAs:
    """The layout of a run's trained weights. After ternary training config.json asks transformers
    to round them as the training did."""
    stored = StoredAs(dtype)
    if config.matmul_dtype == "ternary" and not model.arch.transposed:
        how = {"linear_class": "autobitlinear", "quantization_mode": ONLINE}
        stored.fields = bitnet_fields(model, config.ternary_of, **how)
    return stored
