"""[Data] of `llmq plan`: the sequences of an epoch, and the share of attention that document masks
leave."""

import functools
from bisect import bisect_right
from itertools import accumulate
from typing import Any

import numpy as np

from llmq.arch.model_config import ModelConfig
from llmq.base.errors import DataError
from llmq.data.dataset import DataSet, SequenceLayout
from llmq.data.epoch_plan import Split
from llmq.data.reader import documents_of
from llmq.options.options import TrainConfig

SAMPLE = 256  # sequences whose documents are read


def data_record(config: TrainConfig, model: ModelConfig, world_size: int) -> dict[str, Any] | None:
    """Return facts about an epoch, for programs; None if no packing, document mask or weights make
    it necessary to open the files. problem: the reason why nothing is known, such as missing files.
    visible_share: share of the causal query-key pairs that document masks leave; None without
    masks."""
    layout = SequenceLayout.of(config, config, config.pairs)
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
    up = 0 if config.drop_last else 1  # 1: incomplete groups, batches and steps count
    readers = world_size // config.context_parallel
    groups = sum((count + up * (readers - 1)) // readers for count in data.plan.counts)
    sizes = (config.batch_size, config.grad_accumulation)
    steps = functools.reduce(lambda n, size: (n + up * (size - 1)) // size, sizes, groups)
    return {
        **data.record(),
        "tokens_per_epoch": data.plan.tokens(),
        "sequences": data.sequences,
        "padding": data.padding,
        "visible_share": _visible_share(data, config.train_seed) if layout.document_mask else None,
        "steps_per_epoch": steps,
        "lines": data.lines("train"),
    }


def _visible_share(data: DataSet, seed: int) -> float:
    """Mean share of causal query-key pairs that document masks leave, in SAMPLE sequences evenly
    spread over the first epoch."""
    of_places = [data.plan.counts[part] for part in data.plan.parts(seed, 0)]
    edges = list(accumulate(of_places, initial=0))
    chosen = np.unique(np.linspace(0, edges[-1] - 1, SAMPLE).astype(int))
    pairs = 0
    for number in chosen.tolist():
        place = bisect_right(edges, number) - 1
        spans = data.plan.spans(seed, 0, place, number - edges[place])
        starts, _ = documents_of(spans, data.seq_len)
        lengths = np.diff([*np.unique(starts), data.seq_len])
        pairs += int((lengths**2).sum())
    return pairs / (len(chosen) * data.seq_len**2)


def data_report(record: dict[str, Any]) -> list[str]:
    """Lines of [Data] for people."""
    if "problem" in record:
        return ["[Data]", f"  not known: {record['problem']}"]
    share = record["visible_share"]
    return [
        "[Data]",
        *(f"  {line}" for line in record["lines"]),
        f"  Tokens per epoch: {record['tokens_per_epoch']:,}, {100 * record['padding']:.2f} % "
        "padding beside them",
        f"  Steps per epoch:  {record['steps_per_epoch']:,}",
        *(() if share is None else (f"  Attention sees:   {100 * share:.1f} % of unmasked",)),
    ]
