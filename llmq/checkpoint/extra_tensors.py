"""Extra tensors of a model (vision tower, MTP layers), read from the source model's folder. A
checkpoint holds no extra tensors, only their number per module and their SHA-256."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from llmq.base.errors import LlmqError
from llmq.checkpoint.export_files import CONFIG_FILE
from llmq.checkpoint.hf import HfWeights
from llmq.checkpoint.source_model import SourceModel
from llmq.options.presets import find_directory, pinned, resolve_model
from llmq.state.params import weight_table


@contextmanager
def opened_extra(
    source: SourceModel, what: str, flag: str, place: str | None = None
) -> Iterator[SourceModel]:
    """Yield the source model with its extra tensors open inside the `with` block. what: the owner
    of the tensors, for messages. flag: the option that names a model with these tensors. place: the
    value of `flag`; None: look in the folders that the source names. LlmqError if no folder has the
    tensors."""
    if not source.parts or source.extra:
        yield source
        return
    with _weights(source, place) as weights:
        if weights is None:
            name = pinned(source.name, source.revision)
            where = f"'{place}' has others" if place is not None else f"not in '{source.folder}'"
            raise LlmqError(
                f"{what} is of the model '{name}', of which {source.described} are not trained and "
                f"lie beside its weights ({where}): give the folder of that model as {flag}, or "
                "leave them out with --text-only"
            )
        yield replace(source, extra=weights.extra)


@contextmanager
def _weights(source: SourceModel, place: str | None) -> Iterator[HfWeights | None]:
    """Yield the weights of the first folder with the same extra tensors; None without such a
    folder."""
    named = (source.folder, pinned(source.name, source.revision))
    for name in dict.fromkeys(named if place is None else (place,)):
        directory = find_directory(name)
        if directory is None or not (directory / CONFIG_FILE).is_file():
            continue
        try:
            weights = HfWeights(directory)
        except LlmqError:
            if place is not None:
                raise
            continue
        with weights:
            model, _ = resolve_model(name, from_scratch=False)
            weights.check(weight_table(model))
            if weights.source_model(name).sha256 == source.sha256:
                yield weights
                return
    yield None
