"""Commands about models: `llmq sample`, `eval`, `score`, `export`, `merge`."""

from pathlib import Path
from typing import Any

from llmq.base.errors import ConfigError
from llmq.commands.common import (
    ConfigFile,
    Device,
    argument,
    checks,
    load_run,
    option,
    train_options,
)
from llmq.commands.plan import CardName

Model = argument(str, "Name of a run, directory of a model or of adapters, cached repository.")
Adapter = option(Path | None, "Adapters of the model in PEFT's format, a directory.")
ModelDtype = option(str, "bf16 or fp32.", callback=checks("model_dtype"))


def _encoded(value: str | None) -> str | None:
    if value is not None and value not in BASES:
        raise ConfigError(f"--base-dtype: must be {', '.join(BASES)}, got {value}")
    return value


BASES = ("nf4", "int8", "e4m3", "mxfp4")
BaseDtype = option(
    str | None,
    "Format of the blocks' matrices: nf4, int8, e4m3, of experts mxfp4; --model-dtype.",
    callback=_encoded,
)


def _kept(value: str | None) -> str | None:
    if value not in (None, "e4m3"):
        raise ConfigError(f"--kv-dtype: must be e4m3, or left out, got {value}")
    return value


KvDtype = option(str | None, "Format of keys and values: e4m3; --model-dtype.", callback=_kept)
Exact = option(bool, "A text's bits do not depend on other texts.", "--exact")


def sample(
    model: Model,
    adapter: Adapter = None,
    prompt: option(str, "Text to continue.") = "",
    prompts: option(
        Path | None, "Records with prompt or messages, JSON lines; prints such.", metavar="FILE"
    ) = None,
    max_new_tokens: option(int, "Longest continuation.", min=1) = 200,
    temperature: option(float, "0: always the likeliest.", min=0.0) = 0.8,
    top_k: option(int, "Only the k likeliest tokens; 0: all.", min=0) = 0,
    top_p: option(float, "Only the likeliest tokens of this mass.", min=0.0, max=1.0) = 1.0,
    seed: option(int, "Seed of the choice of tokens.", min=0) = 42,
    num_samples: option(int, "Number of continuations.", min=1) = 1,
    chat: option(bool, "Answer --prompt, or each line of standard input.", "--chat") = False,
    system: option(str | None, "System message of --chat.") = None,
    chat_template: option(str | None, "Template of --chat, a file; the tokenizer's.") = None,
    device: Device = "auto",
    model_dtype: ModelDtype = "bf16",
    base_dtype: BaseDtype = None,
    kv_dtype: KvDtype = None,
    exact: Exact = False,
    verbose: option(bool, "Say what the first token has waited for.", "--verbose", "-v") = False,
) -> None:
    """Continue a text with a trained model.

    llmq sample talks --chat
    """
    how = locals()
    from llmq.run.run_paths import find_model

    how |= {"model": find_model(model), "adapter": adapter_folder(adapter)}
    if how.pop("prompts") is None:
        from llmq.run.sampling import run_sample

        run_sample(**how)
        return
    if how.pop("prompt"):
        raise ConfigError("--prompts: excludes --prompt, give one of them")
    if how.pop("verbose"):
        raise ConfigError("--verbose: needs --prompt or --chat")
    from llmq.run.prompts import run_prompts

    run_prompts(**how, prompts=prompts)


