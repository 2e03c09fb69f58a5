"""`llmq export`: write a checkpoint, a model or adapters in a format of other programs. Each format
is one file, and EXPORTS is the table of formats; `source.py` opens the checkpoint or model."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from llmq.base.errors import ConfigError, LlmqError, warn
from llmq.base.locks import lock_beside, locked
from llmq.base.run_id import RunId
from llmq.checkpoint.export_files import export_owner, exported_files
from llmq.checkpoint.exports.bitnet import Bitnet
from llmq.checkpoint.exports.card import write_card
from llmq.checkpoint.exports.format import ExportFormat, HuggingFace
from llmq.checkpoint.exports.fp8 import Fp8
from llmq.checkpoint.exports.gguf import Gguf
from llmq.checkpoint.exports.source import Source, open_source
from llmq.checkpoint.extra_tensors import opened_extra
from llmq.checkpoint.hub import check_upload, upload
from llmq.options.option_types import parse_dtype_name

EXPORTS: dict[str, type[ExportFormat]] = {
    made.name: made for made in (HuggingFace, Gguf, Fp8, Bitnet)
}
"""Formats by the value of --format."""


def export(
    where: str | Path,
    out: Path,
    *,
    to: str = "hf",
    dtype: str | None = None,
    base: str | None = None,
    merge: bool = False,
    verify: bool | None = None,
    overwrite: bool = False,
    force: bool = False,
    text_only: bool = False,
    licence: str | None = None,
    push: str | None = None,
    **options: str | None,
) -> list[str]:
    """Write a checkpoint, model or adapters in the format `to`; return the names of the files.

    where, base, merge, force, text_only: as in open_source. dtype: value of --dtype; None: dtype of
    the source. verify: as in ExportFormat.write. overwrite: replace any files at `out`; else only
    the model of the same run is replaced. licence: for README.md. push: hub repository for an
    upload. options: options of the format. LlmqError for wrong arguments, before files change.
    """
    if to not in EXPORTS:
        raise ConfigError(f"--format: expected {' or '.join(EXPORTS)}, got {to!r}")
    given = {name: value for name, value in options.items() if value is not None}
    if alien := given.keys() - inspect.signature(EXPORTS[to]).parameters.keys():
        raise ConfigError(f"--{min(alien)} has no meaning with --format {to}")
    export_format = EXPORTS[to](**given)
    with suppress(ValueError):  # dtypes of GGUF alone, such as q8_0
        dtype = None if dtype is None else parse_dtype_name(dtype)
    if dtype is not None and dtype not in export_format.dtypes:
        raise ConfigError(f"--dtype: {to} is {' or '.join(export_format.dtypes)}, got {dtype!r}")
    if push is not None:
        check_upload(push)
    if force:
        verify = False  # NaN is not equal to itself
    with (
        locked(lock_beside(out.resolve()), "--out", out),
        open_source(where, base=base, merge=merge, force=force, text_only=text_only) as source,
        _with_extra(source, base) as source,
    ):
        if not overwrite:
            _check_free(export_format, source, out)
        kept = dtype or source.dtype
        if kept not in export_format.dtypes:
            warn(f"the model is in {kept} and is written in bf16: --dtype fp32 rounds nothing")
            kept = "bf16"
        export_format.check(source, kept)
        files = export_format.write(source, out, kept, verify=verify)
        if out.suffix != ".gguf":
            files = sorted({*files, *write_card(out, source, to, kept, licence)})
    if push is not None:
        upload(push, out, files)
    return files


@contextmanager
def _with_extra(source: Source, base: str | None) -> Iterator[Source]:
    """Open the source's extra tensors. LlmqError where no folder has these tensors."""
    began_as = source.began_as
    lacks = began_as is not None and bool(began_as.parts)
    if source.manifest is not None and base is not None and not lacks:
        raise LlmqError(f"--base: the checkpoint of '{source.name}' lacks nothing: leave it out")
    if not lacks:
        yield source
        return
    with opened_extra(began_as, f"the checkpoint of '{source.name}'", "--base", base) as began_as:
        yield replace(source, began_as=began_as)


def _check_free(export_format: ExportFormat, source: Source, out: Path) -> None:
    """LlmqError if the export would replace files, unless these are a model of the same run."""
    occupied = export_format.occupied(out)
    if not occupied:
        return
    owner = export_owner(out)
    if source.manifest is None or occupied != exported_files(out):
        raise LlmqError(
            f"--out: '{out}' holds {occupied[0].name} already: choose another place, or add "
            "--overwrite"
        )
    run: RunId = source.origin["run"]
    if not run.owns(owner):
        whose = "no run of llmq's" if owner is None else str(owner)
        raise LlmqError(
            f"--out-dir: '{out}' holds the model of {whose}, not of the checkpoint's "
            f"{run}: choose another directory, move it away, or add --overwrite"
        )
