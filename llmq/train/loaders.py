"""The batches of a run: which files, and which part of them, each rank reads."""

from __future__ import annotations

from llmq.config.options import TrainConfig
from llmq.data.dataset import Layout
from llmq.data.loader import DataLoader
from llmq.data.split import Split


def open_loaders(
    config: TrainConfig, vocab_size: int, world_size: int, *, held_out: bool
) -> list[DataLoader]:
    """A loader for each rank, whose files are checked. held_out: for validation, else training.

    Validation reads every sequence once, whatever the weights of its files are in training.
    """
    own_files = held_out and not config.splits
    first = DataLoader(
        config.eval_file if own_files else config.train_patterns,
        seq_len=config.seq_len,
        micro_batch=config.batch_size,
        seed=config.eval_seed if held_out else config.train_seed,
        vocab_size=vocab_size,
        world_size=world_size,
        everything=held_out,
        split=Split(config.eval_fraction, held_out) if config.splits else None,
        layout=Layout.of(config, held_out=held_out),
    )
    return [first, *(first.of_rank(rank) for rank in range(1, world_size))]
