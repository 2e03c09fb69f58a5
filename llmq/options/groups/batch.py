"""Batch options: the shape of a step and the number of steps, with their rules."""

from __future__ import annotations

from dataclasses import dataclass

from llmq.arch.head_shares import HeadShares, head_shares
from llmq.arch.model_config import Heads
from llmq.options.conditions import why_undivided, wrong_lengths
from llmq.options.option_types import lengths_of, option, parse_lengths, parse_stages
from llmq.options.rule import IMPLY, REFUSE, Rule, default, each, idle, refused


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """Options of a step's shape, and the number of steps."""

    batch_size: int = option(
        4, "Sequences per GPU and micro-step", alias="batch", min=1, group="Batch and length"
    )
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
    context_parallel: int = option(
        1, "GPUs that divide each sequence among them: --batch-size is that of all of them", min=1
    )
    document_mask: bool | None = option(None, "Keep attention and positions within a document")
    grad_accumulation: int = option(4, "Micro-steps per optimizer step", min=1)
    steps: int = option(
        -1, "Optimizer steps in all, resumed ones included; -1: as many as --epochs gives", min=-1
    )
    epochs: int | None = option(None, "Passes over the training data, {rule}", min=1)

    @property
    def local_seq_len(self) -> int:
        """Tokens T of a sequence on one device; `seq_len` is the length in the data."""
        return self.seq_len // max(self.context_parallel, 1)  # 0 is refused later

    @property
    def micro_tokens(self) -> int:
        """Tokens of a micro-step on one rank."""
        return self.batch_size * self.local_seq_len

    def local_heads(self, heads: Heads) -> Heads:
        """Return the numbers of heads whose attention one device computes, over whole sequences."""
        shares = self.head_shares(heads)
        return Heads(len(shares.queries[0]), len(shares.keys[0]), heads.channels)

    def head_shares(self, heads: Heads) -> HeadShares:
        """Return the heads of each of the GPUs that divide sequences."""
        return head_shares(heads.query, heads.kv, self.context_parallel)


BATCH_RULES = (
    # Plans use the longest length; `stages_of` has the others.
    Rule(
        option="seq_len",
        effect=IMPLY,
        when=lambda v, o: isinstance(v, str),
        sets=lambda o: {"seq_stages": o.seq_len, "seq_len": max(lengths_of(str(o.seq_len)))[0]},
    ),
    default(
        "epochs",
        lambda o: 1,
        lambda v, o: o.steps < 0,
        help="1 if neither this nor --steps is given",
    ),
    default(
        "document_mask",
        lambda o: o.packing != "concat",
        help="on if not given with --packing best-fit and none",
    ),
    *idle(
        "steps",
        lambda v, o: 0 <= v < o.warmup_of(v) + o.cooldown_of(v),
        "--warmup {warmup} and --cooldown {cooldown} do not fit into --steps {value}",
    ),
    *refused("seq_len", lambda v, o: v % 4, "must be a multiple of 4, got {value}"),
    *each("seq_stages", REFUSE, lambda v, o: v and wrong_lengths(o), "--seq-len: {found}"),
    *refused(
        "context_parallel",
        lambda v, o: v > 1 and o.seq_len % (4 * v),
        "--seq-len must be a multiple of 4 on each GPU, got {seq_len} on {value}",
    ),
    *refused(
        "context_parallel",
        lambda v, o: v > 1 and (o.head == "score" or o.loss not in ("ce", "kd", "weighted")),
        "losses of pairs, samples and labels read whole sequences",
    ),
    *refused(
        "context_parallel",
        lambda v, o: v > 1 and o.eval_task,
        "--eval-task scores whole sequences: use `llmq eval` after the run",
    ),
    *each(
        "context_parallel",
        REFUSE,
        lambda v, o, model: v > 1 and why_undivided(o, model),
        "--context-parallel {value}: {found}",
    ),
    *refused(
        "epochs", lambda v, o: v is not None and o.steps >= 0, "excludes --steps, give one of them"
    ),
    *refused(
        "seq_len",
        lambda v, o, model: v > model.longest,
        "{value} exceeds the model's {model.longest} positions: --max-positions and "
        "--rope-scaling give it others",
    ),
    *each(
        "seq_stages",
        REFUSE,
        lambda v, o, script: v,
        "--seq-len: has several lengths in `llmq train` alone: make a trainer for each",
    ),
    *idle(
        "steps",
        lambda v, o, verification: True,
        "has no effect on a verification, which takes --verify-steps {verification}",
    ),
    *idle(
        "epochs",
        lambda v, o, verification: v != 1,
        "has no effect on a verification, which takes --verify-steps {verification}",
    ),
)
