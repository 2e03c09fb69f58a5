"""`llmq merge`: a model and adapters of it as one model."""

from __future__ import annotations

from pathlib import Path

from llmq.base.dtypes import OPTION_DTYPES
from llmq.base.errors import LlmqError
from llmq.checkpoint.export_files import exported_files, tokenizer_files
from llmq.checkpoint.hf import HfWeights
from llmq.checkpoint.hf_export import export_model
from llmq.checkpoint.peft import open_merged
from llmq.config.presets import resolve_model
from llmq.data.identity import noted_tokenizer
from llmq.state.params import weight_table


def merge_adapter(
    base: str, adapter: Path, out_dir: Path, model_dtype: str, base_dtype: str | None = None
) -> list[str]:
    """Write the model with its adapters added in F32; returns the names of the files.

    base: a model directory or a cached repository. model_dtype: "bf16" or "fp32". base_dtype: as of
    open_merged. The tokenizer is
    that of the adapters' directory, if it has one, else the model's. LlmqError if the two do not
    belong together, or out_dir holds a model already.
    """
    if exported_files(out_dir):
        raise LlmqError(f"--out: '{out_dir}' holds a model already: choose another directory")
    config, directory = resolve_model(base, from_scratch=False)
    source = next((path for path in (adapter, directory) if tokenizer_files(path)), None)
    with HfWeights(directory) as weights:
        weights.check(weight_table(config))
        with open_merged(config, base, weights, adapter, base_dtype) as read:
            made = noted_tokenizer(adapter) or noted_tokenizer(directory)
            return export_model(out_dir, config, read, OPTION_DTYPES[model_dtype], source, made)
