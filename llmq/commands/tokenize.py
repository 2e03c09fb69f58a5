"""`llmq tokenize`: texts and conversations to token files."""

from pathlib import Path
from typing import Annotated

import typer

from llmq.base.errors import ConfigError
from llmq.base.signals import ending_children
from llmq.commands.common import Dataset, Field, Inputs, Split, Template, size_of

Tokenizer = Annotated[
    str | None,
    typer.Option(help="bytes, a folder with tokenizer.json, or a repository in the cache."),
]
SpecialTokens = Annotated[
    str, typer.Option(help="auto: those that transformers adds to a text (BOS, EOS); none.")
]
Format = Annotated[
    str,
    typer.Option(
        help="Records: text, or conversations: messages, conversations, prompt, instruction, "
        "pairs, labels, classes; auto: by their fields, but for labels and classes."
    ),
]
EvalFraction = Annotated[
    float, typer.Option(min=0.0, max=1.0, help="Part of the documents kept for validation.")
]
Weights = Annotated[
    bool, typer.Option("--weights", help="Messages may have a weight between 0 and 1.")
]
TrainOn = Annotated[
    str, typer.Option(help="Of conversations: assistant, last, each (of its messages) or all.")
]
ChatTemplate = Annotated[
    str | None,
    typer.Option(
        help="File, or a name: of one of the tokenizer's, or of a format such as qwen3 "
        "(docs/data.md has the list), or none; the tokenizer's own if not given."
    ),
]
AddTokens = Annotated[
    str | None,
    typer.Option(metavar="A,B", help="Special tokens that the tokenizer gets, of a template's."),
]
Download = Annotated[
    bool, typer.Option("--download", help="Fetch the tokenizer from the Hugging Face hub.")
]
MaxRecord = Annotated[
    str, typer.Option(metavar="SIZE", help="Refuse a record of more bytes, such as 64MiB.")
]
RecordSeconds = Annotated[
    float, typer.Option(min=0.1, help="Processor time for a record, and 1 s more for each 100 kB.")
]
SeqLen = Annotated[int | None, typer.Option(min=1, help="Count the documents that are longer.")]


def tokenize(
    out: Annotated[Path, typer.Option(help="Directory of the token files.")],
    inputs: Inputs = None,
    tokenizer: Tokenizer = None,
    dataset: Dataset = None,
    split: Split = None,
    field: Field = None,
    template: Template = None,
    eval_fraction: EvalFraction = 0.01,
    shard_tokens: Annotated[int, typer.Option(min=1, help="Tokens per file.")] = 100_000_000,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; all cores.")] = None,
    special_tokens: SpecialTokens = "auto",
    format: Format = "auto",
    train_on: TrainOn = "assistant",
    chat_template: ChatTemplate = None,
    seq_len: SeqLen = None,
    weights: Weights = False,
    max_record: MaxRecord = "64MiB",
    record_seconds: RecordSeconds = 10.0,
    add_tokens: AddTokens = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace token files.")] = False,
    download: Download = False,
) -> None:
    """Turn texts and conversations into token files."""
    from llmq.checkpoint.hub import find_tokenizer
    from llmq.data.inputs import dataset_of
    from llmq.data.record_format import one_field
    from llmq.data.tokenize import tokenize
    from llmq.data.tokenizer_files import grown_tokenizer, parse_tokens

    if tokenizer is None:
        raise ConfigError(
            "--tokenizer: is missing: give the directory of the model that you will train, its "
            "repository on the hub with --download, such as Qwen/Qwen2.5-0.5B, or bytes for a "
            "small model of your own"
        )
    tokens, found = parse_tokens(add_tokens), find_tokenizer(tokenizer, download)
    with ending_children(), grown_tokenizer(found, tokens) as grown:
        summary = tokenize(
            inputs or [],
            tokenizer=grown,
            out=out,
            dataset=dataset_of(dataset, split),
            field=one_field(field, template),
            template=template,
            eval_fraction=eval_fraction,
            shard_tokens=shard_tokens,
            workers=workers,
            overwrite=overwrite,
            special_tokens=special_tokens,
            format=format,
            train_on=train_on,
            chat_template=chat_template,
            seq_len=seq_len,
            weights=weights,
            max_record=size_of("--max-record", max_record),
            record_seconds=record_seconds,
        )
    print(summary.describe())
