"""Checkpoints: all state that a run needs to continue, on any number of ranks.

    step_00000100/
        weights.shard_000_of_002.safetensors    master weights, one file per rank
        adam.m.shard_… adam.v.shard_…           moments of the update rule, here AdamW
        adam.m.scales.shard_… adam.v.scales…    scales of 8-bit moments
        tokenizer.shard_000_of_001.safetensors  the tokenizer's files, each as bytes
        checkpoint.json                         the manifest, with sizes and SHA-256 of all files

Each rank stores the ranges [start, stop) of parameters' values that lie in its shard. Readers join
ranges, so the number of ranks may change. A range that is the whole parameter keeps the parameter's
shape. Padding is not stored and reads as zero. Scales are stored flat, one for each 128 elements of
a parameter. The directory is called step_00000100.tmp until all files are there.
"""

import json
import reprlib
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from llmq.arch.model_config import ModelConfig
from llmq.base.dtypes import OPTION_DTYPES, U8, DType
from llmq.base.errors import ConfigError, LlmqError
from llmq.base.files import (
    Closing,
    disk_errors,
    make_directory,
    open_file,
    publish_directory,
    replacing,
    write_file,
)
from llmq.base.run_id import RunId
from llmq.base.tensor import Tensor
from llmq.checkpoint.folder import check_own, checkpoint_path, discard, problem_of, unfinished
from llmq.checkpoint.manifest import MANIFEST, VERSION, Manifest, digest_of, read_manifest
from llmq.checkpoint.safetensors_file import (
    NUMPY_DTYPES,
    SafetensorsFile,
    TensorSpec,
    write_safetensors,
)
from llmq.ops.common import SCALE_BLOCK
from llmq.options.options import OPTIONS
from llmq.runtime.device import Device
from llmq.runtime.world import World
from llmq.state.params import Param, Slab
from llmq.state.pieces import SlabPiece, State
from llmq.state.rules import AVERAGE, optim_saved, rule_class
from llmq.state.rules.rule import SCALES, UpdateRule
from llmq.state.turns import still_blocks
from llmq.text.tokenizer import is_tokenizer_file, leaves_folder, tokenizer_names

TOKENIZER = "tokenizer"  # a group of one file, which rank 0 writes


def required_groups(rule: type[UpdateRule]) -> tuple[str, ...]:
    """Return the groups in every checkpoint of an update rule: the weights and the rule's
    states."""
    return ("weights", *(state.group for state in (*rule.moments, *rule.matrix_states)))


def _keeps(rule: type[UpdateRule], group: str, slab: Slab) -> bool:
    """False if the group is a moment that the rule does not keep for this slab, else True."""
    name = group.removesuffix(SCALES)
    lacks = set(rule.moments) - set(rule.moments_of(slab))
    return name not in {moment.group for moment in lacks}


Range = tuple[Param, int, int]
"""A parameter, start and stop: values [start, stop) among the parameter's elements, padding
included, or among their scales."""


class FileEntry(NamedTuple):
    """A finished file of one group and rank."""

    name: str
    group: str
    rank: int
    bytes: int
    sha256: str