def evaluate(
    model: Model,
    task: option(
        list[str],
        "Questions or texts in JSON or Parquet, or a text file; may be repeated.",
        metavar="[KIND=]FILE",
    ) = (),
    tasks: option(str | None, "Tasks of lm-evaluation-harness, with commas between.") = None,
    adapter: Adapter = None,
    num_fewshot: option(int | None, "With --tasks: examples before each question.", min=0) = None,
    apply_chat_template: option(
        bool, "With --tasks: ask in the form of a chat.", "--apply-chat-template"
    ) = False,
    include_path: option(Path | None, "With --tasks: folder with tasks of your own.") = None,
    limit: option(int | None, "Only as many records of each file or task.", min=1) = None,
    out: option(Path | None, "JSON to write.", metavar="FILE") = None,
    seq_len: option(
        int | None, "Longest sequence; what is longer loses its beginning.", min=1
    ) = None,
    batch_tokens: option(int, "Tokens that a GPU computes at a time.", min=1) = 4096,
    device: Device = "auto",
    gpus: option(int, "GPUs to use; 0: all.", min=0, max=64) = 0,
    model_dtype: ModelDtype = "bf16",
    base_dtype: BaseDtype = None,
) -> None:
    """Measure accuracy and perplexity of a model, as lm-eval defines them.

    llmq eval talks --task hellaswag.jsonl
    """
    how = locals()
    from llmq.run.run_paths import find_model

    of_harness = {
        "num_fewshot": num_fewshot,
        "apply_chat_template": apply_chat_template or None,
        "include_path": include_path,
    }
    if (tasks is None) == (not task):
        problem = "they exclude each other" if task else "give --task FILE or --tasks NAME"
        raise ConfigError(f"--task, --tasks: {problem}")
    if tasks is None:
        for name, value in of_harness.items():
            if value is not None:
                raise ConfigError(f"--{name.replace('_', '-')}: needs --tasks")
    how |= {"model": find_model(model), "adapter": adapter_folder(adapter)}
    if tasks is not None:
        try:
            from llmq.run.harness import run_harness
        except ImportError as error:
            raise ConfigError(f"--tasks: {error}: pip install lm-eval") from error
        del how["task"]
        run_harness(**how)
        return
    from llmq.run.evaluate import run_eval

    for name in ("tasks", *of_harness):
        del how[name]
    run_eval(**how)


def adapter_folder(given: Path | None) -> Path | None:
    """Return the folder that --adapter names, by path or by a run's name; None without
    --adapter."""
    from llmq.run.run_paths import find_model

    return None if given is None else Path(find_model(str(given)))


@train_options
def score(
    given: dict[str, Any],
    scored: argument(str, "As --model of llmq train: whose scores are wanted.", metavar="MODEL"),
    data: argument(
        list[str],
        "Token files, patterns, folders of tokenize; for a score head files of records.",
    ),
    out: option(Path, "Directory of the scores, of records a file."),
    config_file: ConfigFile = None,
    top_k: option(int, "A teacher's: so many probabilities of each token.", min=0, max=255) = 0,
    best_of: option(
        bool, "Of the records with one prompt keep that with the highest score.", "--best-of"
    ) = False,
    dry_run: option(bool, "Print memory and predicted speed, and stop.", "--dry-run") = False,
    card: CardName = None,
) -> None:
    """Write a model's scores of all trained tokens in token files, or a score head's of records.

    llmq score Qwen/Qwen2.5-7B data/talks --out scores --top-k 64
    """
    if all(Path(name).is_file() and Path(name).suffix != ".bin" for name in data):
        others = {"--config": config_file, "--top-k": top_k, "--dry-run": dry_run, "--card": card}
        _score_records(scored, data, out, given, best_of, [n for n, v in others.items() if v])
        return
    if best_of:
        raise ConfigError("--best-of: is for files of records, of which a score head thinks")
    for name, instead in (("model", "MODEL"), ("train-file", "DATA")):
        if name in given:
            raise ConfigError(f"--{name}: {instead} says it here")
    from llmq.run.run_paths import find_model
    from llmq.run.score import SCORED

    patterns = [f"{pattern}/*.bin" if Path(pattern).is_dir() else pattern for pattern in data]
    given = given | {"model": find_model(scored), "train-file": patterns}
    if top_k:
        given |= {"loss": "kd", "loss-params": f"top-k={top_k}", "scores": str(out)}
    if card is not None and not dry_run:
        raise ConfigError("--card: is for --dry-run")
    how = {"plans": True} if dry_run else {"trains": True}
    config, model, model_dir, _ = load_run(given, config_file, defaults=SCORED, **how)
    if dry_run:
        from llmq.plan.report import run_plan
        from llmq.plan.target import MachineOptions

        run_plan(config, model, MachineOptions(card=card))
        return
    from llmq.run.evaluate import run_score

    run_score(config, model, model_dir, out, top_k)


def _score_records(
    scored: str, data: list[str], out: Path, given: dict[str, Any], best: bool, others: list[str]
) -> None:
    """Run `llmq score` on records. given: options of a run, most of which are refused here. others:
    given options of the command that have no effect on records. Raises ConfigError if `others` is
    not empty, or for refused options."""
    from llmq.options.options_io import layers_of
    from llmq.run.evaluate import run_rewards
    from llmq.run.run_paths import find_model

    how = {"seq_len": None, "device": "auto", "gpus": 0, "model_dtype": "bf16"}
    values, known = layers_of(given)[1], {"adapter", "overwrite", *how}
    others += [f"--{name.replace('_', '-')}" for name in values if name not in known]
    if others:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(known))
        raise ConfigError(f"{others[0]}: has no effect on records: of these are {names}")
    run_rewards(
        find_model(scored),
        [Path(name) for name in data],
        out,
        best=best,
        overwrite=values.get("overwrite", False),
        adapter=adapter_folder(values.get("adapter")),
        batch_tokens=4096,
        **{name: values.get(name, value) for name, value in how.items()},
    )


