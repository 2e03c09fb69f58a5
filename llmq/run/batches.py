"""Batches of a run: read from token files by rank, given by a caller and checked, or random."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from llmq.arch.model_config import ModelConfig
from llmq.base.batch import Batch
from llmq.base.errors import ConfigError
from llmq.base.result import Result
from llmq.base.step_inputs import PAIRS, Input
from llmq.data.dataset import SequenceLayout
from llmq.data.epoch_plan import Split
from llmq.data.loader import DataLoader
from llmq.data.tokens import MASKED_TARGET
from llmq.model.rings import named_inputs
from llmq.options.options import TrainConfig
from llmq.options.rules import RULES
from llmq.run.ranks import Ranks, Rounds
from llmq.runtime.mesh import DATA
from llmq.runtime.world import World
from llmq.state.placement import mesh_of

DOCUMENT_TOKENS = (100, 1000)  # tokens of the shortest and the longest document in random batches


def random_batch(rng: np.random.Generator, config: TrainConfig, model: ModelConfig) -> Batch:
    """Return a batch of random tokens, all equally likely. With --document-mask the tokens form
    documents of DOCUMENT_TOKENS; for a preference loss documents form pairs, the chosen document
    first. Other named arrays are 0."""
    shape = (config.batch_size, config.seq_len)
    inputs, targets = rng.integers(0, model.vocab_size, (2, *shape), np.int32)
    named = {each.name: each.zeros(*shape) for each in named_inputs(model, config)}
    if not config.document_mask:
        return Batch(inputs, targets, named=named or None)
    shortest, longest = DOCUMENT_TOKENS
    starts = np.zeros(shape, np.int32)
    for row in starts:
        at = np.cumsum(rng.integers(shortest, longest + 1, config.seq_len // shortest + 1))
        at = at[at < config.seq_len]
        row[at] = at
    np.maximum.accumulate(starts, axis=1, out=starts)
    targets[:, :-1][np.diff(starts, axis=1) > 0] = MASKED_TARGET
    pairs = [each.name for each in named_inputs(model, config) if each.sidecar == PAIRS]
    for name in pairs:
        for row, partner in zip(starts, named[name], strict=True):
            firsts = np.unique(row)
            for one, two in zip(firsts[::2], firsts[1::2], strict=False):
                partner[row == one], partner[row == two] = two + 1, -(one + 1)
    return Batch(inputs, targets, starts, 0, named or None)


def checked_batches(
    batches: Sequence[Batch], config: TrainConfig, model: ModelConfig, world_size: int
) -> list[Batch]:
    """Return a caller's batches as `Batch`; each batch may be a tuple of Batch's fields. Raises
    ValueError for a wrong number of batches, wrong shapes, dtypes or ids, and for missing or
    surplus starts or named arrays."""
    batches = [Batch(*batch) for batch in batches]
    shape, count = (config.batch_size, config.seq_len), config.grad_accumulation * world_size
    if len(batches) != count:
        of_ranks = f" for each of {world_size} ranks" if world_size > 1 else ""
        raise ValueError(
            f"step: grad_accumulation is {config.grad_accumulation}{of_ranks}, got "
            f"{len(batches)} batches"
        )
    for inputs, targets, starts, _, named, lengths in batches:
        _check_lengths(lengths, shape)
        _check_starts(starts, shape, config)
        _check_named(named or {}, shape, named_inputs(model, config))
        for name, array in (("inputs", inputs), ("targets", targets)):
            _check(name, array, shape, "int32")
            bad = array.view(np.uint32) >= model.vocab_size  # a negative id turns into a large one
            bad &= (name == "inputs") | (array != MASKED_TARGET)
            if bad.any():
                allowed = f"token ids in 0..{model.vocab_size - 1}, targets also {MASKED_TARGET}"
                raise ValueError(f"step: {name} must be {allowed}, got {array[bad][0]}")
    return batches


def _check(name: str, array: np.ndarray, shape: tuple[int, ...], dtype: str) -> None:
    if array.shape != shape or array.dtype != dtype:
        raise ValueError(f"step: {name} must be {dtype} {shape}, got {array.dtype} {array.shape}")


def _check_lengths(lengths: np.ndarray | None, rows: tuple[int, int]) -> None:
    if lengths is None:
        return
    _check("lengths", lengths, rows[:1], "int32")
    if (lengths < 0).any() or (lengths > rows[1]).any():
        raise ValueError(f"step: lengths must be from 0 to {rows[1]}, got {lengths.tolist()}")


def _check_named(
    named: Mapping[str, np.ndarray], rows: tuple[int, int], inputs: Sequence[Input]
) -> None:
    names = [each.name for each in inputs]
    if set(named) != set(names):
        raise ValueError(
            f"step: the loss and the model read {names} beside tokens, got {list(named)}"
        )
    for each in inputs:
        _check(each.name, named[each.name], each.batch_shape(*rows), each.dtype.numpy.name)


def _check_starts(starts: np.ndarray | None, shape: tuple[int, int], config: TrainConfig) -> None:
    if (starts is not None) != config.document_mask:
        needed = "starts are needed with" if config.document_mask else "starts need"
        raise ValueError(f"step: {needed} --document-mask")
    if starts is None:
        return
    _check("starts", starts, shape, "int32")
    rises = (np.diff(starts, axis=1) >= 0).all()
    if not rises or starts.min() < 0 or (starts > np.arange(shape[1])).any():
        raise ValueError("step: starts must not fall along a row, and be in 0..t at position t")
    if (np.take_along_axis(starts, starts, axis=1) != starts).any():
        raise ValueError("step: starts must be the first position of each one's document")


def open_loaders(
    config: TrainConfig,
    model: ModelConfig,
    world: World,
    *,
    held_out: bool,
    pattern: str | None = None,
) -> list[DataLoader]:
    """Return loaders for the ranks of this process, after opening and checking the files. held_out:
    True for a validation, which reads every sequence once; False for training. pattern: files of a
    named validation. Raises ConfigError for options that token files do not support."""
    RULES.check(config, files=True)
    inputs = named_inputs(model, config)
    for each in inputs:
        if not each.in_files:
            raise ConfigError(
                f"--train-file: token files have no '{each.name}', which --loss {config.loss} or "
                f"{model.architecture} reads: hand Trainer.step batches with it"
            )
    splits = config.splits and pattern is None
    own_files = held_out and not splits
    shape = (config, world.size, world.num_machines)
    places = [mesh_of(*shape, rank).index(*DATA) for rank in world.local]
    first = DataLoader(
        (pattern or config.eval_pattern) if own_files else config.train_patterns,
        seq_len=config.seq_len,
        micro_batch=config.batch_size,
        seed=config.eval_seed if held_out else config.train_seed,
        vocab_size=model.vocab_size,
        rank=places[0],
        world_size=mesh_of(*shape).size(*DATA),
        everything=held_out,
        split=Split(config.eval_fraction, held_out) if splits else None,
        layout=SequenceLayout.of(config, config, config.pairs, held_out=held_out),
        drop_last=config.drop_last and not held_out,
        inputs=inputs,
        scores=config.scores_folder,
        labels=model.num_labels,
        pad=model.pad_token_id,
    )
    return [first, *(first.of_rank(place) for place in places[1:])]


def mean_loss(
    ranks: Ranks,
    loaders: Sequence[DataLoader],
    max_batches: int | None,
    stopped: Callable[[], bool] | None,
) -> Result | None:
    """Return the mean loss on the loaders' files, read from the start. Arguments and result: see
    Trainer.validate."""
    count = loaders[0].batches_per_epoch
    count = count if max_batches is None else min(count, max_batches)
    rounds = Rounds(ranks.world, count, stopped or (lambda: False))

    def taken(rank: int, loader: DataLoader) -> Iterator[Batch]:
        loader.reset()
        return (loader.next_batch() for _ in rounds.of(rank))

    result = ranks.evaluate(list(map(taken, ranks.world.local, loaders)))
    return None if rounds.cut else result


def move_loaders(loaders: Sequence[DataLoader], state: dict[str, Any]) -> None:
    """Set the loaders to a saved position; {} means the start. Raises the errors of
    DataLoader.set_state."""
    for loader in loaders:
        if state:
            loader.set_state(state)
        else:
            loader.reset()
