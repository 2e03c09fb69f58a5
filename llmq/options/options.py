"""TrainConfig: every option of a training run, its name, default, help and limits, from which the
command line, files of options, the log and checkpoints are made. `rules.py` has what they mean for
each other."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from llmq.arch.model_config import ModelConfig
from llmq.options.derived import SCHEDULES, Derived, learning_rate
from llmq.options.loss_params import LOSS_PARAMS
from llmq.options.option_types import (
    ADAPTERS_GROUP,
    FP8_DTYPES,
    LORA_PARTS,
    LORA_TARGETS,
    LOSS_GROUP,
    MUONS,
    POSITIONS_GROUP,
    QUANTIZED,
    SIZES_GROUP,
    Option,
    dtype_option,
    option,
    options_of,
    parse_continue,
    parse_every,
    parse_layers,
    parse_lengths,
    parse_name,
    parse_numbers,
    parse_params,
    parse_parts,
    parse_patterns,
    parse_repeated,
    parse_rope,
    parse_size,
    parse_stages,
    parse_steps,
    parse_switch,
    parse_targets,
    parse_vocab_size,
    switch,
)
from llmq.options.rule import Rules
from llmq.options.rules import RULES, SHAKESPEARE


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig(Derived):
    """Options of one run. Build one with options_io.make_config, or directly and normalized()."""

    model: str = option(
        ".",
        "Directory, Hugging Face repository in the local cache, or preset with --from-scratch",
        group="Model",
    )
    download: bool = switch(
        "Fetch what of --model is not in the local cache from the Hugging Face hub"
    )
    revision: str | None = option(
        None, "Commit, branch or tag of the repository that --model names; a run keeps the commit"
    )
    from_scratch: bool = switch("Start from random weights")
    init_proj_to_zero: bool = switch("Start the attention-out and MLP-down matrices at zero")
    add_tokens: str | None = option(
        None,
        "Special tokens that the model gets behind its last ones, as its tokenizer got in `llmq "
        "tokenize`, with commas between them; their rows begin as the mean of the others",
    )
    text_only: bool = switch(
        "Leave out of exports the tensors of --model that are not trained, such as a vision tower"
    )
    model_dtype: str = dtype_option("bf16", "Format of weights and activations")
    master_dtype: str | None = dtype_option(None, "Format of the weights the optimizer updates")
    grad_accum_dtype: str | None = dtype_option(None, "Format in which gradients are summed")
    matmul_dtype: str | None = dtype_option(
        None, "Format in which the products of the blocks run", "e4m3", "int8"
    )
    gradient_dtype: str | None = dtype_option(
        None, "Format of output gradients in these products", *FP8_DTYPES, "int8"
    )
    head_dtype: str | None = dtype_option(
        None, "Format in which the LM head's products run", "e4m3"
    )
    mlp_dtype: str | None = dtype_option(
        None,
        "Format in which the MLP's activation gets what products write for it, forward and "
        "backward; e4m3: as fp8 codes",
        "e4m3",
    )
    fp8_recipe: str = option(
        "jit",
        "Scales of fp8 tensors; jit: from their own values, delayed: from those of earlier steps",
        choices=("jit", "delayed"),
    )
    fp8_fast_accumulation: str = option(
        "activations",
        "fp8 products that may sum with fewer bits, which is faster; activations: forward and the "
        "gradients of activations in blocks",
        choices=("none", "forward", "activations", "all"),
    )
    fp8_accumulate: str = option(
        "fp32",
        "Sums of the fp8 products that --fp8-fast-accumulation permits; fp16: of 64 in half "
        "precision, which GeForce cards multiply faster, of codes that are small enough",
        choices=("fp32", "fp16"),
    )
    allow_other_tokenizer: bool = option(
        False, "Train on the ids of another tokenizer than the model's or the checkpoint's"
    )
    seed: int = option(
        42, "Seed of the initial weights and of stochastic rounding", min=0, max=2**32 - 1
    )

    train_file: tuple[str, ...] = option(
        (f"{SHAKESPEARE}/train*.bin",),
        "Training token files, a glob pattern; may be given several times, also with weights: "
        "a.bin:0.7 b.bin:0.3",
        group="Data and shape",
    )
    eval_file: str | tuple[str, ...] | None = option(
        None,
        "Validation token files, a glob pattern; none: no validation; split: 0.02 of the "
        "training files, split:0.1 another part; {rule}; NAME=PATTERN, repeated: validations of "
        "their own",
        parse=parse_patterns,
    )
    packing: str = option(
        "concat",
        "What a sequence is; concat: a window of the files, best-fit: whole documents, as many as "
        "fit, none: one document; if not given best-fit for conversations of `llmq tokenize`",
        choices=("concat", "best-fit", "none"),
    )
    long: str | None = option(
        None,
        "Packed documents that are longer than --seq-len; cut: into parts, truncate: only their "
        "beginning, drop: not at all; if not given they are cut, and of conversations what has no "
        "question is left out",
        choices=("cut", "truncate", "drop"),
    )
    document_mask: bool | None = option(None, "Keep attention and positions within a document")
    document_separator: int | None = option(
        None, "Id of the token that ends a document, for token files that have no .docs file", min=0
    )
    data_order: str = option(
        "shuffle",
        "Order of the sequences; shuffle: those of all files together, llmq: of --packing concat "
        "file after file, each shuffled, as llm.q does",
        choices=("shuffle", "llmq"),
    )
    train_seed: int = option(
        0x83B45442, "Seed of the order of the training data", min=0, max=2**64 - 1
    )
    eval_seed: int = option(
        0x384B4524, "Seed of the order of the validation data", min=0, max=2**64 - 1
    )
    batch_size: int = option(4, "Sequences per GPU and micro-step", alias="batch", min=1)
    seq_len: int = option(
        1024,
        "Tokens per sequence, a multiple of 4; or lengths with the parts of the steps that have "
        "them, 1024:0.8,8192:0.2, with --batch-size that of the longest",
        alias="seq-length",
        parse=parse_lengths,
        min=4,
    )
    seq_stages: str | None = option(
        None,
        "The lengths of --seq-len with parts of the steps, as a checkpoint has them",
        parse=parse_stages,
    )
    drop_last: bool = switch(
        "Leave out the sequences at the end of an epoch that fill no step, as llm.q does"
    )
    grad_accumulation: int = option(4, "Micro-steps per optimizer step", min=1)
    steps: int = option(
        -1, "Optimizer steps in all, resumed ones included; -1: as many as --epochs gives", min=-1
    )
    epochs: int | None = option(None, "Passes over the training data, {rule}", min=1)
    eval_every_n_steps: int = option(
        100, "Steps between validations; 0 or less: only at new epochs and at the end"
    )
    eval_num_steps: int = option(
        100, "Batches of a periodic validation; the final one takes all sequences", min=1
    )

    eval_at_start: bool = switch("Evaluate, on tasks too, before the first step of the run")

    optimizer: str = option(
        "adamw",
        "Update rule; muon: for the matrices of blocks, and AdamW for all else; normuon: Muon with "
        "changes divided by the root of a mean square of each row",
        choices=("adamw", *MUONS),
        group="Optimizer and schedule",
    )
    learning_rate: float | None = option(None, "Highest learning rate", alias="lr", min=0)
    lr_parts: tuple[str, ...] = option(
        (),
        "Rates of parts beside the matrices of blocks, PART=RATE with commas between several, as "
        "--learning-rate if not given; embedding: the token table and learned positions, head: an "
        "LM head of its own, or a score head, vectors: norms, biases and other vectors, experts' "
        "routers and short convolutions",
        parse=parse_params,
    )
    warmup: float = option(
        0, "Steps of linear warm-up, or a part of the run as 5%", min=0, parse=parse_steps
    )
    cooldown: float | None = option(
        None,
        "Steps of the final anneal to zero, or a part of the run as 20%",
        min=0,
        parse=parse_steps,
    )
    final_lr_fraction: float | None = option(
        None, "Where cosine and linear end, as a fraction of the learning rate", min=0
    )
    lr_schedule: str | None = option(
        None,
        "Course of the learning rate between --warmup and --cooldown; cosine, linear: down to "
        "--final-lr-fraction, wsd: constant",
        choices=SCHEDULES,
    )
    beta_1: float = option(0.9, "AdamW: decay of the first moment", min=0, below=1)
    beta_2: float = option(0.95, "AdamW: decay of the second moment", min=0, below=1)
    adam_epsilon: float = option(1e-8, "AdamW: added to the root of the second moment; more than 0")
    opt_m_dtype: str = dtype_option(
        "fp32",
        "Format of AdamW's first moment, and of Muon's momentum; e4m3: with a scale per 128 "
        "elements",
        "e4m3",
    )
    opt_v_dtype: str = dtype_option(
        "fp32", "AdamW: format of the second moment; e4m3: with a scale per 128 elements", "e4m3"
    )
    weight_decay: float = option(0.1, "Decay of the matrices", min=0)
    muon_lr: float | None = option(
        None, "Muon: its highest learning rate, which takes the course of AdamW's; {rule}", min=0
    )
    ema: float = option(
        0.0,
        "Decay per step of a moving average of the weights, which is evaluated, sampled and "
        "exported in their place; 0: none",
        min=0,
        below=1,
    )
    grad_clip: float = option(
        1.0, "Longest gradient norm, longer ones are scaled down; 0: off", min=0
    )
    z_loss: float = option(
        0.0,
        "Weight of half the squared log-sum-exp of the logits in the loss, as in llm.q",
        min=0,
        max=1e3,
    )

    router_aux_loss: float | None = option(
        None,
        "Weight of the load-balancing loss of experts' routers; if not given, that of the model's "
        "config.json with --from-scratch, else 0",
        min=0,
        max=1e3,
    )
    router_z_loss: float = option(
        0.0,
        "Weight of the mean squared log-sum-exp of routers' logits in the loss",
        min=0,
        max=1e3,
    )

    loss: str = option(
        "ce",
        "What is minimized; ce: cross-entropy of tokens, or of a score head's classes; dpo, ipo, "
        "simpo, orpo: losses of pairs of answers, of which one is to be preferred; reward: that "
        "of a score head; kto: of answers with labels; weighted: cross-entropy of tokens, each "
        "times its score; kd: the divergence from a teacher",
        choices=tuple(LOSS_PARAMS),
        group=LOSS_GROUP,
    )
    num_labels: int | None = option(
        None,
        "Classes of a score head, which stands behind the last token of each document in the place "
        "of the LM head",
        min=1,
    )
    scores: Path | None = option(
        None,
        "Directory of `llmq score`, with what the reference model thinks of each token; dpo, ipo "
        "and kto score the data by the first weights if not given; of weighted each token's "
        "weight, of kd a teacher's --top-k",
    )
    loss_params: tuple[str, ...] = option(
        (),
        "Parameters of --loss, NAME=VALUE with commas between several; dpo: beta=0.1, smoothing=0 "
        "(part of the pairs taken for labelled wrong), normalize=false (answers compared by means "
        "over tokens, not sums), sft=0 (weight of the chosen answer's mean cross-entropy); ipo: "
        "beta=0.1, normalize=true, sft=0; simpo: beta=2, gamma=0.5 (margin), smoothing=0, "
        "normalize=true, sft=0; orpo: beta=0.1, sft=1; kto: beta=0.1, desirable=1, undesirable=1 "
        "(weights); kd: top-k=64 (probabilities of the teacher per token), mixture=0 (part of the "
        "data's own tokens), temperature=1, divergence=forward or reverse",
        parse=parse_params,
    )

    eval_task: tuple[str, ...] = option(
        (),
        "Task of llmq eval to evaluate on in the run, FILE or KIND=FILE; may be repeated",
        parse=parse_repeated,
        group="Evaluation in the run",
    )
    task_every: int = option(
        -1, "Steps between evaluations on tasks, and samples; 0 or less: only at the end"
    )
    sample_prompt: tuple[str, ...] = option(
        (),
        "Text to continue in the run, as a sample; may be repeated",
        parse=parse_repeated,
    )

    name: str = option(
        "llmq",
        "Name of the run, replaces %n in the paths below",
        parse=parse_name,
        group="Checkpoints and logs",
    )
    out_dir: Path = option(Path("output/%n"), "Directory of the final model")
    checkpoint_dir: Path = option(Path("ckpt/%n"), "Directory of checkpoints")
    ckpt_interval: int = option(100, "Steps between checkpoints; 0 or less: none")
    ckpt_keep_n: int = option(
        3,
        "Newest checkpoints to keep beside those of --ckpt-major, older ones are deleted; 0 or "
        "less: all",
    )
    ckpt_major: int = option(
        -1, "Checkpoints whose step is a multiple of this are never deleted; -1: none"
    )
    keep_best: str | None = option(
        None,
        "Write, keep and export the checkpoint at which this was best: loss, NAME/loss of a named "
        "--eval-file, or TASK/METRIC of an --eval-task",
    )
    stop_after: int = option(
        0,
        "End the run when so many measurements in a row of what --keep-best names have found no "
        "better value; 0: never",
        min=0,
    )
    export: str | None = option(
        None, "Model that is exported at the end, {rule}", choices=("best", "last")
    )
    save_training_state: bool = option(True, "Write a checkpoint at the end too")
    continue_from: str | None = option(
        None,
        "Resume: the newest checkpoint, or the one of this step or path",
        flag="continue",
        parse=parse_continue,
    )
    overwrite: bool = switch(
        "Move aside what another run wrote to the same places, to NAME.old-1; of bench: replace "
        "the report that is there"
    )
    new_data: bool = switch("Start the data anew, not where the checkpoint was")
    log_file: Path | None = option(
        None, "JSON log; logs/%n-DATE.json with the time of the start if not given"
    )
    tensorboard: Path | None = option(
        None, "Directory into which the log is written for TensorBoard, as the run goes"
    )
    wandb: str | None = option(
        None, "Project of Weights & Biases to which the log is sent, as the run goes"
    )
    log_gpu_util: int = option(25, "Steps between records of GPUs, or CPUs; 0: none", min=0)
    debug_log_allocations: int = option(
        -1, "Print every allocation of at least this many MiB; -1: none", min=-1
    )
    debug_time_breakdown: bool = switch("Print the time of each part of each step")
    debug_log_abs_max: int = option(
        -1,
        "Steps between records of the largest values of fp8 tensors; without a number: every step",
        parse=parse_every,
        min=-1,
    )

    recompute_swiglu: bool | None = option(
        None, "In backward, compute the activation of the MLP again", group="Memory"
    )
    recompute_norm: bool | None = option(None, "In backward, compute the norms again")
    recompute_ffn: bool = switch("In backward, compute the MLP again")
    recompute_qkv: bool = switch("In backward, compute queries, keys and values again")
    recompute_att: bool = switch("In backward, compute attention again")
    recompute_block: bool = switch("In backward, compute the whole block again")
    recompute_layers: str = option(
        "all", "Layers that recompute, such as 0-11,20; all: every layer", parse=parse_layers
    )
    lmhead_chunks: int | None = option(None, "Parts in which logits are made; divides B*T", min=1)
    attn_bwd_chunks: int = option(
        1,
        "Parts of the backward pass of attention, or fewer that take no more memory; divides the "
        "batch size, or is a multiple of it: then cuDNN divides heads, too",
        min=1,
    )
    offload_residual: bool = switch(
        "Keep the blocks' inputs in host memory until backward needs them"
    )
    offload_between: bool = switch("The same for the residual stream between the halves of blocks")
    offload_master: bool = switch(
        "Keep the weights that the optimizer updates, and the average of --ema, in host memory"
    )
    offload_opt_m: bool = switch("Keep AdamW's first moment, and Muon's momentum, in host memory")
    offload_opt_v: bool = switch("Keep AdamW's second moment in host memory")
    offload_gradients: bool = switch("Keep the blocks' gradients in host memory")
    offload_quants: bool = switch("Keep the persistent fp8 weights in host memory")
    persistent_quants: bool = switch("Keep them in fp8 too, made once per step")
    keep_transposed: bool = option(
        True, "Keep the fp8 weights transposed too; off: make them so in every backward"
    )
    use_zero_copy: bool = switch("Let the optimizer work in host memory directly, without copies")
    write_combined: bool = switch(
        "Take host memory that is faster for the GPU and slow for the CPU"
    )
    memory_limit: int | None = option(
        None, "Use at most this much memory per device", parse=parse_size, min=1
    )

    device: str = option(
        "auto",
        "Where to run; auto: on GPUs if there are any",
        choices=("auto", "cpu", "cuda"),
        group="Machine",
    )
    gpus: int = option(
        0,
        "GPUs to use (on the CPU: threads, as if they were GPUs); 0: all GPUs, one thread",
        min=0,
        max=64,
    )
    use_cuda_graphs: bool = option(True, "Record the GPU work once and replay it")
    attention: str = option(
        "auto",
        "Attention kernels; auto: the faster ones that work here",
        choices=("auto", "cudnn", "native"),
    )
    tune: bool = option(True, "Time candidates for products and attention at the start")

    zero_level: int = option(
        1,
        "What is divided among GPUs; 1: the optimizer, 2: also gradients, 3: also weights",
        min=0,
        max=3,
        group="Several GPUs",
    )
    shard_over: str = option(
        "machine", "Divide among GPUs of a machine, or of all", choices=("machine", "world")
    )
    shard_weights: bool = switch(
        "Divide the blocks' weights; on one GPU: keep two blocks in work memory"
    )
    shard_gradients: bool = switch(
        "Divide the blocks' gradients; on one GPU: keep two blocks in work memory"
    )
    memcpy_all_gather: bool = switch("Gather weights by copies instead of NCCL")
    memcpy_send_recv: bool = switch("Exchange gradients by copies instead of NCCL")
    mirror_weights: bool = switch(
        "Keep sharded weights in host memory too, where GPUs read them that cannot copy directly"
    )
    all_to_all_reduce: bool = switch("Exchange gradients and sum them here, in a fixed order")
    p2p: str = option(
        "auto",
        "Copies between GPUs; on: direct, off: through host memory, auto: by a test at the start",
        parse=parse_switch,
        choices=("auto", "on", "off"),
    )
    watchdog: int = option(300, "Seconds without progress after which a run stops; 0: never", min=0)

    guard: str = option(
        "warn",
        "What follows a step whose loss or gradient norm is far above what is usual; warn: a line, "
        "skip: no update, rollback: no update, and where that does not help back to the newest "
        "good checkpoint, past the data since then; off: nothing",
        choices=("off", "warn", "skip", "rollback"),
        group="Keeping a run",
    )
    ckpt_every_minutes: float = option(
        0.0, "Minutes without a checkpoint after which one is written, too; 0: any", min=0
    )
    ckpt_background: bool = switch(
        "Write checkpoints while training goes on, from a copy of the state in host memory, which "
        "takes as much of it as a checkpoint of the disk"
    )
    ckpt_required: int = option(
        0,
        "End the run, with an error, after so many checkpoints in a row that could not be written; "
        "0: go on",
        min=0,
    )
    max_hours: float = option(
        0.0,
        "End, with a checkpoint that is complete by then, after so many hours, with exit status "
        "75; 0: never",
        min=0,
    )
    force: bool = switch("Export the model also where it computes infinities or NaNs")

    vocab_size: int | str | None = option(
        None,
        "Token ids; auto: as many as the tokenizer of the training files has",
        parse=parse_vocab_size,
        group=SIZES_GROUP,
    )
    hidden_size: int | None = option(None, "Channels of the residual stream", min=1)
    intermediate_size: int | None = option(None, "Width of the MLP", min=1)
    num_experts: int | None = option(None, "Experts of each layer that has any", min=1)
    active_experts: int | None = option(
        None, "Experts that a token meets", alias="num-experts-per-tok", min=1
    )
    expert_size: int | None = option(
        None, "Width of an expert", alias="moe-intermediate-size", min=1
    )
    num_layers: int | None = option(None, "Transformer blocks", alias="num-hidden-layers", min=1)
    num_heads: int | None = option(None, "Query heads", alias="num-attention-heads", min=1)
    num_kv_heads: int | None = option(
        None, "Key and value heads", alias="num-key-value-heads", min=1
    )
    head_dim: int | None = option(None, "Channels of one head", min=1)
    max_positions: int | None = option(
        None,
        "Longest sequence in tokens",
        alias="max-position-embeddings",
        min=1,
        group=POSITIONS_GROUP,
    )
    rope_theta: float | None = option(None, "Base of the rotary frequencies")
    rope_scaling: str | None = option(
        None,
        "How rotary frequencies are stretched: yarn:4, or the fields of config.json's "
        "rope_parameters; none: not",
        parse=parse_rope,
    )
    tie_embeddings: bool | None = option(
        None, "Use the embedding matrix as LM head", alias="tie-word-embeddings", group=SIZES_GROUP
    )

    lora_rank: int = option(
        0,
        "Train adapters of this rank and leave the model as it is; 0: no",
        min=0,
        group=ADAPTERS_GROUP,
    )
    lora_alpha: float | None = option(None, "Numerator of the adapters' scaling", above=0)
    lora_targets: str | None = option(
        None,
        "Matrices that get adapters, all (those of blocks but experts) or some of "
        f"{', '.join(LORA_TARGETS)}, or a regular expression of modules' names",
        parse=parse_targets,
    )
    lora_layers: str = option(
        "all", "Layers that get adapters, all, or numbers and ranges: 0-11,20", parse=parse_layers
    )
    lora_rank_pattern: tuple[str, ...] = option(
        (),
        "Other ranks of modules, by regular expressions of their names' ends: down_proj=32",
        parse=parse_numbers,
    )
    lora_alpha_pattern: tuple[str, ...] = option(
        (), "Other numerators of the scaling, as --lora-rank-pattern", parse=parse_numbers
    )
    lora_dora: bool = switch(
        "Train the magnitude of each adapted row of the model beside its direction (DoRA)"
    )
    lora_dropout: float | None = option(
        None, "Part of the adapters' inputs that training sets to zero", min=0, below=1
    )
    lora_scaling: str | None = option(
        None,
        "Scaling of the adapters; {rule}: alpha / rank, rs: alpha / sqrt(rank)",
        choices=("standard", "rs"),
    )
    lora_plus: float = option(1.0, "Learning rate of the adapters' B over that of A", above=0)
    base_dtype: str | None = dtype_option(
        None,
        "Format in which the blocks' matrices beside the adapters are kept; {rule}. e4m3: 8 bits, "
        "for fp8 products; int8: 8 bits, for products of cards without fp8; nf4: 4 bits in blocks "
        "of 64, as QLoRA's; mxfp4: experts in 4 bits, as gpt-oss's files have, the rest "
        "in bf16",
        *QUANTIZED,
    )
    adapter: Path | None = option(
        None, "Directory of adapters in PEFT's format to go on from; what is not given is as there"
    )
    train: tuple[str, ...] | None = option(
        None,
        f"Parts of the model that are trained beside adapters, some of {', '.join(LORA_PARTS)}",
        parse=parse_parts,
    )

    only_scores: bool = False
    """No option: the command asks a model for losses, and trains nothing."""
    token_weights: bool = False
    """No option: the token files have weights of tokens, which the loss takes."""

    def normalized(self, now: datetime | None = None) -> TrainConfig:
        """With what is implied written out: spellings, formats, recomputation, %n, files; once more
        changes nothing. now: the start of the run for the log's name, in UTC. ConfigError for
        values of a wrong type."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name, opt in OPTIONS.items():
            if values[name] is not None:
                values[name] = opt.convert(values[name])
        if values["log_file"] is None:
            start = (now or datetime.now(UTC)).strftime("%Y-%m-%dT%H_%M_%S")
            values["log_file"] = Path(f"logs/%n-{start}.json")
        for name in ("out_dir", "checkpoint_dir", "log_file"):
            values[name] = Path(str(values[name]).replace("%n", values["name"]))
        made = TrainConfig(**values)
        RULES.imply(made)
        return made

    def validate(self) -> TrainConfig:
        """Return self; ConfigError names a flag that is out of range or contradicts another."""
        for name, opt in OPTIONS.items():
            if getattr(self, name) is not None or _DEFAULTS[name] is not None:
                opt.check(getattr(self, name))
        RULES.check(self)
        return self

    def validate_with(self, model: ModelConfig) -> TrainConfig:
        """Return self. validate(), and the options against the model they are for."""
        self.validate()
        RULES.check(self, model=model)
        return self

    def check_total(self, steps: int) -> None:
        """ConfigError if the cooldown is longer than the whole run, of so many steps."""
        RULES.check(self, total=steps)

    def rate(self, step: int, steps: int) -> float:
        """The learning rate of a step, counted from 0, of a run of so many."""
        return learning_rate(
            step,
            steps=steps,
            base=self.learning_rate,
            warmup=self.warmup_of(steps),
            cooldown=self.cooldown_of(steps),
            final_fraction=self.final_lr_fraction,
            schedule=self.lr_schedule,
        )


def options_with_rules(config_class: type, rules: Rules = RULES) -> dict[str, Option]:
    """How each field is set, by field name, in the order of --help, with what rules add to that."""
    found = options_of(config_class)
    return {name: replace(opt, help=rules.help(name, opt.help)) for name, opt in found.items()}


OPTIONS: dict[str, Option] = options_with_rules(TrainConfig)
"""How each field of TrainConfig is set, by field name, in the order of --help."""

_DEFAULTS = {field.name: field.default for field in dataclasses.fields(TrainConfig)}

USUAL = (
    "model from_scratch vocab_size matmul_dtype lora_rank train_file eval_file packing batch_size "
    "seq_len grad_accumulation steps epochs eval_every_n_steps learning_rate warmup name "
    "continue_from device gpus"
).split()
"""Options that most runs are told with, which --help shows; the others are in --help-all."""

ONCE = ("download", "continue_from", "overwrite", "new_data", "force")
"""Options of one command, not of the run: the next command begins without them."""
