"""Names of options in other trainers, each with an answer: the option here, or other advice.

`answer` serves the command line, option files and keyword arguments; docs/coming-from.md shows the
same table.
"""

import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from llmq.options.option_types import LORA_TARGETS

Answers = str | dict[str, str]
"""One answer, or answers by value: "" is the default, "…" stands for an unknown value in messages.
{value} and the other words of _WORDS stand for the given value."""

OUT = "leave it out"
_ON = {"false": OUT}  # answers for a switch that is off

_EIGHT_BITS = "--opt-m-dtype e4m3 --opt-v-dtype e4m3"
_PAGED = "--offload-opt-m --offload-opt-v"
_OPTIMIZERS = {
    "adamw_torch": "--optimizer adamw",
    "adamw_torch_fused": "--optimizer adamw",
    "adamw_hf": "--optimizer adamw",
    "adamw_8bit": _EIGHT_BITS,
    "adamw_bnb_8bit": _EIGHT_BITS,
    "paged_adamw_8bit": f"{_EIGHT_BITS} {_PAGED}",
    "paged_adamw_32bit": _PAGED,
    "galore_adamw": "--optimizer galore",
    "galore_adamw_8bit": f"--optimizer galore {_EIGHT_BITS}",
}
_SCHEDULES = {
    "cosine": "--lr-schedule cosine",
    "linear": "--lr-schedule linear",
    "constant": f"{OUT}, as the rate is constant without --lr-schedule",
    "constant_with_warmup": "--warmup alone: the rate is constant without --lr-schedule",
    "warmup_stable_decay": "--lr-schedule wsd",
    "cosine_with_min_lr": "--lr-schedule cosine --final-lr-fraction 0.1",
    "": "--lr-schedule cosine, linear or wsd",
}
_STRATEGIES = {"no": "--eval-file none", "epoch": "--eval-every-n-steps 0"}
_STRATEGIES |= {"": "--eval-every-n-steps N"}
_LOSSES = {
    **{name: f"--loss {name}" for name in ("dpo", "ipo", "kto", "orpo", "simpo")},
    "sigmoid": "--loss dpo",
    **{name: f"--loss {name}" for name in ("grpo", "dapo", "cispo")},
    "dr_grpo": "--loss dr-grpo",
    "": "--loss dpo, ipo, simpo, orpo, kto or reward; others have no counterpart",
}
_STAGES = _LOSSES | {
    "sft": f"{OUT}, as cross-entropy is the default",
    "pt": f"{OUT}, as cross-entropy is the default",
    "rm": "--loss reward",
}
_FORMATS = {
    **dict.fromkeys(("auto", "bfloat16", "bf16"), OUT),
    **dict.fromkeys(("float32", "fp32"), "--model-dtype fp32"),
    "": f"{OUT}, as models train in bf16, or with --model-dtype fp32",
}
_QUANTIZED = {
    **dict.fromkeys(("4", "nf4"), "--base-dtype nf4"),
    "8": "--base-dtype int8",
    "": "--base-dtype nf4; others have no counterpart",
}
_ADAPTERS = {"lora": "--lora-rank 16", "qlora": "--lora-rank 16 --base-dtype nf4"}
_TOKENIZED = "llmq tokenize FILE --tokenizer MODEL --out data/NAME, and --train-file data/NAME"
_FUSED = f"{OUT}, as kernels are fused and compiled by llmq"
_ONE_PROCESS = f"{OUT}, as one process drives all GPUs of a machine, or --gpus of them"
_ATTENTION = f"{OUT}, as --attention auto takes the faster kernels"

