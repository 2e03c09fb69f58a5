"""`llmq train-tokenizer`: a tokenizer of one's own text."""

from pathlib import Path
from typing import Annotated

import typer

from llmq.commands.common import Dataset, Field, Inputs, Split, Template


def train_tokenizer(
    vocab_size: Annotated[int, typer.Option(help="Tokens, special ones included.")],
    out: Annotated[Path, typer.Option(help="Directory of the tokenizer.")],
    inputs: Inputs = None,
    dataset: Dataset = None,
    split: Split = None,
    field: Field = None,
    template: Template = None,
    special_token: Annotated[
        list[str] | None,
        typer.Option(help="Special token beside <|endoftext|>; may be given several times."),
    ] = None,
    chat_template: Annotated[
        str | None,
        typer.Option(metavar="chatml|FILE", help="Chat template: ChatML, or a file of Jinja."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a tokenizer.")] = False,
) -> None:
    """Make a tokenizer, a byte-level BPE, of text."""
    from llmq.data.inputs import dataset_of
    from llmq.data.record_format import one_field
    from llmq.data.train_tokenizer import train_tokenizer

    trained = train_tokenizer(
        inputs or [],
        vocab_size=vocab_size,
        out=out,
        dataset=dataset_of(dataset, split),
        field=one_field(field, template),
        template=template,
        special_tokens=special_token or [],
        chat_template=chat_template,
        overwrite=overwrite,
    )
    print(trained.describe())
