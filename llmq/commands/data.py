"""`llmq data`: small public data, fetched and tokenized."""

from pathlib import Path
from typing import Annotated

import typer

from llmq.base.signals import ending_children

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
