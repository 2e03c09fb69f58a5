"""Commands on models: `llmq sample`, `eval`, `score`, `export`, `merge`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from llmq.base.errors import ConfigError
from llmq.commands.common import ConfigFile, Device, checks, load_run, train_options
from llmq.commands.plan import CardName

Model = Annotated[str, typer.Argument(help="Model directory or cached repository.")]
Adapter = Annotated[
    Path | None, typer.Option(help="Adapters of the model in PEFT's format, a directory.")
]
ModelDtype = Annotated[str, typer.Option(help="bf16 or fp32.", callback=checks("model_dtype"))]


def sample(
    model: Model,
    adapter: Adapter = None,
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest continuation.")] = 200,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: always the likeliest.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Only the k likeliest tokens; 0: all.")] = 0,
    top_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Only the likeliest tokens of this mass.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the choice of tokens.")] = 42,
    num_samples: Annotated[int, typer.Option(min=1, help="Number of continuations.")] = 1,
    chat: Annotated[
        bool, typer.Option("--chat", help="Answer --prompt, or each line of standard input.")
    ] = False,
    system: Annotated[str | None, typer.Option(help="System message of --chat.")] = None,
    chat_template: Annotated[
        str | None, typer.Option(help="Template of --chat, a file; the tokenizer's.")
    ] = None,
    device: Device = "auto",
    model_dtype: ModelDtype = "bf16",
) -> None:
    """Continue a text with a trained model."""
    how = locals()
    from llmq.run.sampling import run_sample

    run_sample(**how)


def evaluate(
    model: Annotated[
        str, typer.Argument(help="Model directory, cached repository, or checkpoint.")
    ],
    task: Annotated[
        list[str],
        typer.Option(
            metavar="[KIND=]FILE",
            help="Questions or texts in JSON or Parquet, or a text file; may be repeated.",
        ),
    ],
    adapter: Adapter = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Only as many records of each file.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="JSON to write.")] = None,
    seq_len: Annotated[
        int | None,
        typer.Option(min=1, help="Longest sequence; what is longer loses its beginning."),
    ] = None,
    batch_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens that a GPU computes at a time.")
    ] = 4096,
    device: Device = "auto",
    gpus: Annotated[int, typer.Option(min=0, max=64, help="GPUs to use; 0: all.")] = 0,
    model_dtype: ModelDtype = "bf16",
) -> None:
    """Measure accuracy and perplexity of a model, as lm-eval defines them."""
    how = locals()
    from llmq.run.evaluate import run_eval

    run_eval(**how)


# A model that is not trained may be kept in any format, and be streamed.
SCORED = {
    **{"only_scores": True, "recompute_block": True, "grad_accumulation": 1},
    **{"packing": "best-fit"},
    **{"eval_file": "none", "ckpt_interval": 0, "save_training_state": False},
}


@train_options
def score(
    given: dict[str, Any],
    scored: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="As --model of llmq train: whose scores are wanted."),
    ],
    data: Annotated[list[str], typer.Argument(help="Token files, patterns, folders of tokenize.")],
    out: Annotated[Path, typer.Option(help="Directory of the scores.")],
    config_file: ConfigFile = None,
    top_k: Annotated[
        int, typer.Option(min=0, max=255, help="A teacher's: so many probabilities of each token.")
    ] = 0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print memory and predicted speed, and stop.")
    ] = False,
    card: CardName = None,
) -> None:
    """Write the log-probability of each trained token of token files, for losses that read it."""
    for name, instead in (("model", "MODEL"), ("train-file", "DATA")):
        if name in given:
            raise ConfigError(f"--{name}: {instead} says it here")
    patterns = [f"{pattern}/*.bin" if Path(pattern).is_dir() else pattern for pattern in data]
    given = given | {"model": scored, "train-file": patterns}
    if top_k:
        given |= {"loss": "kd", "kd-top-k": str(top_k), "scores": str(out)}
    if card is not None and not dry_run:
        raise ConfigError("--card: is for --dry-run")
    how = {"plans": True} if dry_run else {"trains": True}
    config, model, model_dir, _ = load_run(given, config_file, defaults=SCORED, **how)
    if dry_run:
        from llmq.plan.report import run_plan

        run_plan(config, model, card=card)
        return
    from llmq.run.evaluate import run_score

    run_score(config, model, model_dir, out, top_k)


Out = Annotated[
    Path, typer.Option("--out", "--out-dir", metavar="PATH", help="Folder, or FILE.gguf.")
]
Format = Annotated[
    str,
    typer.Option(
        "--format",
        help="hf: as transformers and peft load it. gguf: a file for llama.cpp. fp8: as "
        "transformers and vLLM load it with compressed-tensors.",
    ),
]
DtypeOption = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        "--model-dtype",
        help="hf, fp8: bf16 or fp32; gguf: also fp16, q8_0, q4_0; as the source if not given.",
    ),
]
Scales = Annotated[
    str | None,
    typer.Option(help="fp8: of matrices, tensor or row; tensor after training in fp8, else row."),
]
Activations = Annotated[
    str | None,
    typer.Option(help="fp8: dynamic, or static: with the delayed scales of the training."),
]

Licence = Annotated[
    str | None,
    typer.Option(
        "--license",
        help="Of README.md, such as apache-2.0; that of the model it began as if not given.",
    ),
]
Push = Annotated[
    str | None,
    typer.Option(metavar="OWNER/NAME", help="Upload it to this repository of the hub, too."),
]


def export(
    out: Out,
    source: Annotated[
        str | None,
        typer.Argument(help="A checkpoint, a model directory or cached repository, or adapters."),
    ] = None,
    to: Format = "hf",
    dtype: DtypeOption = None,
    checkpoint_dir: Annotated[
        Path, typer.Option(help="Without SOURCE: a checkpoint, or a directory of checkpoints.")
    ] = Path("ckpt/llmq"),
    base: Annotated[
        str | None, typer.Option(help="The model of adapters, if it is not where they say.")
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Write adapters with their model, as one model.")
    ] = False,
    scales: Scales = None,
    activations: Activations = None,
    licence: Licence = None,
    push: Push = None,
    verify: Annotated[
        bool | None,
        typer.Option(help="Read it back and compare; if not given, what has up to 2 GiB."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace what is at --out, whoever wrote it.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Write weights that are infinities or NaNs, too.")
    ] = False,
) -> None:
    """Write a checkpoint, a model or adapters as transformers, peft, vLLM or llama.cpp load
    them."""
    how = locals()
    from llmq.checkpoint.exports import export as run

    del how["source"], how["checkpoint_dir"]
    where = checkpoint_dir if source is None else source
    files = run(where, **how)
    print(f"wrote {out}" if files == [out.name] else f"wrote {', '.join(files)} to {out}")


def merge(
    base: Model,
    adapter: Annotated[Path, typer.Argument(help="Directory of adapters in PEFT's format.")],
    out: Annotated[Path, typer.Option(help="Directory of the model.")],
    model_dtype: Annotated[
        str | None,
        typer.Option(
            help="bf16 or fp32; as the model if not given.", callback=checks("model_dtype")
        ),
    ] = None,
    base_dtype: Annotated[
        str | None,
        typer.Option(
            help="Format that the model is rounded to before; as in training if not given. "
            "bf16: it is taken as it is, e4m3, int8, nf4, mxfp4: as --base-dtype of train.",
            callback=checks("base_dtype"),
        ),
    ] = None,
) -> None:
    """Write a model with its adapters as a model directory that needs no PEFT."""
    from llmq.checkpoint.merge import merge_adapter

    files = merge_adapter(base, adapter, out, model_dtype, base_dtype)
    print(f"wrote {', '.join(files)} to {out}")
