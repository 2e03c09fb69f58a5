"""The batches of a run: which files, and which part of them, each rank reads."""

from __future__ import annotations

from llmq.config.options import TrainConfig
from llmq.data.loader import DataLoader
from llmq.data.split import Split


def open_loaders(
    config: TrainConfig, vocab_size: int, world_size: int, *, held_out: bool
) -> list[DataLoader]:
    """A loader for each rank, whose files are checked. held_out: for validation, else training."""
    own_files = held_out and not config.splits
    return [
        DataLoader(
            config.eval_file if own_files else config.train_file,
            seq_len=config.seq_len,
            micro_batch=config.batch_size,
            seed=config.eval_seed if held_out else config.train_seed,
            vocab_size=vocab_size,
            rank=rank,
            world_size=world_size,
            everything=held_out,
            split=Split(config.eval_fraction, held_out) if config.splits else None,
        )
        for rank in range(world_size)
    ]