def slab_ranges(group: str, slab: Slab, start: int, stop: int) -> list[Range]:
    """Return the ranges of a group that belong to elements [start, stop) of a slab, without gaps
    between parameters.

    start and stop are multiples of SCALE_BLOCK if the group holds scales.
    """
    block, ranges = elements_per_value(group), []
    for param in slab.params:
        first, last = max(start - param.offset, 0), min(stop - param.offset, param.size)
        if first < last:
            ranges.append((param, first // block, -(-last // block)))
    return ranges


def padded_size(group: str, param: Param) -> int:
    """Number of values of a parameter in a group, padding included."""
    return -(-param.size // elements_per_value(group))


def elements_per_value(group: str) -> int:
    """Return the number of adjacent slab elements that share one value of a group: SCALE_BLOCK for
    scales, else 1. Offsets of parameters are multiples of this number."""
    return SCALE_BLOCK if group.endswith(SCALES) else 1


def _stored_shape(group: str, param: Param) -> tuple[int, ...]:
    shape, block = (param.rows, *param.row_shape), elements_per_value(group)
    return shape if block == 1 else (-(-prod(shape) // block),)


def stored_values(group: str, param: Param) -> int:
    """Number of values of a parameter in a checkpoint, without padding."""
    return prod(_stored_shape(group, param))


# ------------------------------------------------------------------------------------------------
# Writing


class CheckpointWriter:
    """Writes one checkpoint. Each rank has its own writer and calls `write` once per group; then
    rank 0 calls `commit` with the entries of all ranks. Only `commit` changes the final name.

    path: the checkpoint's final directory. temporary: the directory that has the files until
    `commit`.
    """

    def __init__(self, directory: Path, step: int, rank: int = 0, world: int = 1) -> None:
        self.path = checkpoint_path(directory, step)
        self.step, self.rank, self.world = step, rank, world
        self.temporary = unfinished(directory, step)
        with disk_errors(self.temporary):
            make_directory(directory)
            check_own(self.temporary)  # `commit` deletes unknown files in this directory
            self.temporary.mkdir(exist_ok=True)
        with disk_errors(self.path):
            check_own(self.path)

    def write(
        self,
        group: str,
        dtype: DType,
        ranges: Sequence[Range],
        read: Callable[[Param, int, int], np.ndarray],
    ) -> FileEntry:
        """Write this rank's file of a group, one of required_groups or a group of scales.

        ranges: at most one range of each parameter. read(param, start, stop): function that returns
        the values, dtype (stop - start,), which stay valid until the next call. `read` is called
        once per range, in order. Threads may write several groups at once. DiskError if the disk is
        full or fails: the caller then calls `discard` as soon as no rank is writing.
        """
        pieces = []
        for param, start, stop in ranges:
            size = stored_values(group, param)
            if start < min(stop, size):
                pieces.append((param, start, min(stop, size), size))
        specs = [
            TensorSpec(p.name, dtype, _stored_shape(group, p) if b - a == size else (b - a,))
            for p, a, b, size in pieces
        ]
        arrays = (
            read(p, a, b).reshape(spec.shape)
            for (p, a, b, _), spec in zip(pieces, specs, strict=True)
        )
        index = {p.name: [a, b, size] for p, a, b, size in pieces}
        if len(index) < len(pieces):
            raise ValueError(f"CheckpointWriter.write: {group}: a parameter is given twice")
        name = f"{group}.shard_{self.rank:03d}_of_{self.world:03d}.safetensors"
        metadata = {"format": "pt", "group": group, "ranges": json.dumps(index)}
        with replacing(self.temporary / name) as file:
            written = write_safetensors(file, specs, arrays, metadata)
        return FileEntry(name, group, self.rank, *written)

    def commit(self, manifest: Manifest, entries: Iterable[FileEntry]) -> Path:
        """Rename the checkpoint to its final name, replacing one of the same step; return the path.

        entries: the results of `write` from all ranks. Only rank 0 calls this method. Errors: see
        `write`.
        """
        try:
            entries = [*entries, *self._write_tokenizer(manifest.tokenizer)]
            document = self._document(manifest, sorted(entries))
            names = {entry["name"] for entry in document["files"]}
            with disk_errors(self.temporary):
                for path in self.temporary.iterdir():
                    if path.name not in names:  # left by a killed run, maybe with more ranks
                        path.unlink()
            write_file(self.temporary / MANIFEST, json.dumps(document, indent=2) + "\n")
            with disk_errors(self.path):
                publish_directory(self.temporary, self.path)
        except BaseException:
            self.discard()
            raise
        return self.path

    def _write_tokenizer(self, tokenizer: str | None) -> list[FileEntry]:
        """Write the tokenizer's files, so that an export needs no other folder. Skip files that
        cannot be read: the checkpoint must not fail because of them."""
        if tokenizer in (None, "bytes"):
            return []
        files = {}
        for path in (Path(tokenizer) / name for name in tokenizer_names(Path(tokenizer))):
            with suppress(OSError, ConfigError), open_file(path) as file:
                if not leaves_folder(path):
                    name = path.relative_to(tokenizer).as_posix()
                    files[name] = np.frombuffer(file.readall(), np.uint8)
        if not files:
            return []
        specs, arrays = [TensorSpec(n, U8, a.shape) for n, a in files.items()], [*files.values()]
        name = f"{TOKENIZER}.shard_000_of_001.safetensors"
        with replacing(self.temporary / name) as file:
            written = write_safetensors(file, specs, arrays, {"group": TOKENIZER})
        return [FileEntry(name, TOKENIZER, 0, *written)]

    def _document(self, manifest: Manifest, entries: list[FileEntry]) -> dict[str, Any]:
        needed = required_groups(rule_class(optim_saved(manifest.options).optimizer))
        for group in ({e.group for e in entries} | set(needed)) - {TOKENIZER}:
            if [e.rank for e in entries if e.group == group] != list(range(self.world)):
                raise ValueError(f"CheckpointWriter: not every rank has written {group}")
        document = {
            "version": VERSION,
            "distributed": {"world": self.world},
            "run": {"step": self.step, "state": manifest.state, **manifest.run.record()},
            "data-loader": manifest.loader,
            "model": manifest.model.to_hf() | {"new_tokens": manifest.model.new_tokens},
            "options": manifest.options,
            "tokenizer": manifest.tokenizer,
            "tokenizer-id": manifest.tokenizer_id,
            **({} if manifest.base is None else {"base": manifest.base}),
            **({} if manifest.source is None else {"source": manifest.source}),
            "files": [e._asdict() for e in entries],
        }
        return document | {"sha256": digest_of(document)}

    def discard(self) -> None:
        """Remove the unfinished checkpoint with the files of all ranks."""
        discard(self.path.parent, self.step)


class _FileRange(NamedTuple):
    start: int
    stop: int
    size: int
    file: SafetensorsFile


def _model_of(saved: dict[str, Any]) -> ModelConfig:
    model, new = ModelConfig.from_hf(saved), saved.get("new_tokens")
    if new is None:
        return model
    match new:
        case [int(first), int(stop)] if 0 <= first < stop <= model.vocab_size:
            return replace(model, new_tokens=(first, stop))
    raise LlmqError(f"its new_tokens are no ids of the model: {reprlib.repr(new)}")


class CheckpointReader(Closing):
    """A checkpoint whose checksums have been verified. All ranks of a process share one reader.

    path, step, manifest: the checkpoint's directory, step and manifest. world_size: number of ranks
    that wrote the checkpoint. optim: options of the update rule that made the stored moments. rule:
    this rule's class.
    """

    def __init__(self, path: Path, world: World = World()) -> None:
        """Check size and checksum of every file; LlmqError names the damaged file. world: the
        processes that share the work; all call this constructor, and each checks a part of the
        files."""
        problem = problem_of(path, world)
        if problem is not None:
            raise LlmqError(problem)
        self.path = path
        document = read_manifest(path / MANIFEST)
        self.step: int = document["run"]["step"]
        self.world_size: int = document["distributed"]["world"]
        self.manifest = Manifest(
            model=_model_of(document["model"]),
            loader=document["data-loader"],
            state=document["run"]["state"],
            options=document["options"],
            tokenizer=document.get("tokenizer"),
            run=RunId.of(document["run"]),
            tokenizer_id=document.get("tokenizer-id"),
            base=document.get("base"),
            source=document.get("source"),
        )
        self.optim = optim_saved(self.manifest.options)
        self.rule = rule_class(self.optim.optimizer)
        self._needed = required_groups(self.rule)
        self._files: list[SafetensorsFile] = []
        self._tokenizer: SafetensorsFile | None = None
        self._pieces: dict[str, dict[str, list[_FileRange]]] = {}
        self._dtypes: dict[str, np.dtype] = {}
        for entry in (FileEntry(**entry) for entry in document["files"]):
            file = SafetensorsFile(path / entry.name)
            self._files.append(file)
            if entry.group == TOKENIZER:
                self._tokenizer = file
                continue
            group = self._pieces.setdefault(entry.group, {})
            for name, (start, stop, size) in _ranges_of(file).items():
                group.setdefault(name, []).append(_FileRange(start, stop, size, file))
            for tensor in file.tensors.values():
                self._dtypes[entry.group] = NUMPY_DTYPES[tensor.dtype]
        for group in self._pieces.values():
            for pieces in group.values():
                pieces.sort(key=lambda piece: piece.start)

    @property
    def groups(self) -> set[str]:
        return set(self._pieces)

    def still(self, table: Sequence[Slab]) -> set[str]:
        """Return the names of the blocks without moments, because the checkpoint's last step did
        not train them."""
        return still_blocks(self.optim, table, max(self.step - 1, 0))

    def check(self, table: tuple[Slab, ...], trained: Collection[str] | None = None) -> None:
        """LlmqError unless every group holds exactly this model's parameters, each in full.

        table: the model's weight table. trained: names of the slabs with moments; a checkpoint of
        adapters stores only these slabs. None: all slabs.
        """
        if trained is None and self.manifest.base is not None:
            raise LlmqError(
                f"checkpoint '{self.path}' holds adapters of '{self.manifest.base['name']}' only: "
                "`llmq export` it, and give what it writes as --adapter"
            )
        still = self.still(table)
        if still:
            trained = {slab.name for slab in table} - still
        lacks = set(self._needed) - self.groups
        if lacks:
            raise LlmqError(f"checkpoint '{self.path}' is incomplete: it has no {min(lacks)}")
        for group in (*self._needed, *sorted(self.groups.difference(self._needed))):
            whole = group == "weights" and self.manifest.base is None
            every = whole or trained is None
            slabs = [slab for slab in table if every or slab.name in trained]
            for state in self.rule.matrix_states:
                if group in (state.group, state.scales_group):
                    matrices = (slab for slab in slabs if self.rule.by_matrix(slab))
                    slabs = [state.slab(self.optim, slab) for slab in matrices]
            params = [p for slab in slabs if _keeps(self.rule, group, slab) for p in slab.params]
            for param in params:
                self._cover(group, param, 0, padded_size(group, param))
            unknown = self._pieces[group].keys() - {param.name for param in params}
            if unknown:
                raise LlmqError(
                    f"checkpoint '{self.path}' is of another model: its {group} holds "
                    f"{min(unknown)}, which this model does not have"
                )

    def read(self, group: str, param: Param, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return values [start, stop) of a parameter, padding included: (stop - start,) in the
        stored dtype.

        LlmqError if values are missing, or if the stored parameter has another shape.
        """
        stop = padded_size(group, param) if stop is None else stop
        cover = self._cover(group, param, start, stop)
        out = np.zeros(stop - start, self.dtype(group))
        for piece, first, last in cover:
            values = piece.file.read(param.name, first - piece.start, last - piece.start)
            out[first - start : last - start] = values
        return out

    def model(self, param: Param) -> np.ndarray:
        """Return a whole parameter in its shape, in the dtype of the weights: the average of the
        weights if the run had --ema, else the weights. LlmqError as in `read`."""
        values = self.read("weights", param)
        if param.name in self._pieces.get(AVERAGE.group, {}):
            values = self.read(AVERAGE.group, param).astype(values.dtype)
        return values.reshape(param.shape)

    def dtype(self, group: str) -> np.dtype:
        """NumPy dtype of a group's values."""
        return self._dtypes[group]

    def _cover(
        self, group: str, param: Param, start: int, stop: int
    ) -> list[tuple[_FileRange, int, int]]:
        """Return the stored pieces that cover values [start, stop), padding excluded. Each item: a
        piece, the first value to take from it, and the value after the last one to take."""
        size = stored_values(group, param)
        cover, position, stop = [], start, min(stop, size)
        if group in self._needed and param.name not in self._pieces.get(group, {}):
            raise LlmqError(
                f"checkpoint '{self.path}' is of another model: its {group} has no {param.name}, "
                "which this model has"
            )
        for piece in self._pieces.get(group, {}).get(param.name, []):
            if piece.size != size:
                raise LlmqError(
                    f"checkpoint '{self.path}' is of another model: {param.name} has {piece.size} "
                    f"elements, this model's {size}"
                )
            if piece.start <= position < min(piece.stop, stop):
                cover.append((piece, position, min(piece.stop, stop)))
                position = min(piece.stop, stop)
        if position < stop:
            raise LlmqError(
                f"checkpoint '{self.path}' is incomplete: {group} lacks {param.name} from element "
                f"{position} on"
            )
        return cover

    def restore_tokenizer(self, folder: Path) -> bool:
        """Write the tokenizer's files into an empty folder; return False if the checkpoint has no
        tokenizer. LlmqError for a file name that no tokenizer has, or if the disk is full."""
        if self._tokenizer is None:
            return False
        for name in self._tokenizer.tensors:
            if not is_tokenizer_file(name):
                raise LlmqError(f"'{self._tokenizer.path}' holds {name!r}, no tokenizer's file")
            with disk_errors(folder / name):
                (folder / name).parent.mkdir(exist_ok=True)
                (folder / name).write_bytes(self._tokenizer.read(name).tobytes())
        return True

    def close(self) -> None:
        for file in self._files:
            file.close()


def _ranges_of(file: SafetensorsFile) -> dict[str, list[int]]:
    """Return [start, stop, size] for each parameter in a file: the range of values in the file, and
    the number of values of the whole parameter. LlmqError if the file's metadata is malformed."""
    try:
        ranges = json.loads(file.metadata["ranges"])
        for start, stop, size in ranges.values():
            if not 0 <= start <= stop <= size:
                raise ValueError(f"{start} to {stop} of {size}")
        if ranges.keys() != file.tensors.keys():
            raise ValueError("other names than those of the tensors")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise LlmqError(
            f"'{file.path}' does not say what it holds ({error}); use another checkpoint"
        ) from error
    return ranges


Part = tuple[int, np.ndarray]
"""Index of a parameter's first value, and consecutive values from this index on."""

Beat = Callable[[], None]
"""Function without arguments, called for each range: tells a watchdog that a long save or load
progresses."""


def _values(group: str, piece: SlabPiece, param: Param, start: int, stop: int) -> Tensor:
    """Return a view of a parameter's values [start, stop) in the piece's tensor."""
    first = (param.offset - piece.start) // elements_per_value(group) + start
    return piece.tensor.rows(first, first + stop - start)


def write_group(
    fetch: Callable[[Tensor], np.ndarray],
    writer: CheckpointWriter,
    group: str,
    pieces: Sequence[SlabPiece],
    beat: Beat,
) -> FileEntry:
    """Write this rank's pieces of a group into one file, in the widest dtype of the pieces, because
    untrained weights may have another dtype than master weights. fetch: function that returns a
    host copy of a tensor."""
    dtype = max((piece.tensor.dtype for piece in pieces), key=lambda dtype: dtype.itemsize)
    ranges, homes = [], {}
    for piece in pieces:
        for param, start, stop in slab_ranges(group, piece.slab, *piece.written):
            ranges.append((param, start, stop))
            homes[param.name] = piece

    def read(param: Param, start: int, stop: int) -> np.ndarray:
        beat()
        values = fetch(_values(group, homes[param.name], param, start, stop))
        return values.astype(dtype.numpy, copy=False)

    return writer.write(group, dtype, ranges, read)


def read_group(
    dev: Device, reader: CheckpointReader, group: str, pieces: Sequence[SlabPiece], beat: Beat
) -> None:
    """Fill this rank's pieces of a group from a checkpoint of any number of ranks.

    Values are converted to the dtype of each piece. Padding and gaps between parameters become
    zero.
    """
    for piece in pieces:
        dev.zero(piece.tensor)
        for param, start, stop in slab_ranges(group, piece.slab, piece.start, piece.stop):
            beat()
            target = _values(group, piece, param, start, stop)
            values = reader.read(group, param, start, stop)
            dev.upload(target, values.astype(target.dtype.numpy, copy=False))


def check_fixed(reader: CheckpointReader, rule: UpdateRule) -> None:
    """ConfigError if the checkpoint's run had another value of an option that decides which moments
    a model has: such moments cannot be converted."""
    names = ("layers_per_step", *(rule.fixed if reader.rule is type(rule) else ()))
    if reader.optim.layers_per_step:
        names = (*names, "layers_period", "seed")
    for name in names:
        saved, now = getattr(reader.optim, name), getattr(rule.options, name)
        if saved != now:
            option = OPTIONS[name].flag
            which = f"of {option} {saved}" if saved else f"without {option}"
            raise ConfigError(
                f"{option}: checkpoint '{reader.path}' has moments {which}, which cannot be "
                "converted: go on so, or `llmq export` it and begin a run with its weights"
            )


def check_formats(reader: CheckpointReader, state: State, rule: type[UpdateRule]) -> None:
    """ConfigError if moments of this rule are 8-bit in the checkpoint but not in `state`, or in
    `state` but not in the checkpoint: such moments cannot be converted."""
    for moment in (*rule.moments, *rule.matrix_states) if reader.rule is rule else ():
        if (moment.scales_group in reader.groups) != (moment.scales_group in state):
            numpy, option = reader.dtype(moment.group), OPTIONS[moment.dtype].flag
            saved = next(name for name, d in OPTION_DTYPES.items() if d.numpy == numpy)
            raise ConfigError(
                f"{option}: checkpoint '{reader.path}' has these moments in {saved}, "
                f"which cannot be converted; use {option} {saved}"
            )


def parts_of(dev: Device, param: Param, pieces: Sequence[SlabPiece]) -> list[Part]:
    """Return host copies of those ranges of a weight that this rank writes into checkpoints."""
    return [
        (start, dev.download(_values("weights", piece, param, start, stop)))
        for piece in pieces
        for stored, start, stop in slab_ranges("weights", piece.slab, *piece.written)
        if stored.name == param.name
    ]


def assemble(param: Param, parts: Sequence[Part]) -> np.ndarray:
    """Join the parts of all ranks into the whole parameter, in its shape."""
    if len(parts) == 1 and parts[0][1].size == param.size:
        return parts[0][1].reshape(param.shape)
    whole = np.empty(padded_size("weights", param), parts[0][1].dtype)
    for start, values in parts:
        whole[start : start + values.size] = values
    return whole.reshape(param.shape)