NAMES: tuple[tuple[str, dict[str, Answers]], ...] = (
    (
        "Hugging Face",
        {
            "model_name_or_path": "--model {value}",
            "output_dir": "--name {name}, for the model output/{name} and checkpoints ckpt/{name}",
            "overwrite_output_dir": {"": "--overwrite"} | _ON,
            "run_name": "--name {value}",
            "per_device_train_batch_size": "--batch-size {value}",
            "per_device_eval_batch_size": f"{OUT}, as validation takes --batch-size, too",
            "gradient_accumulation_steps": "--grad-accumulation {value}",
            "num_train_epochs": "--epochs {number}",
            "max_steps": {"": "--steps {value}", "-1": OUT},
            "lr_scheduler_type": _SCHEDULES,
            "lr_scheduler_kwargs": "--final-lr-fraction, --cooldown",
            "warmup_steps": "--warmup {value}",
            "warmup_ratio": "--warmup {percent}",
            "adam_beta1": "--beta-1 {value}",
            "adam_beta2": "--beta-2 {value}",
            "max_grad_norm": "--grad-clip {value}",
            "optim": _OPTIMIZERS | {"": "--optimizer adamw, muon, normuon or galore"},
            "bf16": {"false": "--model-dtype fp32", "": f"{OUT}, as bf16 is the default"},
            "fp16": {"": f"{OUT}, as bf16 needs no scaling of the loss"} | _ON,
            "tf32": f"{OUT}, as --model-dtype bf16 or fp32 says in what products run",
            "gradient_checkpointing": {"": "--recompute-block"} | _ON,
            "gradient_checkpointing_kwargs": OUT,
            "logging_steps": f"{OUT}, as every step is logged",
            "logging_dir": "--tensorboard {value}",
            "eval_strategy": _STRATEGIES,
            "evaluation_strategy": _STRATEGIES,
            "eval_steps": "--eval-every-n-steps {value}",
            "eval_on_start": {"": "--eval-at-start"} | _ON,
            "save_strategy": {
                "no": "--ckpt-interval 0",
                "best": "--keep-best loss",
                "": "--ckpt-interval N",
            },
            "save_steps": "--ckpt-interval {value}",
            "save_total_limit": "--ckpt-keep-n {value}",
            "save_only_model": {"": "--ckpt-interval 0 --no-save-training-state"} | _ON,
            "load_best_model_at_end": {"": "--keep-best loss"} | _ON,
            "metric_for_best_model": {
                **dict.fromkeys(("loss", "eval_loss"), "--keep-best loss"),
                "": "--keep-best loss, or TASK/METRIC of an --eval-task",
            },
            "greater_is_better": f"{OUT}, as --keep-best knows its metrics",
            "report_to": {
                "wandb": "--wandb PROJECT",
                "tensorboard": "--tensorboard DIR",
                "none": OUT,
                "": "--wandb PROJECT, --tensorboard DIR; others have no counterpart",
            },
            "resume_from_checkpoint": {"true": "--continue", "": "--continue {value}"} | _ON,
            "data_seed": "--train-seed {value}",
            "dataloader_num_workers": f"{OUT}, as token files are read without workers",
            "dataloader_drop_last": {"": "--drop-last"} | _ON,
            "remove_unused_columns": f"{OUT}, as `llmq tokenize` reads the fields",
            "group_by_length": f"{OUT}, as --packing best-fit pads nothing",
            "local_rank": _ONE_PROCESS,
            "ddp_find_unused_parameters": _ONE_PROCESS,
            "deepspeed": "--zero-level 3, or 2; --offload-master, --offload-opt-m, --offload-opt-v",
            "fsdp": "--zero-level 3",
            "fsdp_config": "--zero-level 3",
            "torch_compile": _FUSED,
            "use_liger_kernel": f"{_FUSED}; --lmhead-chunks N divides the logits",
            "auto_find_batch_size": {"": "--auto"} | _ON,
            "neftune_noise_alpha": f"{OUT}, as nothing adds noise to embeddings here",
            "label_smoothing_factor": f"{OUT}, as cross-entropy has no smoothing here",
            "push_to_hub": "llmq export output/NAME --out DIR --push OWNER/NAME, after the run",
            "hub_model_id": "llmq export output/NAME --out DIR --push {value}, after the run",
            "use_cpu": {"": "--device cpu"} | _ON,
            "do_train": OUT,
            "do_eval": OUT,
            "disable_tqdm": f"{OUT}, as only a terminal has the live view",
        },
    ),
    (
        "TRL, Axolotl, Unsloth, LLaMA-Factory",
        {"trust_remote_code": f"{OUT}, as no code of a repository is run"},
    ),
    ("Axolotl, Unsloth", {"device_map": _ONE_PROCESS}),
    ("TRL, LLaMA-Factory", {"model_revision": "--revision {value}"}),
    (
        "TRL, Axolotl",
        {
            "lora_r": "--lora-rank {value}",
            "lora_target_modules": "--lora-targets {targets}",
            "lora_modules_to_save": "--train {parts}",
        },
    ),
    (
        "TRL, Axolotl, Unsloth",
        {
            "load_in_4bit": {"": "--base-dtype nf4, beside --lora-rank"} | _ON,
            "load_in_8bit": {"": "--base-dtype int8, beside --lora-rank"} | _ON,
        },
    ),
    ("TRL, Unsloth", {"max_seq_length": "--seq-len {value}"}),
    (
        "TRL",
        {
            "max_length": "--seq-len {value}",
            "dataset_text_field": "llmq tokenize --field {value}",
            "chat_template_path": "llmq tokenize --chat-template {value}",
            "torch_dtype": _FORMATS,
            "attn_implementation": _ATTENTION,
            "use_peft": {"": "--lora-rank 16"} | _ON,
            "bnb_4bit_quant_type": _QUANTIZED,
            "bnb_4bit_compute_dtype": OUT,
            "bnb_4bit_use_double_quant": f"{OUT}, as scales of nf4 are kept as they are",
            "dataset_name": "llmq tokenize --dataset {value} --tokenizer MODEL --out data/NAME, "
            "and --train-file data/NAME",
            "dataset_num_proc": "llmq tokenize --workers {value}",
            "packing": {"true": "--packing best-fit", "false": "--packing none"},
            "eval_packing": f"{OUT}, as validation is packed as --packing says",
            "padding_free": f"{OUT}, as --packing best-fit pads nothing",
            "assistant_only_loss": {"": "llmq tokenize --train-on assistant"} | _ON,
            "completion_only_loss": {"": "llmq tokenize --train-on assistant"} | _ON,
            "activation_offloading": {"": "--offload-residual"} | _ON,
            "beta": "--loss-params beta={value}",
            "loss_type": _LOSSES,
            "label_smoothing": "--loss-params smoothing={value}",
            "desirable_weight": "--loss-params desirable={value}",
            "undesirable_weight": "--loss-params undesirable={value}",
            "num_generations": "--num-samples {value}",
            "max_completion_length": "--max-new-tokens {value}",
            "mask_truncated_completions": {"": "--skip-cut"} | _ON,
            "max_prompt_length": f"{OUT}, as --seq-len bounds prompt and answer together",
            "precompute_ref_log_probs": f"{OUT}, as the reference is always scored before",
            "teacher_model_name_or_path": "llmq score {value} data/NAME --out SCORES --top-k 64, "
            "and --loss kd --scores SCORES",
        },
    ),
    (
        "Axolotl",
        {
            "base_model": "--model {value}",
            "model_type": OUT,
            "tokenizer_type": OUT,
            "sequence_len": "--seq-len {value}",
            "micro_batch_size": "--batch-size {value}",
            "num_epochs": "--epochs {number}",
            "optimizer": _OPTIMIZERS,
            "lr_scheduler": _SCHEDULES,
            "cosine_min_lr_ratio": "--final-lr-fraction {value}",
            "datasets": _TOKENIZED,
            "pretraining_dataset": _TOKENIZED,
            "test_datasets": "llmq tokenize FILE --tokenizer MODEL --out data/HELD, and "
            "--eval-file data/HELD",
            "dataset_prepared_path": f"{OUT}, as `llmq tokenize` says it, by --out",
            "val_set_size": {"0": "--eval-file none", "": "--eval-file split:{value}"},
            "sample_packing": {"": "--packing best-fit", "false": "--packing none"},
            "eval_sample_packing": f"{OUT}, as validation is packed as --packing says",
            "pad_to_sequence_len": OUT,
            "adapter": _ADAPTERS,
            "lora_model_dir": "--adapter {value}",
            "lora_target_linear": {"": "--lora-targets all"} | _ON,
            "peft_use_dora": {"": "--lora-dora"} | _ON,
            "peft_use_rslora": {"": "--lora-scaling rs"} | _ON,
            "peft_layers_to_transform": "--lora-layers {value}",
            "wandb_project": "--wandb {value}",
            "wandb_name": "--name {value}",
            "wandb_entity": "set WANDB_ENTITY in the environment",
            "use_tensorboard": {"": "--tensorboard DIR"} | _ON,
            "flash_attention": _ATTENTION,
            "train_on_inputs": {"": "llmq tokenize --train-on all"} | _ON,
            "rl": _LOSSES,
            "rl_beta": "--loss-params beta={value}",
            "kto_desirable_weight": "--loss-params desirable={value}",
            "kto_undesirable_weight": "--loss-params undesirable={value}",
            "special_tokens": f"{OUT}, as those of the tokenizer count",
            "tokens": "--add-tokens {value}, to train and to llmq tokenize",
            "saves_per_epoch": "--ckpt-interval N: the steps of an epoch, divided",
            "evals_per_epoch": "--eval-every-n-steps N: the steps of an epoch, divided",
            "early_stopping_patience": "--stop-after {value}",
        },
    ),
    ("Axolotl, LLaMA-Factory", {"loraplus_lr_ratio": "--lora-plus {value}"}),
    ("Axolotl, nanochat", {"embedding_lr": "--lr-parts embedding={value}"}),
    ("Axolotl, LLaMA-Factory, nanochat", {"fp8": {"": "--matmul-dtype e4m3"} | _ON}),
    ("Axolotl, LLaMA-Factory, TRL", {"simpo_gamma": "--loss-params gamma={value}"}),
    (
        "Unsloth",
        {
            "model_name": "--model {value}",
            "dtype": _FORMATS,
            "full_finetuning": {"": f"{OUT}, as all weights are trained without --lora-rank"}
            | {"false": "--lora-rank 16"},
            "use_gradient_checkpointing": {
                "unsloth": "--recompute-block --offload-residual",
                "": "--recompute-block",
            }
            | _ON,
            "random_state": "--seed {value}",
        },
    ),
    (
        "PEFT, Unsloth",
        {
            "r": "--lora-rank {value}",
            "target_modules": "--lora-targets {targets}",
            "modules_to_save": "--train {parts}",
            "bias": {
                "none": OUT,
                "all": "--train biases",
                "lora_only": "--train adapted-biases",
                "": "--train biases, or adapted-biases",
            },
            "init_lora_weights": f"{OUT}, as adapters begin with B at zero",
            "layers_to_transform": "--lora-layers {value}",
        },
    ),
    (
        "PEFT, TRL, Unsloth, LLaMA-Factory",
        {
            "use_rslora": {"": "--lora-scaling rs"} | _ON,
            "use_dora": {"": "--lora-dora"} | _ON,
        },
    ),
    (
        "PEFT",
        {
            "base_model_name_or_path": "--model {value}",
            "rank_pattern": "--lora-rank-pattern",
            "alpha_pattern": "--lora-alpha-pattern",
            "task_type": OUT,
            "fan_in_fan_out": OUT,
        },
    ),
    (
        "LLaMA-Factory",
        {
            "stage": _STAGES,
            "finetuning_type": {
                "full": f"{OUT}, as all weights are trained without --lora-rank",
                "lora": "--lora-rank 8",
                "": "--lora-rank 8, or all weights without; others have no counterpart",
            },
            "adapter_name_or_path": "--adapter {value}",
            "train_from_scratch": {"": "--from-scratch"} | _ON,
            "template": "llmq tokenize --chat-template {value}",
            "dataset": _TOKENIZED,
            "dataset_dir": _TOKENIZED,
            "cutoff_len": "--seq-len {value}",
            "val_size": {"0": "--eval-file none", "": "--eval-file split:{value}"},
            "neat_packing": {"": "--packing best-fit"} | _ON,
            "interleave_probs": "--train-file a.bin:0.7 --train-file b.bin:0.3",
            "train_on_prompt": {"": "llmq tokenize --train-on all"} | _ON,
            "mask_history": {"": "llmq tokenize --train-on last"} | _ON,
            "max_samples": "tokenize a shorter file, as by head -n {value}",
            "preprocessing_num_workers": "llmq tokenize --workers {value}",
            "overwrite_cache": "llmq tokenize --overwrite",
            "lora_target": "--lora-targets {targets}",
            "additional_target": "--train {parts}",
            "quantization_bit": _QUANTIZED,
            "quantization_method": OUT,
            "flash_attn": _ATTENTION,
            "enable_liger_kernel": _FUSED,
            "moe_aux_loss_coef": "--router-aux-loss {value}",
            "resize_vocab": "--add-tokens TOKENS, to train and to llmq tokenize",
            "pref_loss": _LOSSES,
            "pref_ftx": "--loss-params sft={value}",
            "kto_chosen_weight": "--loss-params desirable={value}",
            "kto_rejected_weight": "--loss-params undesirable={value}",
            "plot_loss": "llmq plot NAME, whenever you want",
        },
    ),
    (
        "nanochat",
        {
            "depth": "--num-layers {value}",
            "aspect_ratio": "--hidden-size: --num-layers times {value}",
            "max_seq_len": "--seq-len {value}",
            "device_batch_size": "--batch-size {value}",
            "total_batch_size": "--grad-accumulation: {value} tokens / (--batch-size * --seq-len "
            "* GPUs)",
            "num_iterations": {"": "--steps {value}", "-1": OUT},
            "target_param_data_ratio": "llmq recipe: it chooses size and tokens",
            "target_flops": "llmq recipe: it chooses size and tokens for the hours that you have",
            "unembedding_lr": "--lr-parts head={value}",
            "scalar_lr": "--lr-parts vectors={value}",
            "matrix_lr": "--optimizer muon --muon-lr RATE: changes are as large as AdamW's",
            "warmdown_ratio": "--lr-schedule wsd --cooldown {percent}",
            "final_lr_frac": "--final-lr-fraction {value}",
            "eval_every": "--eval-every-n-steps {value}",
            "eval_tokens": "--eval-num-steps: {value} tokens / (--batch-size * --seq-len)",
            "core_metric_every": "--eval-task FILE --task-every {value}",
            "save_every": "--ckpt-interval {value}",
            "resume_from_step": {"": "--continue {value}", "-1": OUT},
            "model_tag": "--name {value}",
            "run": "--wandb PROJECT --name {value}",
            "device_type": {"": "--device {value}", "mps": "--device cpu"},
            "window_pattern": f"{OUT}, as windows are those of --model",
        },
    ),
)
"""Trainers, with the names that these trainers have."""


