"""`llmq check`: find files that have changed since they were written. Checkpoints, token files with
a `.sums` file, and exported weights are compared with their checksums. For other files, the header,
the length and the values are checked."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from llmq.base.errors import LlmqError
from llmq.base.files import check_readable, expand_pattern
from llmq.checkpoint.checkpoint import CheckpointReader, padded_size
from llmq.checkpoint.export_files import ADAPTER_FILE, recorded_sums
from llmq.checkpoint.exports.source import saved_slabs
from llmq.checkpoint.finite import all_finite, reached
from llmq.checkpoint.folder import digest_of_file, is_complete
from llmq.checkpoint.hf import INDEX_FILE, SINGLE_FILE, HfWeights
from llmq.checkpoint.safetensors_file import open_foreign
from llmq.checkpoint.store import list_checkpoints
from llmq.data import checksums, document_file
from llmq.data.checksums import checksums_path
from llmq.data.document_file import documents_path
from llmq.data.document_index import DocumentIndex
from llmq.data.identity import MANIFEST, RUN_FILE, SHARD_NAME
from llmq.data.tokens import TokenFile
from llmq.options.presets import resolve_model
from llmq.state.params import Param, Slab, weight_table
from llmq.state.rules.rule import MatrixState, OptimizerState
from llmq.text.token_shards import Tokenized, token_files

_BLOCK = 1 << 22  # number of tokens that one read takes

Check = Callable[[Path], str]
"""Function that checks a path and returns the findings as a phrase; LlmqError if the path is
damaged."""


class Checkable(NamedTuple):
    """A file or a folder, and the function that checks it."""

    path: Path
    check: Check


def run_check(names: Sequence[str], *, trained: bool = False) -> None:
    """Print one line for each file or folder that the names stand for; LlmqError if one is damaged.
    names: token files, `.docs` files, safetensors files, checkpoints, models, folders of these, or
    patterns. trained: True to print, instead, those trained tensors of checkpoints that have not
    moved."""
    damaged, count = [], 0
    for name in names:
        try:
            targets = [target for path in _named(name) for target in _targets(path)]
        except LlmqError as error:
            damaged.append(str(error))
            continue
        for path, check in dict.fromkeys(targets):
            count += 1
            try:
                print(f"'{path}': {(_trained if trained else check)(path)}", flush=True)
            except LlmqError as error:
                damaged.append(error.headline)
                print(f"'{path}': DAMAGED", flush=True)
    if damaged:
        raise LlmqError(f"{damaged[0]}", damaged[1:])


def _named(name: str) -> list[Path]:
    paths = expand_pattern(name)
    if not paths:
        raise LlmqError(f"there is no '{name}'")
    return paths


def _targets(path: Path) -> Iterator[Checkable]:
    if not path.is_dir():
        yield _file(path)
    elif is_complete(path):
        yield Checkable(path, _checkpoint)
    elif any((path / name).exists() for name in (SINGLE_FILE, INDEX_FILE)):
        yield Checkable(path, _model)
    elif (path / ADAPTER_FILE).exists():
        yield Checkable(path, _adapter)
    elif steps := list_checkpoints(path):
        yield from (Checkable(step, _checkpoint) for step in steps.values())
    elif (path / MANIFEST).exists():
        yield Checkable(path, _tokenized)
        yield from (Checkable(file, _token_file) for file in token_files(path))
    else:
        raise LlmqError(
            f"'{path}' holds no checkpoint, no model and no token files: name the files themselves"
        )


def _file(path: Path) -> Checkable:
    if path.suffix == ".safetensors":
        return Checkable(path, _safetensors)
    if path.suffix in (document_file.SUFFIX, checksums.SUFFIX):
        return Checkable(path.with_suffix(".bin"), _token_file)
    return Checkable(path, _token_file)


# ------------------------------------------------------------------------------------------------
# Token files


def _token_file(path: Path) -> str:
    file = TokenFile(path)
    limit = file.vocab_size or np.iinfo(np.int32).max
    for start in range(0, file.num_tokens, _BLOCK):
        ids = file.read_tokens(start, min(_BLOCK, file.num_tokens - start))
        bad = ids.view(np.uint32) >= limit
        if bad.any():
            index = int(bad.argmax())
            raise LlmqError(
                f"'{path}' has token id {ids[index]} at position {start + index}, outside its "
                f"vocabulary of {limit}: tokenize the data again"
            )
        file.read_mask(start, len(ids))
    file.close()
    findings = [f"{file.num_tokens} tokens"]
    if SHARD_NAME.fullmatch(path.name) and (path.parent / MANIFEST).exists():
        Tokenized.read(path.parent).check_file(file)
    promised = file.checksums is not None and file.checksums.has_documents
    if promised or documents_path(path).exists():
        findings.append(f"{len(DocumentIndex.read(path))} documents")
    agree = f"checksums of '{checksums_path(path).name}' agree"
    findings.append("no checksums" if file.checksums is None else agree)
    return ", ".join(findings)


def _tokenized(path: Path) -> str:
    tokenized = Tokenized.read(path)
    tokenized.check()
    return "complete" if tokenized.complete else "unfinished: the same tokenize command goes on"


# ------------------------------------------------------------------------------------------------
# Weights


def _checkpoint(path: Path) -> str:
    with CheckpointReader(path) as reader:
        for param in (p for slab in saved_slabs(reader.manifest) for p in slab.params):
            if not all_finite(reader.read("weights", param)):
                raise LlmqError(f"checkpoint '{path}': {param.name} holds NaN or infinity")
        return f"step {reader.step}, checksums agree, all weights are finite"


def _trained(path: Path) -> str:
    """Return the names of the trained tensors of a checkpoint that no update has changed, one per
    line."""
    if not is_complete(path):
        raise LlmqError(f"--trained: '{path}' is no checkpoint, and only these know what has moved")
    with CheckpointReader(path) as reader:
        slabs = saved_slabs(reader.manifest)
        still = reader.still(slabs)
        slabs = [slab for slab in slabs if slab.name not in still]
        params = [found for slab in slabs for found in _states_of(reader, slab)]

        def moved(param: Param, moments: Iterable[OptimizerState], part: int, parts: int) -> bool:
            for m in moments:
                size = padded_size(m.group, param) // parts
                read = partial(_read_part, partial(reader.read, m.group, param), part * size)
                if reached(read, size):
                    return True
            return False

        def still(param: Param, moments: Iterable[OptimizerState]) -> str | None:
            """Return the tensor's name if it has not moved; if only some of its experts have not
            moved, the name and these experts; else None."""
            parts = param.shape[0] if len(param.shape) > 2 else 1
            idle = [i for i in range(parts) if not moved(param, moments, i, parts)]
            if 0 < len(idle) < parts:
                return f"{param.name}: experts {', '.join(map(str, idle))}"
            return param.name if idle else None

        names = [name for param, moments in params if (name := still(param, moments))]
        if not names:
            return f"all {len(params)} trained tensors have moved by step {reader.step}"
        head = f"{len(names)} of {len(params)} trained tensors have not moved by step {reader.step}"
        return "\n  ".join([f"{head}, no gradient reached them:", *names])


def _states_of(
    reader: CheckpointReader, slab: Slab
) -> Iterator[tuple[Param, tuple[OptimizerState | MatrixState, ...]]]:
    """Yield each parameter of a slab with its moments; for a rule with states of whole matrices,
    each parameter of the states' slab with these states."""
    rule, moments = reader.rule, reader.rule.moments_of(slab)
    states = rule.matrix_states[:1] if rule.by_matrix(slab) and not moments else ()
    for param in (states[0].slab(reader.optim, slab) if states else slab).params:
        yield param, moments or states


