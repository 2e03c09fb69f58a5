"""The batches of a run: which files, and which part of them, each rank reads."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from llmq.arch.model_config import ModelConfig
from llmq.base.batch import Batch
from llmq.data.dataset import SequenceLayout
from llmq.data.epoch_plan import Split
from llmq.data.loader import DataLoader
from llmq.model.results import Result
from llmq.options.options import TrainConfig
from llmq.run.ranks import Ranks
from llmq.run.rounds import Rounds
from llmq.runtime.mesh import DATA
from llmq.runtime.world import World
from llmq.state.placement import mesh_of


def open_loaders(
    config: TrainConfig,
    model: ModelConfig,
    world: World,
    *,
    held_out: bool,
    pattern: str | None = None,
) -> list[DataLoader]:
    """A loader for each rank of this process; their files are checked. held_out: for validation,
    else training.

    Validation reads every sequence once, whatever the weights of its files are in training.
    pattern: files of a named validation.
    """
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
        layout=SequenceLayout.of(config, held_out=held_out),
        drop_last=config.drop_last and not held_out,
        scores=config.scores_folder,
        top_k=config.kd_top_k if config.loss == "kd" else 0,
        weights=config.token_weights,
        labels=model.num_labels,
        pad=model.pad_token_id,
    )
    return [first, *(first.of_rank(place) for place in places[1:])]


def mean_loss(
    ranks: Ranks,
    loaders: Sequence[DataLoader],
    max_batches: int | None,
    stopped: Callable[[], bool] | None,
    seconds: float = math.inf,
) -> Result | None:
    """The loss on the loaders' files from their start. Arguments and result: Trainer.validate."""
    count = loaders[0].batches_per_epoch
    count = count if max_batches is None else min(count, max_batches)
    rounds = Rounds(ranks.world, count, stopped or (lambda: False), seconds)

    def taken(rank: int, loader: DataLoader) -> Iterator[Batch]:
        loader.reset()
        return (loader.next_batch() for _ in rounds.of(rank))

    result = ranks.evaluate(list(map(taken, ranks.world.local, loaders)))
    return None if rounds.cut else result


def move_loaders(loaders: Sequence[DataLoader], state: dict[str, Any]) -> None:
    """Go to where training data was; {}: to its start. DataError as DataLoader.set_state."""
    for loader in loaders:
        if state:
            loader.set_state(state)
        else:
            loader.reset()
