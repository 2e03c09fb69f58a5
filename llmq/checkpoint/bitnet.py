"""Export of runs with --matmul-dtype ternary: weights and config.json as transformers' BitNet reads
them."""

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

ONLINE = "online"  # quantization_mode of stored weights that readers still have to round


def is_rounded(param: Param, keys: Collection[str]) -> bool:
    """True if products round this parameter. keys: keys of rounded matrices."""
    return param.kind == "matrix" and param.block.startswith("layers.") and param.key in keys


def rounded(param: Param, values: np.ndarray) -> np.ndarray:
    """Return the values (rows, columns), F32, that products multiply: ternary codes times the scale
    of their module."""
    out = np.empty(values.shape, np.float32)
    for part in param.hf:
        codes, scale = ternary_of(values[part.start : part.stop])
        out[part.start : part.stop] = codes * (1 / (1 / scale))  # as readers compute
    return out


def bitnet_fields(
    model: ModelConfig, of: str, others: Iterable[str] = (), **how: str
) -> dict[str, Any]:
    """Return fields of config.json. of: value of --ternary-of. others: modules that stay unrounded,
    beside the modules that training does not round. how: the fields linear_class and
    quantization_mode."""
    keys = rounded_keys(model, of)
    params = (param for slab in weight_table(model) for param in slab.params)
    plain = [param for param in params if param.kind == "matrix" and not is_rounded(param, keys)]
    kept = [part.name.removesuffix(".weight") for param in plain for part in param.hf]
    kept += ["lm_head", "score", *others]
    return {"quantization_config": {"quant_method": "bitnet", "modules_to_not_convert": kept} | how}


def stored_as_trained(dtype: DType, model: ModelConfig, config: TrainConfig) -> StoredAs:
    """Return the layout in which a run's trained weights are stored. After ternary training
    config.json asks transformers to round the weights as training did."""
    stored = StoredAs(dtype)
    if config.matmul_dtype == "ternary" and not model.arch.transposed:
        how = {"linear_class": "autobitlinear", "quantization_mode": ONLINE}
        stored.fields = bitnet_fields(model, config.ternary_of, **how)
    return stored