class Foreign(NamedTuple):
    """A name of other trainers. peers: these trainers. answers: the answer, or answers by value."""

    peers: str
    answers: Answers


FOREIGN = {name: Foreign(peers, how) for peers, names in NAMES for name, how in names.items()}
"""All names, with _ between words."""

PEERS = tuple(dict.fromkeys(peer for peers, _ in NAMES for peer in peers.split(", ")))
"""The trainers whose names are known."""


def answer(key: str, value: Any = None) -> str | None:
    """Return a line about an option name of another trainer: that trainer, and the option to use
    instead. value: the given value, None if unknown. Return None for any other name, and for an
    option of llmq with the same name unless the value is another trainer's."""
    name = key.lower().replace("-", "_")
    if name not in FOREIGN:
        return None
    peers, answers = FOREIGN[name]
    text = None if value is None else _text(value)
    if isinstance(answers, dict):
        answers = answers.get((text or "").lower(), answers.get(""))
        if answers is None or (name == "adapter" and Path(text).exists()):
            return None
    use = "use " if answers.startswith(("--", "llmq ")) else ""
    return f"{key} is a name of {peers}: {use}{_filled(answers, text)}"


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    each = value if isinstance(value, list | tuple) else [value]
    return ",".join("…" if isinstance(one, Mapping) else str(one) for one in each)


