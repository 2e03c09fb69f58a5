"""What `llmq plan` says of the training data, where documents or weights decide about an epoch."""

from __future__ import annotations

from typing import Any

from llmq.base.errors import DataError
from llmq.config.model import ModelConfig
from llmq.config.options import TrainConfig
from llmq.data.dataset import DataSet, Layout
from llmq.data.split import Split


def data_record(config: TrainConfig, model: ModelConfig, world_size: int) -> dict[str, Any] | None:
    """Of an epoch, for programs. None where files are read as they are: then it is not opened.

    problem: why nothing is known, such as files that are not there yet.
    """
    layout = Layout.of(config)
    if not layout.needs_documents and layout.weights is None:
        return None
    try:
        data = DataSet(
            config.train_patterns,
            seq_len=config.seq_len,
            vocab_size=model.vocab_size,
            split=Split(config.eval_fraction, held_out=False) if config.splits else None,
            layout=layout,
            everything=False,
        )
    except DataError as error:
        return {"problem": str(error)}
    batches = sum(count // world_size for count in data.plan.counts) // config.batch_size
    return {
        **data.record(),
        "tokens_per_epoch": data.plan.tokens(),
        "sequences": data.sequences,
        "padding": data.padding,
        "steps_per_epoch": batches // config.grad_accumulation,
        "lines": data.lines("train"),
    }


def data_report(record: dict[str, Any]) -> list[str]:
    """The same for people."""
    if "problem" in record:
        return ["[Data]", f"  not known: {record['problem']}"]
    return [
        "[Data]",
        *(f"  {line}" for line in record["lines"]),
        f"  Tokens per epoch: {record['tokens_per_epoch']:,}, {100 * record['padding']:.2f} % "
        "padding beside them",
        f"  Steps per epoch:  {record['steps_per_epoch']:,}",
    ]
