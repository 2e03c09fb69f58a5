"""`llmq finetune`: fine-tunes a model on files of records by one command."""

from pathlib import Path
from typing import Any

from llmq.commands.common import argument, option, size_of, train_options
from llmq.commands.plan import CardName


@train_options
def finetune(
    given: dict[str, Any],
    files: argument(
        list[str], "Conversations, questions and answers, pairs or texts: JSON, CSV, Parquet, text."
    ),
    map: option(
        list[str] | None,
        "Fields of the records by what they mean: prompt=question,completion=answer.",
        metavar="FIELD=NAME",
    ) = None,
    out: option(
        Path | None, "Directory of everything it writes; finetune/NAME if not given."
    ) = None,
    method: option(
        str,
        "full: all weights, lora: adapters, qlora: adapters on a model in 4 bits; auto: adapters "
        "for models of 200 million parameters and more, in the format that fits.",
    ) = "auto",
    chat_template: option(str | None, "As that of `llmq tokenize`.") = None,
    card: CardName = None,
    gpu_memory: option(
        str | None, "Plan for a GPU of this memory; train nothing.", metavar="SIZE"
    ) = None,
    dry_run: option(bool, "Tokenize and plan; train nothing.", "--dry-run") = False,
) -> None:
    """Fine-tune a model on your records: reads them, chooses, trains, and compares.

    llmq finetune talks.jsonl
    """
    from llmq.base.errors import ConfigError
    from llmq.base.signals import ending_children
    from llmq.run.finetune import METHODS, Wish, run_finetune
    from llmq.run.finetune_data import parse_map

    if method not in METHODS:
        raise ConfigError(f"--method: expected {' or '.join(METHODS)}, got {method!r}")
    own = {name.replace("_", "-"): value for name, value in given.items()}
    wish = Wish(
        files=tuple(files),
        mapping=parse_map(map or []),
        out=out,
        method=method,
        chat_template=chat_template,
        card=card,
        gpu_memory=size_of("--gpu-memory", gpu_memory),
        dry_run=dry_run,
        given=own,
    )
    with ending_children():
        run_finetune(wish)