def _percent(text: str) -> str:
    return f"{float(text) * 100:g}%"


def _number(text: str) -> str:
    return f"{float(text):g}"


def _targets(text: str) -> str:
    """Words of --lora-targets for module names; all-linear is all. ValueError for other names."""
    if text in ("all", "all-linear"):
        return "all"
    words = [word.strip().removesuffix("_proj") for word in text.split(",")]
    if not {*words} <= {*LORA_TARGETS}:
        raise ValueError(text)
    return ",".join(words)


_PARTS = {"embed_tokens": "embeddings", "wte": "embeddings", "lm_head": "head"}


def _parts(text: str) -> str:
    """Words of --train for module names; "…" for other names."""
    return ",".join(_PARTS.get(word.strip(), "…") for word in text.split(","))


_WORDS: dict[str, Callable[[str], str]] = {
    "value": shlex.quote,
    "name": lambda text: shlex.quote(Path(text).name),
    "percent": _percent,
    "number": _number,
    "targets": _targets,
    "parts": _parts,
}


def _filled(template: str, text: str | None) -> str:
    """The answer with its value filled in; … stands for a value that is unknown or has no meaning
    here."""
    for word, write in _WORDS.items():
        try:
            shown = "…" if text is None else write(text)
        except ValueError:
            shown = "…"
        template = template.replace(f"{{{word}}}", shown)
    return template
