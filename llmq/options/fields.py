"""Every option of a training run: name, default, help, limits. The command line is made from it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from llmq.base.schedule import SCHEDULES
from llmq.options.option_types import (
    dtype_option,
    option,
    parse_continue,
    parse_every,
    parse_layers,
    parse_name,
    parse_patterns,
    parse_repeated,
    parse_size,
    switch,
)

FP8_DTYPES = ("e4m3", "e5m2")
SHAKESPEARE = "data/tiny-shakespeare-qwen"
_MODEL, _DATA, _OPTIMIZER = "Model", "Data and shape", "Optimizer and schedule"
_EVALUATION = "Evaluation in the run"
_OUTPUT, _MEMORY, _MACHINE = "Checkpoints and logs", "Memory", "Machine"


@dataclass(frozen=True, slots=True, kw_only=True, init=False, repr=False, eq=False)
class Fields:
    """Values as given; `options.TrainConfig` is what everything else uses.

    It alone is made, so it alone has an __init__ and the like: to build them takes time at a start.
    """

    model: str = option(
        _MODEL,
        ".",
        "Directory, Hugging Face repository in the local cache, or preset with --from-scratch",
    )
    download: bool = switch(
        _MODEL, "Fetch what of --model is not in the local cache from the Hugging Face hub"
    )
    from_scratch: bool = switch(_MODEL, "Start from random weights")
    init_proj_to_zero: bool = switch(
        _MODEL, "Start the attention-out and MLP-down matrices at zero"
    )
    model_dtype: str = dtype_option(_MODEL, "bf16", "Format of weights and activations")
    master_dtype: str | None = dtype_option(
        _MODEL,
        None,
        "Format of the weights the optimizer updates; as --model-dtype if not given, with adapters "
        "fp32",
    )
    grad_accum_dtype: str | None = dtype_option(
        _MODEL,
        None,
        "Format in which gradients are summed; as --model-dtype if not given, with adapters fp32",
    )
    matmul_dtype: str | None = dtype_option(
        _MODEL,
        None,
        "Format in which the products of the blocks run; as --model-dtype if not given",
        "e4m3",
        "int8",
    )
    gradient_dtype: str | None = dtype_option(
        _MODEL,
        None,
        "Format of output gradients in these products; as --matmul-dtype if not given",
        *FP8_DTYPES,
        "int8",
    )
    head_dtype: str | None = dtype_option(
        _MODEL,
        None,
        "Format in which the LM head's products run; as --model-dtype if not given",
        "e4m3",
    )
    mlp_dtype: str | None = dtype_option(
        _MODEL,
        None,
        "Format in which the MLP's activation gets what products write for it, forward and "
        "backward; e4m3: as fp8 codes; as --model-dtype if not given",
        "e4m3",
    )
    fp8_recipe: str = option(
        _MODEL,
        "jit",
        "Scales of fp8 tensors; jit: from their own values, delayed: from those of earlier steps",
        choices=("jit", "delayed"),
    )
    fp8_fast_accumulation: str = option(
        _MODEL,
        "activations",
        "fp8 products that may sum with fewer bits, which is faster; activations: forward and the "
        "gradients of activations in blocks",
        choices=("none", "forward", "activations", "all"),
    )
    allow_other_tokenizer: bool = option(
        _MODEL, False, "Train on the ids of another tokenizer than the model's or the checkpoint's"
    )
    seed: int = option(
        _MODEL, 42, "Seed of the initial weights and of stochastic rounding", min=0, max=2**32 - 1
    )

    train_file: tuple[str, ...] = option(
        _DATA,
        (f"{SHAKESPEARE}/train.bin",),
        "Training token files, a glob pattern; may be given several times, also with weights: "
        "a.bin:0.7 b.bin:0.3",
    )
    eval_file: str | tuple[str, ...] | None = option(
        _DATA,
        None,
        "Validation token files, a glob pattern; none: no validation; split: a part of the "
        "training files; if not given: eval.bin beside the default --train-file, split with "
        "others; NAME=PATTERN, repeated: validations of their own",
        parse=parse_patterns,
    )
    eval_fraction: float = option(
        _DATA, 0.02, "Part of the training files that --eval-file split keeps for validation"
    )
    packing: str = option(
        _DATA,
        "concat",
        "What a sequence is; concat: a window of the files, best-fit: whole documents, as many as "
        "fit, none: one document",
        choices=("concat", "best-fit", "none"),
    )
    document_mask: bool | None = option(
        _DATA,
        None,
        "Keep attention and positions within a document; on if not given with --packing best-fit "
        "and none",
    )
    document_separator: int | None = option(
        _DATA,
        None,
        "Id of the token that ends a document, for token files that have no .docs file",
        min=0,
    )
    train_seed: int = option(
        _DATA, 0x83B45442, "Seed of the order of the training data", min=0, max=2**64 - 1
    )
    eval_seed: int = option(
        _DATA, 0x384B4524, "Seed of the order of the validation data", min=0, max=2**64 - 1
    )
    batch_size: int = option(_DATA, 4, "Sequences per GPU and micro-step", alias="batch", min=1)
    seq_len: int = option(
        _DATA, 1024, "Tokens per sequence, a multiple of 4", alias="seq-length", min=4
    )
    grad_accumulation: int = option(_DATA, 4, "Micro-steps per optimizer step", min=1)
    steps: int = option(
        _DATA,
        -1,
        "Optimizer steps in all, resumed ones included; -1: as many as --epochs gives",
        min=-1,
    )
    epochs: int | None = option(
        _DATA, None, "Passes over the training data, 1 if neither this nor --steps is given", min=1
    )
    eval_every_n_steps: int = option(
        _DATA, 100, "Steps between validations; 0 or less: only at new epochs and at the end"
    )
    eval_num_steps: int = option(
        _DATA, 100, "Batches of a periodic validation; the final one takes all sequences", min=1
    )

    learning_rate: float = option(_OPTIMIZER, 1e-5, "Highest learning rate", alias="lr", min=0)
    warmup: int = option(_OPTIMIZER, 0, "Steps of linear warm-up", min=0)
    cooldown: int = option(_OPTIMIZER, 0, "Steps of the final anneal to zero", min=0)
    final_lr_fraction: float = option(
        _OPTIMIZER, 1.0, "Where cosine and linear end, as a fraction of the learning rate", min=0
    )
    lr_schedule: str = option(
        _OPTIMIZER,
        "cosine",
        "Course of the learning rate between warm-up and cooldown",
        choices=SCHEDULES,
    )
    beta_1: float = option(_OPTIMIZER, 0.9, "AdamW: decay of the first moment", min=0)
    beta_2: float = option(_OPTIMIZER, 0.95, "AdamW: decay of the second moment", min=0)
    adam_epsilon: float = option(
        _OPTIMIZER, 1e-8, "AdamW: added to the root of the second moment; more than 0"
    )
    opt_m_dtype: str = dtype_option(
        _OPTIMIZER,
        "fp32",
        "AdamW: format of the first moment; e4m3: with a scale per 128 elements",
        "e4m3",
    )
    opt_v_dtype: str = dtype_option(
        _OPTIMIZER,
        "fp32",
        "AdamW: format of the second moment; e4m3: with a scale per 128 elements",
        "e4m3",
    )
    weight_decay: float = option(_OPTIMIZER, 0.1, "AdamW: decay of the matrices", min=0)
    grad_clip: float = option(
        _OPTIMIZER, 1.0, "Longest gradient norm, longer ones are scaled down; 0: off", min=0
    )
    z_loss: float = option(
        _OPTIMIZER,
        0.0,
        "Weight of the squared log-sum-exp of the logits in the loss",
        min=0,
        max=1e3,
    )

    eval_task: tuple[str, ...] = option(
        _EVALUATION,
        (),
        "Task of llmq eval to evaluate on in the run, FILE or KIND=FILE; may be repeated",
        parse=parse_repeated,
    )
    task_every: int = option(
        _EVALUATION, -1, "Steps between evaluations on tasks; 0 or less: only at the end"
    )
    task_limit: int | None = option(
        _EVALUATION, None, "Take only as many records of each task, from its start", min=1
    )
    sample_prompt: tuple[str, ...] = option(
        _EVALUATION,
        (),
        "Text to continue in the run, as a sample; may be repeated",
        parse=parse_repeated,
    )
    sample_every: int = option(_EVALUATION, -1, "Steps between samples; 0 or less: only at the end")
    sample_tokens: int = option(_EVALUATION, 64, "Longest continuation of a sample", min=1)

    name: str = option(
        _OUTPUT, "llmq", "Name of the run, replaces %n in the paths below", parse=parse_name
    )
    out_dir: Path = option(_OUTPUT, Path("output/%n"), "Directory of the final model")
    checkpoint_dir: Path = option(_OUTPUT, Path("ckpt/%n"), "Directory of checkpoints")
    ckpt_interval: int = option(_OUTPUT, 100, "Steps between checkpoints; 0 or less: none")
    ckpt_keep_n: int = option(
        _OUTPUT,
        3,
        "Newest checkpoints to keep beside those of --ckpt-major, older ones are deleted; 0 or "
        "less: all",
    )
    ckpt_major: int = option(
        _OUTPUT, -1, "Checkpoints whose step is a multiple of this are never deleted; -1: none"
    )
    keep_best: str | None = option(
        _OUTPUT,
        None,
        "Write and keep the checkpoint at which this was best: loss, NAME/loss of a named "
        "--eval-file, or TASK/METRIC of an --eval-task",
    )
    save_training_state: bool = option(_OUTPUT, True, "Write a checkpoint at the end too")
    continue_from: str | None = option(
        _OUTPUT,
        None,
        "Resume: the newest checkpoint, or the one of this step or path",
        flag="continue",
        parse=parse_continue,
    )
    overwrite: bool = switch(
        _OUTPUT, "Move aside what another run wrote to the same places, to NAME.old-1"
    )
    new_data: bool = switch(
        _OUTPUT, "With --continue: start the data anew, not where the checkpoint was"
    )
    log_file: Path | None = option(
        _OUTPUT, None, "JSON log; logs/%n-DATE.json with the time of the start if not given"
    )
    tensorboard: Path | None = option(
        _OUTPUT, None, "Directory into which the log is written for TensorBoard, as the run goes"
    )
    wandb: str | None = option(
        _OUTPUT, None, "Project of Weights & Biases to which the log is sent, as the run goes"
    )
    log_gpu_util: int = option(
        _OUTPUT, 25, "Steps between records of GPUs, or CPUs; 0: none", min=0
    )
    debug_log_allocations: int = option(
        _OUTPUT, -1, "Print every allocation of at least this many MiB; -1: none", min=-1
    )
    debug_time_breakdown: bool = switch(_OUTPUT, "Print the time of each part of each step")
    debug_log_abs_max: int = option(
        _OUTPUT,
        -1,
        "Steps between records of the largest values of fp8 tensors; without a number: every step",
        parse=parse_every,
        min=-1,
    )

    recompute_swiglu: bool = switch(_MEMORY, "In backward, compute the activation of the MLP again")
    recompute_norm: bool = switch(_MEMORY, "In backward, compute the norms again")
    recompute_ffn: bool = switch(
        _MEMORY, "In backward, compute the MLP again; implies --recompute-swiglu"
    )
    recompute_qkv: bool = switch(_MEMORY, "In backward, compute queries, keys and values again")
    recompute_att: bool = switch(
        _MEMORY, "In backward, compute attention again; implies --recompute-qkv"
    )
    recompute_block: bool = switch(
        _MEMORY, "In backward, compute the whole block again; implies all of the above"
    )
    recompute_layers: str = option(
        _MEMORY,
        "all",
        "Layers that recompute, such as 0-11,20; all: every layer",
        parse=parse_layers,
    )
    lmhead_chunks: int = option(_MEMORY, 1, "Parts in which logits are made; divides B*T", min=1)
    attn_bwd_chunks: int = option(
        _MEMORY,
        1,
        "Parts of the backward pass of attention, or fewer that take no more memory; divides the "
        "batch size, or is a multiple of it: then cuDNN divides heads, too",
        min=1,
    )
    offload_residual: bool = switch(
        _MEMORY, "Keep the blocks' inputs in host memory until backward needs them"
    )
    offload_master: bool = switch(
        _MEMORY, "Keep the weights that the optimizer updates in host memory"
    )
    offload_opt_m: bool = switch(_MEMORY, "Keep AdamW's first moment in host memory")
    offload_opt_v: bool = switch(_MEMORY, "Keep AdamW's second moment in host memory")
    offload_gradients: bool = switch(
        _MEMORY, "Keep the blocks' gradients in host memory; needs sharded gradients"
    )
    offload_quants: bool = switch(_MEMORY, "Keep the persistent fp8 weights in host memory")
    persistent_quants: bool = switch(
        _MEMORY, "With sharded weights: keep them in fp8 too, made once per step"
    )
    keep_transposed: bool = option(
        _MEMORY, True, "Keep the fp8 weights transposed too; off: make them so in every backward"
    )
    use_zero_copy: bool = switch(
        _MEMORY, "Let the optimizer work in host memory directly, without copies"
    )
    write_combined: bool = switch(
        _MEMORY, "Take host memory that is faster for the GPU and slow for the CPU"
    )
    memory_limit: int | None = option(
        _MEMORY, None, "Use at most this much memory per device", parse=parse_size, min=1
    )

    device: str = option(
        _MACHINE,
        "auto",
        "Where to run; auto: on GPUs if there are any",
        choices=("auto", "cpu", "cuda"),
    )
    gpus: int = option(
        _MACHINE,
        0,
        "GPUs to use (on the CPU: threads, as if they were GPUs); 0: all GPUs, one thread",
        min=0,
        max=64,
    )
    use_cuda_graphs: bool = option(_MACHINE, True, "Record the GPU work once and replay it")
    attention: str = option(
        _MACHINE,
        "auto",
        "Attention kernels; auto: the faster ones that work here",
        choices=("auto", "cudnn", "native"),
    )
    tune: bool = option(_MACHINE, True, "Time candidates for products and attention at the start")
