"""`llmq export`: a checkpoint, a model or adapters in a format that others read."""

from pathlib import Path
from typing import Annotated

import typer

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
    from llmq.checkpoint.exports import export as run

    where, how = checkpoint_dir if source is None else source, {"to": to, "dtype": dtype}
    how |= {"base": base, "merge": merge, "scales": scales, "activations": activations}
    how |= {"licence": licence, "push": push, "verify": verify}
    files = run(where, out, **how, overwrite=overwrite, force=force)
    print(f"wrote {out}" if files == [out.name] else f"wrote {', '.join(files)} to {out}")
