"""Commands on data: `llmq tokenize`, `train-tokenizer`, `data`, `show`, `check`."""

from pathlib import Path
from typing import Annotated

import typer

from llmq.base.errors import ConfigError
from llmq.base.signals import ending_children
from llmq.commands.common import size_of

Inputs = Annotated[
    list[str] | None,
    typer.Argument(help="Text, JSON lines, JSON, CSV, TSV or Parquet; globs; -: standard input."),
]
Dataset = Annotated[
    str | None,
    typer.Option(metavar="NAME[:CONFIG]", help="Data set of the hub, streamed; no inputs."),
]
Split = Annotated[str | None, typer.Option(help="Of --dataset; train if not given.")]
Field = Annotated[
    list[str] | None, typer.Option(help="Field that holds the text; text if not given.")
]
Template = Annotated[
    str | None, typer.Option(metavar="TEXT", help="Text of several fields: '{title}\\n{text}'.")
]
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
    how = locals()
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
    del how["split"], how["add_tokens"], how["download"]
    how |= {"inputs": inputs or [], "dataset": dataset_of(dataset, split)}
    how |= {"field": one_field(field, template), "max_record": size_of("--max-record", max_record)}
    with ending_children(), grown_tokenizer(found, tokens) as grown:
        print(tokenize(**how | {"tokenizer": grown}).describe())


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
    how = locals()
    from llmq.data.inputs import dataset_of
    from llmq.data.record_format import one_field
    from llmq.data.train_tokenizer import train_tokenizer

    how |= {"inputs": inputs or [], "dataset": dataset_of(dataset, how.pop("split"))}
    how |= {"field": one_field(field, template), "special_tokens": how.pop("special_token") or []}
    print(train_tokenizer(**how).describe())


DEFAULT_TOKENIZER = "Qwen/Qwen2.5-0.5B"  # which llm.q's data have
EVAL_FRACTION = 0.05


def data(
    name: Annotated[str, typer.Argument(help="tiny-shakespeare, alpaca or hellaswag.")],
    tokenizer: Annotated[
        str, typer.Option(help="As that of `llmq tokenize`; fetched if it is of the hub.")
    ] = DEFAULT_TOKENIZER,
    out: Annotated[
        Path | None,
        typer.Option(help="Directory of the token files; data/NAME-TOKENIZER if not given."),
    ] = None,
) -> None:
    """Fetch small public data: token files to train on, or questions to evaluate on."""
    from llmq.checkpoint import hub
    from llmq.data.public_sets import FOLDER, fetch, public_set
    from llmq.data.tokenize import tokenize

    wanted = public_set(name)
    file = fetch(name)
    if wanted.task:
        print(f"{wanted.about}: {file}\nllmq eval MODEL --task {file}")
        return
    missing = hub.is_hub_id(tokenizer) and hub.lacking(tokenizer, [hub.TOKENIZER])
    found = hub.find_tokenizer(tokenizer, bool(missing) and tokenizer != hub.BYTES)
    short = "qwen" if tokenizer == DEFAULT_TOKENIZER else Path(tokenizer).name
    where = out or FOLDER / f"{name}-{short}"
    with ending_children():
        made = tokenize([str(file)], tokenizer=found, out=where, eval_fraction=EVAL_FRACTION)
    print(made.describe())
    print(f"llmq train --train-file '{where}/train*.bin' --eval-file '{where}/eval*.bin' …")


def show(
    files: Annotated[list[str], typer.Argument(help="Token files, patterns, folders of tokenize.")],
    document: Annotated[
        int | None, typer.Option(min=1, help="First document to print, from 1.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=0, help="Documents to print: 3, or 1 with --document.")
    ] = None,
    ids: Annotated[bool, typer.Option("--ids", help="A line for each token, with its id.")] = False,
    seq_len: Annotated[
        int | None, typer.Option(min=1, help="Show where documents are cut, and count them.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="bytes, or a folder; that beside the files.")
    ] = None,
    document_separator: Annotated[
        int | None, typer.Option(min=0, help="Id that ends a document, where no .docs file does.")
    ] = None,
) -> None:
    """Print documents of token files, with what is trained of them, and counts."""
    how = locals()
    from llmq.data.show import run_show

    run_show(how.pop("files"), **how)


def check(
    files: Annotated[
        list[str], typer.Argument(help="Token files, checkpoints, models, folders or patterns.")
    ],
    trained: Annotated[
        bool,
        typer.Option(
            "--trained", help="Say which trained tensors of checkpoints have not moved instead."
        ),
    ] = False,
) -> None:
    """Compare files with their checksums, and say which are damaged: exit status 0 if none."""
    from llmq.checkpoint.check import run_check

    run_check(files, trained=trained)
