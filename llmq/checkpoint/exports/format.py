"""The interface of export formats, and the format of Hugging Face's model directories."""

from functools import partial
from pathlib import Path

import numpy as np

from llmq.base.dtypes import OPTION_DTYPES
from llmq.base.errors import LlmqError
from llmq.checkpoint.bitnet import stored_as_trained
from llmq.checkpoint.coded import CodedMatrix
from llmq.checkpoint.export_files import exported_files
from llmq.checkpoint.exports.source import Source, saved_config
from llmq.checkpoint.hf import HfWeights, StoredAs, export_model
from llmq.checkpoint.peft import AdapterFiles
from llmq.checkpoint.peft_export import export_adapter
from llmq.checkpoint.source_model import digest_of_tensor
from llmq.state.params import weight_table

SMALL = 1 << 31
"""Maximum bytes of an export that is read back by default."""


class ExportFormat:
    """Base class of the formats that `llmq export` writes; constructors take a format's options.

    name: value of --format. dtypes: allowed values of --dtype.
    """

    name: str
    dtypes: tuple[str, ...]

    def check(self, source: Source, dtype: str) -> None:
        """LlmqError if the format cannot hold this source; called before files are written."""

    def occupied(self, out: Path) -> list[Path]:
        """Return the files that an export to `out` would replace."""
        raise NotImplementedError

    def write(self, source: Source, out: Path, dtype: str, *, verify: bool | None) -> list[str]:
        """Write all files of the export or none; return their names. verify: read the files back
        and compare; None: only exports up to SMALL bytes. LlmqError for a full disk, or if a file
        differs from the source."""
        raise NotImplementedError


class HuggingFace(ExportFormat):
    """A model directory that transformers loads, or a directory of adapters that PEFT loads."""

    name, dtypes = "hf", ("fp32", "bf16")

    def check(self, source: Source, dtype: str) -> None:
        if source.adapters is not None and source.manifest is None:
            raise LlmqError(
                f"'{source.folder}' holds adapters in PEFT's format already: add --merge to write "
                "them with their model, or give --format gguf"
            )

    def occupied(self, out: Path) -> list[Path]:
        return exported_files(out)

    def write(self, source: Source, out: Path, dtype: str, *, verify: bool | None) -> list[str]:
        if source.adapters is not None:  # adapters are small: they keep the checkpoint's dtype
            check = partial(_verify_adapters, source) if verify in (None, True) else None
            return export_adapter(
                out, source.model, source.adapters, source.settings, source.read,
                source.tokenizer, check, **source.origin,
            )  # fmt: skip
        stored = StoredAs(OPTION_DTYPES[dtype])
        if source.manifest is not None:
            stored = stored_as_trained(stored.dtype, source.model, saved_config(source.manifest))
        return write_model(source, out, stored, verify)


def _verify_adapters(source: Source, folder: Path) -> None:
    """LlmqError unless the adapters in `folder` are equal to the source's."""
    with AdapterFiles(folder) as files:
        for param in (param for slab in source.table for param in slab.params):
            if not np.array_equal(files.read(param), source.read(param)):
                raise LlmqError(f"{param.name} is not what was written: write it again")


def write_model(source: Source, out: Path, stored: StoredAs, verify: bool | None) -> list[str]:
    """Write a model directory; return the names of its files. stored: the layout of parameters.
    verify: see ExportFormat.write."""
    params, check = (p for slab in source.table for p in slab.params), None
    size = sum(spec.nbytes for param in params for spec in stored.specs(param))
    if verify or (verify is None and size <= SMALL):
        check = partial(_verify_model, source, stored)
    return export_model(
        out, source.model, source.read, stored.dtype, source.tokenizer,
        source=source.began_as, check=check, stored=stored, **source.origin,
    )  # fmt: skip


def _verify_model(source: Source, stored: StoredAs, folder: Path) -> None:
    """LlmqError unless the weights in `folder` are equal to the source's."""
    with HfWeights(folder) as weights:
        weights.check(weight_table(source.model))
        for param in (param for slab in source.table for param in slab.params):
            if not np.array_equal(weights.read(param), stored.values(param, source.read(param))):
                raise LlmqError(f"{param.name} is not what was written: write it again")
        extra = {} if source.began_as is None else source.began_as.extra
        for name, tensor in extra.items():
            if isinstance(tensor, CodedMatrix):  # exported as values, not as codes
                continue
            if digest_of_tensor(name, tensor) != digest_of_tensor(name, weights.extra[name]):
                raise LlmqError(f"{name} is not what was written: write it again")