TextOnly = option(
    bool,
    "Leave out tensors that the language model does not have, such as those of a vision tower.",
    "--text-only",
)
Out = option(Path, "Folder, or FILE.gguf.", "--out", "--out-dir", metavar="PATH")
Format = option(
    str,
    "hf: as transformers and peft load it. gguf: a file for llama.cpp. fp8: as "
    "transformers and vLLM load it with compressed-tensors. bitnet: ternary matrices in 2 bits, as "
    "transformers loads them.",
    "--format",
)


def export(
    out: Out,
    source: argument(
        str | None,
        "Name of a run, a checkpoint, a model directory or cached repository, or adapters.",
    ) = None,
    to: Format = "hf",
    dtype: option(
        str | None,
        "hf, fp8, bitnet: bf16 or fp32; gguf: also fp16, q8_0, q4_0, of ternary matrices tq2_0; as "
        "the source if not given.",
        "--dtype",
        "--model-dtype",
    ) = None,
    checkpoint_dir: option(
        Path, "Without SOURCE: a checkpoint, or a directory of checkpoints."
    ) = Path("ckpt/llmq"),
    base: option(
        str | None,
        "The model of adapters, or of what a checkpoint's run has not trained, if it is not where "
        "these say.",
    ) = None,
    merge: option(bool, "Write adapters with their model, as one model.", "--merge") = False,
    scales: option(
        str | None, "fp8: of matrices, tensor or row; tensor after training in fp8, else row."
    ) = None,
    activations: option(
        str | None, "fp8: dynamic, or static: with the delayed scales of the training."
    ) = None,
    licence: option(
        str | None,
        "Of README.md, such as apache-2.0; that of the model it began as if not given.",
        "--license",
    ) = None,
    push: option(
        str | None, "Upload it to this repository of the hub, too.", metavar="OWNER/NAME"
    ) = None,
    verify: option(
        bool | None, "Read it back and compare; if not given, what has up to 2 GiB."
    ) = None,
    overwrite: option(bool, "Replace what is at --out, whoever wrote it.", "--overwrite") = False,
    force: option(bool, "Write weights that are infinities or NaNs, too.", "--force") = False,
    text_only: TextOnly = False,
) -> None:
    """Write a checkpoint, a model or adapters as transformers, peft, vLLM or llama.cpp load
    them.

    llmq export talks --format gguf --dtype q8_0 --out talks.gguf
    """
    how = locals()
    from llmq.checkpoint.exports import export as run

    del how["source"], how["checkpoint_dir"]
    from llmq.run.run_paths import find_model

    where = checkpoint_dir if source is None else find_model(source)
    files = run(where, **how)
    print(f"wrote {out}" if files == [out.name] else f"wrote {', '.join(files)} to {out}")


def merge(
    base: argument(
        str, "Model directory or cached repository; may be left out: adapters name theirs."
    ),
    out: option(Path, "Directory of the model."),
    adapter: argument(
        str | None, "Adapters in PEFT's format: a directory, or the name of a run."
    ) = None,
    model_dtype: option(
        str | None, "bf16 or fp32; as the model if not given.", callback=checks("model_dtype")
    ) = None,
    base_dtype: option(
        str | None,
        "Format that the model is rounded to before; as in training if not given. "
        "bf16: it is taken as it is, others: as --base-dtype of train.",
        callback=checks("base_dtype"),
    ) = None,
    text_only: TextOnly = False,
) -> None:
    """Write a model with its adapters as a model directory that needs no PEFT.

    llmq merge talks --out output/merged
    """
    from llmq.checkpoint.exports.source import base_of
    from llmq.checkpoint.merge import merge_adapter
    from llmq.run.run_paths import find_model

    adapters = Path(find_model(base if adapter is None else adapter))
    model = base_of(adapters) if adapter is None else find_model(base)
    files = merge_adapter(model, adapters, out, model_dtype, base_dtype, text_only)
    print(f"wrote {', '.join(files)} to {out}")
