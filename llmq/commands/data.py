"""Commands about data: `llmq tokenize`, `train-tokenizer`, `data`, `show`, `check`."""

from pathlib import Path

from llmq.base.errors import ConfigError
from llmq.base.signals import ending_children
from llmq.commands.common import argument, option, size_of

Inputs = argument(
    list[str] | None, "Text, JSON lines, JSON, CSV, TSV or Parquet; globs; -: standard input."
)
Dataset = option(str | None, "Data set of the hub, streamed; no inputs.", metavar="NAME[:CONFIG]")
Split = option(str | None, "Of --dataset; train if not given.")
Field = option(list[str] | None, "Field that holds the text; text if not given.")
Template = option(str | None, "Text of several fields: '{title}\\n{text}'.", metavar="TEXT")
Format = option(
    str,
    "Records: text, or conversations: messages, conversations, prompt, instruction, "
    "pairs, labels, classes; auto: by their fields, but for labels and classes.",
)
ChatTemplate = option(
    str | None,
    "File, or a name: of one of the tokenizer's, or of a format such as qwen3 (docs/data.md has "
    "the list), or none; the tokenizer's own if not given.",
)


def tokenize(
    out: option(Path, "Directory of the token files."),
    inputs: Inputs = None,
    tokenizer: option(
        str | None, "bytes, a folder with tokenizer.json, or a repository in the cache."
    ) = None,
    dataset: Dataset = None,
    split: Split = None,
    field: Field = None,
    template: Template = None,
    eval_fraction: option(
        float, "Part of the documents kept for validation.", min=0.0, max=1.0
    ) = 0.01,
    shard_tokens: option(int, "Tokens per file.", min=1) = 100_000_000,
    workers: option(int | None, "Processes; all cores.", min=1) = None,
    special_tokens: option(
        str, "auto: those that transformers adds to a text (BOS, EOS); none."
    ) = "auto",
    format: Format = "auto",
    train_on: option(
        str, "Of conversations: assistant, last, each (of its messages) or all."
    ) = "assistant",
    chat_template: ChatTemplate = None,
    seq_len: option(int | None, "Count the documents that are longer.", min=1) = None,
    weights: option(bool, "Messages may have a weight between 0 and 1.", "--weights") = False,
    max_record: option(
        str, "Refuse a record of more bytes, such as 64MiB.", metavar="SIZE"
    ) = "64MiB",
    record_seconds: option(
        float, "Processor time for a record, and 1 s more for each 100 kB.", min=0.1
    ) = 10.0,
    add_tokens: option(
        str | None, "Special tokens that the tokenizer gets, of a template's.", metavar="A,B"
    ) = None,
    overwrite: option(bool, "Replace token files.", "--overwrite") = False,
    download: option(bool, "Fetch the tokenizer from the Hugging Face hub.", "--download") = False,
) -> None:
    """Turn texts and conversations into token files.

    llmq tokenize talks.jsonl --tokenizer Qwen/Qwen2.5-0.5B --out data/talks
    """
    how = locals()
    from llmq.checkpoint.hub import find_tokenizer
    from llmq.text.inputs import dataset_of
    from llmq.text.record_format import one_field
    from llmq.text.tokenize import tokenize
    from llmq.text.tokenizer_files import grown_tokenizer, parse_tokens

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
    vocab_size: option(int, "Tokens, special ones included."),
    out: option(Path, "Directory of the tokenizer."),
    inputs: Inputs = None,
    dataset: Dataset = None,
    split: Split = None,
    field: Field = None,
    template: Template = None,
    special_token: option(
        list[str] | None, "Special token beside <|endoftext|>; may be given several times."
    ) = None,
    chat_template: option(
        str | None, "Chat template: ChatML, or a file of Jinja.", metavar="chatml|FILE"
    ) = None,
    overwrite: option(bool, "Replace a tokenizer.", "--overwrite") = False,
) -> None:
    """Train a tokenizer, a byte-level BPE, on text.

    llmq train-tokenizer texts/ --vocab-size 8192 --out data/tokenizer
    """
    how = locals()
    from llmq.text.inputs import dataset_of
    from llmq.text.record_format import one_field
    from llmq.text.train_tokenizer import train_tokenizer

    how |= {"inputs": inputs or [], "dataset": dataset_of(dataset, how.pop("split"))}
    how |= {"field": one_field(field, template), "special_tokens": how.pop("special_token") or []}
    print(train_tokenizer(**how).describe())


DEFAULT_TOKENIZER = "Qwen/Qwen2.5-0.5B"  # the tokenizer of llm.q's data
EVAL_FRACTION = 0.05


def data(
    name: argument(str, "tiny-shakespeare, alpaca or hellaswag."),
    tokenizer: option(
        str, "As that of `llmq tokenize`; fetched if it is of the hub."
    ) = DEFAULT_TOKENIZER,
    out: option(
        Path | None, "Directory of the token files; data/NAME-TOKENIZER if not given."
    ) = None,
) -> None:
    """Fetch small public data: token files to train on, or questions to evaluate on.

    llmq data tiny-shakespeare
    """
    from llmq.checkpoint import hub
    from llmq.data.public_sets import FOLDER, fetch, public_set
    from llmq.text.tokenize import tokenize

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
    files: argument(
        list[str], "Token files, patterns, folders of tokenize; or a run of rl, for its samples."
    ),
    document: option(int | None, "First document to print, from 1.", min=1) = None,
    limit: option(int | None, "Documents to print: 3, or 1 with --document.", min=0) = None,
    ids: option(bool, "A line for each token, with its id.", "--ids") = False,
    seq_len: option(int | None, "Show where documents are cut, and count them.", min=1) = None,
    tokenizer: option(str | None, "bytes, or a folder; that beside the files.") = None,
    document_separator: option(
        int | None, "Id that ends a document, where no .docs file does.", min=0
    ) = None,
    step: option(int | None, "Step whose samples are printed; the newest.", min=0) = None,
) -> None:
    """Print documents of token files, with their trained tokens marked, and counts; or the best and
    the worst samples of a step of `llmq rl`.

    llmq show data/talks --seq-len 1024
    """
    how = locals()
    from llmq.run.run_paths import find_samples

    samples = find_samples(files[0]) if len(files) == 1 else None
    if samples is not None:
        from llmq.run.show_samples import run_show_samples

        run_show_samples(samples, step, limit)
        return
    if how.pop("step") is not None:
        raise ConfigError(f"--step: '{files[0]}' is no run of `llmq rl`")
    from llmq.text.show import run_show

    run_show(how.pop("files"), **how)


def check(
    files: argument(list[str], "Token files, checkpoints, models, folders or patterns."),
    trained: option(
        bool, "Say which trained tensors of checkpoints have not moved instead.", "--trained"
    ) = False,
) -> None:
    """Compare files with their checksums, and name damaged files; exit status 0 if there are none.

    llmq check data/talks output/talks ckpt/talks
    """
    from llmq.checkpoint.check import run_check

    run_check(files, trained=trained)