def _read_part(read: Callable[..., np.ndarray], first: int, start: int, stop: int) -> np.ndarray:
    return read(first + start, first + stop)


def _model(path: Path) -> str:
    config, directory = resolve_model(str(path), from_scratch=False)
    summed = _sums(path)
    with HfWeights(directory) as weights:
        table = weight_table(config)
        weights.check(table)
        for param in (p for slab in table for p in slab.params):
            weights.read(param)
    return f"{config.architecture}, {summed}, all weights are finite"


def _adapter(path: Path) -> str:
    summed = _sums(path)
    return f"{_safetensors(path / ADAPTER_FILE)}, {summed}"


def _sums(directory: Path) -> str:
    """Compare files with the SHA-256 in an export's llmq.json; return a phrase for the user."""
    recorded = recorded_sums(directory)
    for name, digest in recorded.items():
        if (directory / name).exists():
            check_readable(directory / name)
        if digest_of_file(directory / name) != digest:
            raise LlmqError(
                f"'{directory / name}' is damaged: wrong checksum; export the model again, unless "
                "another program has written it"
            )
    return "checksums agree" if recorded else f"no checksums in {RUN_FILE}"


def _safetensors(path: Path) -> str:
    file = open_foreign(path)
    file.close()
    return f"{len(file.tensors)} tensors, header and length agree"
