"""`llmq finetune`: fine-tunes a model on files of records by one command.

The data decide the length of sequences, the tokens of a step and the number of steps. The planner
decides the method and where tensors lie in memory. The run keeps the model with the least held-out
loss.
"""

import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from llmq.arch.model_config import ModelConfig
from llmq.base.errors import ConfigError, LlmqError
from llmq.checkpoint import hub
from llmq.checkpoint.export_files import ADAPTER_CONFIG
from llmq.options.option_file import command_line, save_options
from llmq.options.options import TrainConfig
from llmq.options.options_io import config_of, fields_of, layers_of
from llmq.options.presets import find_directory, hub_cache, resolve_model
from llmq.options.rules import RULES
from llmq.plan.epoch import data_record
from llmq.plan.fit import Candidate, Fit, search_bases
from llmq.plan.target import MachineOptions, PlanTarget, target, target_here
from llmq.run import model_of_run as of_run
from llmq.run.finetune_data import FinetuneData, prepare
from llmq.run.report_card import held_out_prompts, write_card
from llmq.run.run_paths import find_model
from llmq.run.summary import five_lines, next_commands
from llmq.run.training import run_training
from llmq.runtime.device import HOST_SPEC
from llmq.state.params import parameter_count
from llmq.text.show import run_show

MODEL = "Qwen/Qwen2.5-0.5B-Instruct"  # suggested model if the machine has none
METHODS = ("auto", "full", "lora", "qlora")
FULL_BELOW = 200_000_000  # number of parameters below which adapters save almost no memory
RANK = 16

STEPS = 60  # wanted number of steps, enough for the learning rate to warm up and fall
FEWEST_STEPS = 20  # least number of steps without --force
MOST_TOKENS = 32768  # most tokens of a step; more tokens need larger learning rates
MOST_LENGTH = 4096  # longest sequence in tokens; longer documents are cut
EPOCHS, MOST_EPOCHS = 3, 8  # usual passes over the data, and most passes over few tokens
FEW_TOKENS = 5_000_000  # with at least this number of tokens, one pass over the data is enough
EVALUATIONS, PATIENCE = 10, 4  # validations in a run; most validations in a row without a gain
QUESTIONS = 2  # number of held-out questions that are answered before and after training


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """The arguments of `llmq finetune`. out: output folder; None: finetune/NAME. card, gpu_memory:
    a GPU to plan for, without training. given: options of `llmq train`, by flag, which override the
    choices of this module."""

    files: tuple[str, ...]
    mapping: Mapping[str, str]
    out: Path | None = None
    method: str = "auto"
    chat_template: str | None = None
    card: str | None = None
    gpu_memory: int | None = None
    dry_run: bool = False
    given: Mapping[str, Any]

    @property
    def is_elsewhere(self) -> bool:
        """Return True if the plan is for another machine than this one."""
        return self.card is not None or self.gpu_memory is not None

    @property
    def plans(self) -> bool:
        """Return True if nothing will be trained, and no weights are needed."""
        return self.dry_run or self.is_elsewhere


class Chosen(NamedTuple):
    """A chosen run that fits into memory. seconds: predicted duration; None if the machine's speed
    is unknown."""

    config: TrainConfig
    model: ModelConfig
    model_dir: Path | None
    where: PlanTarget
    candidate: Candidate
    steps: int

    @property
    def seconds(self) -> float | None:
        if self.where.spec == HOST_SPEC or self.where.card is None:
            return None
        return self.steps * self.candidate.need.time.total


