"""Run options: checkpoints, evaluations, logs, and the end of a run, with their rules."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from llmq.options.conditions import measured_before_end, writes
from llmq.options.option_types import (
    option,
    parse_continue,
    parse_every,
    parse_name,
    parse_repeated,
    switch,
)
from llmq.options.rule import default, idle, refused, without


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of checkpoints, evaluations, logs, and the end of a run."""

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
    save_training_state: bool | None = option(
        None,
        "Write a checkpoint at the end too; if not given, where the run has another one",
        alias="ckpt-final",
    )
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
    log_file: Path | None = option(
        None, "JSON log; logs/%n-DATE.json with the time of the start if not given"
    )
    tensorboard: Path | None = option(
        None, "Directory into which the log is written for TensorBoard, as the run goes"
    )
    wandb: str | None = option(
        None, "Project of Weights & Biases to which the log is sent, as the run goes"
    )
    log_format: str = option(
        "auto",
        "Lines of steps on a terminal; auto: short ones above the live view, llmq: those of llm.q, "
        "which files and pipes always have",
        choices=("auto", "llmq"),
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
    eval_every_n_steps: int = option(
        100,
        "Steps between validations; 0 or less: only at new epochs and at the end",
        group="Evaluation in the run",
    )
    eval_num_steps: int = option(
        100, "Batches of a periodic validation; the final one takes all sequences", min=1
    )
    eval_at_start: bool = switch("Evaluate, on tasks too, before the first step of the run")
    eval_task: tuple[str, ...] = option(
        (),
        "Task of llmq eval to evaluate on in the run, FILE or KIND=FILE; may be repeated",
        parse=parse_repeated,
    )
    task_every: int = option(
        -1, "Steps between evaluations on tasks, and samples; 0 or less: only at the end"
    )
    sample_prompt: tuple[str, ...] = option(
        (),
        "Text to continue in the run, as a sample; may be repeated",
        parse=parse_repeated,
    )
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


RUN_RULES = (
    default(
        "keep_best",
        lambda o: "loss",
        lambda v, o: o.stop_after > 0,
        help="loss if not given with --stop-after",
    ),
    default(
        "export",
        lambda o: "last" if o.keep_best is None else "best",
        help="if not given the best with --keep-best",
    ),
    *refused(
        "eval_task sample_prompt",
        lambda v, o: v and o.head == "score",
        "a model with a score head predicts no tokens",
    ),
    *refused(
        "export",
        lambda v, o: v == "best" and o.keep_best is None,
        "best is known with --keep-best METRIC alone: give a metric, or --export last",
    ),
    *refused(
        "guard",
        lambda v, o: v == "rollback" and o.ckpt_interval <= 0,
        "rollback needs --ckpt-interval above 0, to have checkpoints to go back to",
    ),
    *refused(
        "continue_from",
        lambda v, o, script: v is not None,
        "has no effect here, call load() of the trainer instead",
    ),
    *refused(
        "continue_from",
        lambda v, o, verification: v is not None,
        "a verification starts with the model's weights: leave it out",
    ),
    *idle(
        "ckpt_major",
        lambda v, o: v > 0 and o.ckpt_keep_n <= 0,
        "--ckpt-major has no effect with --ckpt-keep-n {ckpt_keep_n}: nothing is deleted",
        last_word=True,
    ),
    *idle(
        "ckpt_keep_n",
        lambda v, o: v > 0 and not (writes(o) or o.max_hours > 0),
        "--ckpt-keep-n {value} has no effect without --ckpt-interval and --save-training-state: no "
        "checkpoints are written",
    ),
    *without("ckpt_required ckpt_major", writes, "--ckpt-interval and --save-training-state"),
    *idle(
        "ckpt_background",
        lambda v, o: not (writes(o) or o.keep_best is not None),
        "--ckpt-background has no effect but for checkpoints that are asked for: neither "
        "--ckpt-interval nor --ckpt-every-minutes writes any",
    ),
    *without(
        "task_every", lambda o: o.eval_task or o.sample_prompt, "--eval-task or --sample-prompt"
    ),
    *without(
        "eval_at_start",
        lambda o: o.validates or o.eval_sets or o.eval_task,
        "--eval-file or --eval-task",
    ),
    *without("debug_log_abs_max fp8_fast_accumulation", lambda o: o.is_fp8, "--matmul-dtype e4m3"),
    *without("ternary_of", lambda o: o.matmul_dtype == "ternary", "--matmul-dtype ternary"),
    *idle(
        "eval_every_n_steps eval_num_steps eval_seed",
        lambda v, o, length: v > 0 and not (o.validates or o.eval_sets),
        "has no effect without --eval-file",
    ),
    *idle(
        "eval_num_steps",
        lambda v, o, length: (
            (o.validates or o.eval_sets)
            and not 0 < o.eval_every_n_steps < length.steps
            and length.steps <= length.steps_per_epoch
        ),
        "--eval-num-steps {value} has no effect: the only validation is the final one, of all "
        "sequences",
    ),
    *idle(
        "stop_after",
        lambda v, o, length: v > 0 and v >= measured_before_end(o, length),
        "has no effect: the run measures {keep_best} too few times before its end",
    ),
    # Only runs measure these; verification does not.
    *idle(
        "debug_log_abs_max debug_log_allocations debug_time_breakdown",
        lambda v, o, measuring: True,
        "without effect on a verification",
    ),
)