def run_finetune(wish: Wish) -> None:
    """Tokenize, choose a method, train, and answer questions before and after. Raises LlmqError for
    bad input before training begins or a model is written."""
    name = wish.given.get("name") or Path(wish.files[0]).name.split(".")[0] or "finetune"
    out = wish.out or Path("finetune") / name
    source = _model(wish)
    wish = replace(wish, given=wish.given | {"model": source})
    data = prepare(
        wish.files,
        wish.mapping,
        hub.find_tokenizer(source, bool(wish.given.get("download"))),
        out / "data",
        chat_template=wish.chat_template,
        overwrite=bool(wish.given.get("overwrite")),
    )
    if not data.lengths.size:
        raise ConfigError(f"'{wish.files[0]}' has no document to train on")
    chosen = _chosen(wish, name, out, data)
    summary = _summary(chosen, data)
    print("\n".join(summary), end="\n\n")
    run_show(data.patterns("train"), tokenizer=None, document=1, limit=1 + data.in_pairs, ids=False,
             seq_len=None, document_separator=None)  # fmt: skip
    if chosen.steps < FEWEST_STEPS and not wish.given.get("force"):
        epochs = -(-FEWEST_STEPS * (chosen.config.epochs or 1) // max(chosen.steps, 1))
        raise ConfigError(
            f"{chosen.steps} steps change a model too little: give more records, --epochs "
            f"{epochs}, or --force"
        )
    file = out / "finetune.yaml"
    if wish.plans:
        print(f"\nNothing was trained. To train: {_without_plan(sys.argv[1:])}")
        return
    if wish.given.get("overwrite"):
        file.unlink(missing_ok=True)
    save_options(file, chosen.config, notes=_reasons(chosen, data))
    prompts = held_out_prompts(data.patterns("eval"), QUESTIONS, chosen.config.seq_len)
    config = replace(chosen.config, sample_prompt=(*chosen.config.sample_prompt, *prompts))
    run_training(config, chosen.model, chosen.model_dir, command_line(config), told=True)
    write_card(out, config, about=summary[:3])
    again = f"  llmq train --config {shlex.quote(str(file))}  # the same again"
    print("\n".join(["Next:", *next_commands(config, base=source), again]))


# Choice of the model


def _model(wish: Wish) -> str:
    """Return the model to fine-tune: a directory or a repository. Raises ConfigError, which
    suggests a model, if there is no model, or for a directory of adapters."""
    if "model" in wish.given:
        model = find_model(wish.given["model"])
        if (Path(model) / ADAPTER_CONFIG).is_file():
            raise ConfigError(
                f"--model: '{model}' holds adapters: `llmq merge` makes one model of them and "
                "theirs, or give the model, and these as --adapter"
            )
        if find_directory(model) is None and "/" not in model:
            raise ConfigError(
                f"--model: '{model}' is no directory of a model and no repository: give one, or "
                f"--model {MODEL} --download"
            )
        return model
    found = cached_instruct_models()
    if found:
        return found[0]
    if wish.given.get("download"):
        return MODEL
    raise ConfigError(
        f"--model: there is no instruct model in the cache {hub_cache()}: give a directory, or "
        f"--model {MODEL} --download"
    )


def cached_instruct_models() -> list[str]:
    """Return repositories in the Hugging Face cache with an instruct model of a known architecture,
    smallest model first."""
    found = []
    for folder in sorted(hub_cache().glob("models--*--*")):
        name = folder.name.removeprefix("models--").replace("--", "/", 1)
        words = name.lower()
        if not any(word in words for word in ("instruct", "-it", "chat", "qwen3-")):
            continue
        if words.endswith("-base") or hub.lacking(name, [hub.MODEL, hub.TOKENIZER, hub.WEIGHTS]):
            continue
        try:
            model, _ = resolve_model(name, from_scratch=False)
        except LlmqError:  # the architecture is unknown
            continue
        found.append((parameter_count(model), name))
    return [name for _, name in sorted(found)]


# Choice of the options


def sequence_length(lengths: np.ndarray, longest: int) -> int:
    """Return a sequence length in tokens, a multiple of 64, that holds the documents; the longest 1
    % of documents may be cut. lengths: tokens of each document. longest: positions of the model."""
    most = max(min(longest, MOST_LENGTH) // 64 * 64, 64)
    needed = int(lengths.max())
    if needed > 2048:
        needed = max(2048, int(np.quantile(lengths, 0.99)))
    return min(max(-(-needed // 64) * 64, 64), most)


def _chosen(wish: Wish, name: str, out: Path, data: FinetuneData) -> Chosen:
    """Return the fastest run that fits into memory and suits the data."""
    given = {"name": name} | _places(out)
    given |= {"train-file": data.patterns("train"), "packing": "best-fit"}
    given |= {"eval-file": _eval_pattern(out, data)}
    given |= {"loss": "dpo"} if data.in_pairs else {}
    config = config_of(layers_of(given | wish.given))
    model, model_dir = of_run.model_of_run(config, weights=not wish.plans)
    given["seq-len"] = sequence_length(data.lengths, model.longest)
    here = None if wish.is_elsewhere else target_here(config, model)
    on_cpu = here is not None and here.spec == HOST_SPEC
    given |= _of_method(wish.method, parameter_count(model), model.hidden_size, data, on_cpu=on_cpu)
    config = config_of(layers_of(given | wish.given))
    epoch = _epoch(config, model)
    ranks = 1 if here is None else here.world_size
    given |= _of_length(config.seq_len, epoch["steps_per_epoch"], data.tokens, ranks)
    if "steps" in wish.given:  # --steps and --epochs exclude each other
        del given["epochs"]
    layers = layers_of(given | wish.given)
    config = of_run.at_commit(config_of(layers), model_dir).validate_with(model)
    RULES.check(config, files=True)
    asked = MachineOptions(card=wish.card, gpu_memory=wish.gpu_memory)
    where = here or target(config, model, asked, search=True)
    where = replace(where, visible_share=epoch["visible_share"] or 1.0)
    fit = Fit(config, where.planner(model), where.limits, fields_of(layers))
    (candidate, *_) = search_bases(fit)[1]
    config, steps = candidate.config, candidate.config.steps
    if steps < 0:
        steps = config.epochs * data_record(config, model, where.world_size)["steps_per_epoch"]
    config = _evaluated(config, steps, data, frozenset(wish.given))
    return Chosen(config, model, model_dir, where, candidate, steps)


def _places(out: Path) -> dict[str, Any]:
    places = {"checkpoint-dir": "ckpt", "out-dir": "model", "log-file": "log.json"}
    return {flag: str(out / name) for flag, name in places.items()}


def _eval_pattern(out: Path, data: FinetuneData) -> str:
    """Return the file pattern of the held-out token files; "none" if there are no such files."""
    found = data.patterns("eval")
    if not found:
        return "none"
    return found[0] if len(found) == 1 else f"{out / 'data'}/*/eval-*.bin"


def _of_method(
    method: str, parameters: int, width: int, data: FinetuneData, *, on_cpu: bool
) -> dict[str, Any]:
    """Return options of full training or of adapters. parameters, width: number of parameters and
    hidden size of the model. The learning rate of full training falls with the width; for pairs of
    answers the rate is a tenth."""
    if method == "auto":
        method = "full" if parameters < FULL_BELOW else "lora"
    chosen: dict[str, Any] = {"warmup": "5%", "lr-schedule": "cosine", "weight-decay": 0.01}
    chosen |= {"model-dtype": "fp32"} if on_cpu else {}
    rate = 2e-4
    if method == "full":
        rate = float(f"{min(0.04 / width, 1e-3):.1g}")
    else:
        chosen |= {"lora-rank": RANK} | ({"base-dtype": "nf4"} if method == "qlora" else {})
    return chosen | {"learning-rate": rate / 10 if data.in_pairs else rate}


def _epoch(config: TrainConfig, model: ModelConfig) -> dict[str, Any]:
    """Return facts of one pass over the data (see data_record), in steps of one sequence. Raises
    ConfigError for data without a sequence."""
    record = data_record(replace(config, batch_size=1, grad_accumulation=1), model, 1)
    if "problem" in record:
        raise ConfigError(record["problem"])
    return record


def _of_length(seq_len: int, sequences: int, tokens: int, ranks: int) -> dict[str, Any]:
    """Return options for the passes over the data and the sequences of a step. The run gets STEPS
    steps if the data allow, few passes, and at most MOST_TOKENS tokens in a step. sequences,
    tokens: size of the data."""
    epochs = EPOCHS if tokens < FEW_TOKENS else 1
    if epochs * sequences < STEPS * ranks:
        epochs = min(-(-STEPS * ranks // sequences), MOST_EPOCHS)
    most = max(MOST_TOKENS // seq_len, 1)
    together = min(max(epochs * sequences // STEPS, 1), most)
    return {"epochs": epochs, "batch-size": max(together // ranks, 1), "grad-accumulation": 1}


def _evaluated(
    config: TrainConfig, steps: int, data: FinetuneData, own: frozenset[str]
) -> TrainConfig:
    """Return the options with a validation after each tenth of the steps, and a checkpoint after
    each half. own: flags that the user has set and that stay."""
    every = max(steps // EVALUATIONS, 1)
    chosen = {
        "eval-every-n-steps": every,
        "eval-num-steps": max(-(-data.held_out // config.batch_size), 1),
        "eval-at-start": True,
        "keep-best": "loss",
        "stop-after": PATIENCE,
        "export": "best",
        "ckpt-interval": max(every * EVALUATIONS // 2, 100),
        "ckpt-keep-n": 1,
        "save-training-state": False,
    }
    if not config.validates:
        chosen = {"save-training-state": False}
    kept = {flag: value for flag, value in chosen.items() if flag not in own}
    return replace(config, **layers_of(kept)[1]).normalized().validate()


# ------------------------------------------------------------------------------------------------
# Console output


def _summary(chosen: Chosen, data: FinetuneData) -> list[str]:
    """Return the five summary lines that are printed before a run."""
    config, where, need = chosen.config, chosen.where, chosen.candidate.need
    card = None if chosen.seconds is None else where.card
    return five_lines(
        config,
        chosen.model,
        where.spec,
        data=data.describe(),
        steps=chosen.steps,
        world_size=where.world_size,
        device_bytes=need.device,
        limit=where.limits.device,
        host_bytes=0 if where.spec == HOST_SPEC else need.host,
        seconds=chosen.seconds,
        error=card and card.error_of(where.world_size),
    )


def _without_plan(words: list[str]) -> str:
    """Return the training command: the words of a planning command without its planning options."""
    kept, skip = [], False
    for word in words:
        planned = word.split("=")[0] in ("--card", "--gpu-memory")
        if not (skip or planned or word == "--dry-run"):
            kept.append(word)
        skip = planned and "=" not in word
    return shlex.join(["llmq", *kept])


def _reasons(chosen: Chosen, data: FinetuneData) -> dict[str, str]:
    """Return reasons for the choices, by option, as comments in the option file."""
    fits = f"fits into {chosen.where.spec.name} and is the fastest by plan"
    return {
        "seq_len": f"the data need no more: their longest record has {int(data.lengths.max())}",
        "epochs": f"{chosen.steps} steps in all",
        "batch_size": fits,
        "grad_accumulation": fits,
        "learning_rate": "as usual for this method and width",
        "keep_best": "the model with the least held-out loss is exported",
        "stop_after": "validations without a gain that end the run",
    }
