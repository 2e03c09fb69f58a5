"""Properties that several readers derive from the options of a run."""

import math
import re
from pathlib import Path
from typing import Any

from llmq.options.conditions import why_weights_stay
from llmq.options.loss_params import loss_values, part_rates
from llmq.options.option_types import (
    MUONS,
    NEW_PARTS,
    NONE,
    PREFERENCES,
    QUANTIZED,
    REFERENCED,
    named_pattern,
    split_part,
    split_weights,
)


class Derived:
    """The properties of TrainConfig that follow from its fields."""

    __slots__ = ()

    @property
    def local_seq_len(self) -> int:
        """Tokens of a sequence that one device computes, T of its tensors; `seq_len` is what the
        data have. They are the same as long as no axis of the mesh divides sequences."""
        return self.seq_len

    @property
    def splits(self) -> bool:
        """True if the validation data are a part of the training files."""
        return self.eval_fraction is not None

    @property
    def eval_fraction(self) -> float | None:
        """Part of the training files that is validation data, 0 to 1; None for other files."""
        return split_part(self.eval_pattern)

    @property
    def eval_pattern(self) -> str:
        """The pattern that --eval-file has without a name; NONE where all its patterns have one."""
        return self._eval_patterns.get("", NONE)

    @property
    def eval_sets(self) -> dict[str, str]:
        """Named patterns of validation files beside it."""
        return {name: pattern for name, pattern in self._eval_patterns.items() if name}

    @property
    def _eval_patterns(self) -> dict[str, str]:
        given = self.eval_file if isinstance(self.eval_file, tuple) else (self.eval_file,)
        return dict(map(named_pattern, given))

    @property
    def validates(self) -> bool:
        """Whether there are validation files without a name."""
        return self.eval_pattern != NONE

    @property
    def train_patterns(self) -> list[str]:
        """The glob patterns of --train-file, without weights."""
        return split_weights(self.train_file)[0]

    @property
    def all_patterns(self) -> list[str]:
        """Patterns of all token files, of training and of validations."""
        own = [self.eval_pattern] if self.validates and not self.splits else []
        return [*self.train_patterns, *own, *self.eval_sets.values()]

    @property
    def train_weights(self) -> tuple[float, ...] | None:
        """The weights of these patterns; None if they have none, or there is only one."""
        return split_weights(self.train_file)[1]

    @property
    def micro_tokens(self) -> int:
        """Tokens of a micro-step on one rank."""
        return self.batch_size * self.local_seq_len

    @property
    def chunk_tokens(self) -> int:
        """Tokens whose logits are made at a time."""
        return self.micro_tokens // self.lmhead_chunks

    @property
    def recomputes(self) -> bool:
        """Whether backward computes anything again."""
        names = ("swiglu", "norm", "ffn", "qkv", "att", "block")
        return any(getattr(self, f"recompute_{name}") for name in names)

    @property
    def has_adapters(self) -> bool:
        """Whether adapters are trained, and the model stays as it is."""
        return bool(self.lora_rank) and not self.only_scores

    @property
    def freezes_model(self) -> bool:
        """Whether the model stays as it is: adapters are trained, or nothing."""
        return self.has_adapters or self.only_scores

    @property
    def wants_adapters(self) -> bool:
        """Whether has_adapters holds, or they are to be read, with their rank, from --adapter."""
        return self.has_adapters or self.adapter is not None

    @property
    def trains_new_rows(self) -> bool:
        """Whether rows of new tokens are trained beside adapters, and no others."""
        return self.has_adapters and not {*NEW_PARTS}.isdisjoint(self.train)

    @property
    def pairs(self) -> str | None:
        """The unit of the loss: pairs of "answers", answers with "labels", or None, tokens."""
        return "answers" if self.loss in PREFERENCES else "labels" if self.loss == "kto" else None

    @property
    def head(self) -> str:
        """Head of the model: "score" for classes and rewards, else "lm"."""
        return "score" if self.loss == "reward" or self.num_labels is not None else "lm"

    @property
    def loss_values(self) -> dict[str, Any]:
        """Parameters of the loss by name, such as "beta" and "top-k"."""
        return loss_values(self.loss, self.loss_params)

    @property
    def has_reference(self) -> bool:
        """Whether the loss reads log-probabilities of a reference model."""
        return self.loss in REFERENCED

    @property
    def scores_folder(self) -> Path | None:
        """The folder of the scores that the loss reads, if it does: that of --scores, or what the
        run makes of its first weights."""
        if self.has_reference:
            return self.scores or self.checkpoint_dir / "reference"
        return self.scores if self.loss in ("kd", "weighted") else None

    @property
    def is_fp8(self) -> bool:
        """Whether products of the blocks multiply fp8 codes."""
        return self.matmul_dtype == "e4m3"

    @property
    def codes_weights(self) -> bool:
        """Whether fp8 codes are made of the blocks' weights after every update."""
        return self.is_fp8 and not self.freezes_model

    @property
    def is_quantized(self) -> bool:
        """Whether the model beside the adapters is kept as codes."""
        return self.freezes_model and self.base_dtype in QUANTIZED

    @property
    def has_transposed(self) -> bool:
        """Whether there are codes of weights in two layouts."""
        return self.is_fp8 or self.matmul_dtype == self.base_dtype == "int8"

    @property
    def lora_scale(self) -> float:
        """The factor of B @ A."""
        root = math.sqrt(self.lora_rank) if self.lora_scaling == "rs" else self.lora_rank
        return self.lora_alpha / root

    def warmup_of(self, steps: int) -> int:
        """Steps of warm-up of a run with this number of steps."""
        return _count(self.warmup, steps)

    def cooldown_of(self, steps: int) -> int:
        """Steps of the cooldown of a run with this number of steps."""
        return _count(self.cooldown, steps)

    def course(self, steps: int) -> str:
        """The learning rates of a run with this number of steps, in words such as
        "1e-5, 20 steps of warm-up, cosine to 0"."""
        warmup, cooldown = self.warmup_of(steps), self.cooldown_of(steps)
        fraction = 1 if self.lr_schedule == "wsd" else self.final_lr_fraction
        floor = _short(self.learning_rate * fraction)
        words = [_short(self.learning_rate)]
        if self.optimizer in MUONS and self.muon_lr != self.learning_rate:
            words[0] += f" (Muon {_short(self.muon_lr)})"
        words += [f"{_steps(warmup)} of warm-up"] if warmup else []
        words += ["constant" if fraction == 1 else f"{self.lr_schedule} to {floor}"]
        words += [f"{_steps(cooldown)} of cooldown to 0"] if cooldown else []
        return ", ".join(words)

    def rate_factor(self, slab: str) -> float:
        """By how much the learning rate of a slab, which AdamW updates, is more than that of the
        run."""
        if slab == "lora_b":
            return self.lora_plus
        rates = part_rates(self.lr_parts)
        own = {"embed": rates.get("embedding"), "head": rates.get("head")}
        own |= dict.fromkeys(("vectors", "norms", "biases"), rates.get("vectors"))
        rate = own.get(slab)
        return 1.0 if rate is None else rate / self.learning_rate

    @property
    def own_master(self) -> bool:
        """Whether the optimizer updates weights of another format than the model's."""
        return self.master_dtype != self.model_dtype

    @property
    def gathered(self) -> tuple[str, bool] | None:
        """The source that streamed blocks are gathered from: format, whether in host memory.

        None: codes are made from masters at each gather.
        """
        if self.freezes_model:  # of blocks that are not trained there is nothing else
            return self.base_dtype, self.offload_master
        if self.is_fp8:
            return ("e4m3", self.offload_quants) if self.persistent_quants else None
        return self.model_dtype, self.offload_master and not self.own_master

    def streams_weights(self, shards: int) -> bool:
        """Whether blocks take turns in slots of work weights, with so many shards."""
        return self.shard_weights and why_weights_stay(self, shards) is None

    def has_masters(self, shards: int) -> bool:
        """Whether the optimizer updates other tensors of the blocks than products read."""
        return self.codes_weights or self.own_master or self.streams_weights(shards)

    def shards(self, world_size: int, machines: int = 1) -> int:
        """In how many parts the ranks keep the state: as many as there are, or as a machine has.

        machines: among which the ranks are divided equally.
        """
        return world_size if self.shard_over == "world" else world_size // machines


def _count(given: float, steps: int) -> int:
    """Number of steps. given: steps, or below 1 a part of all `steps`."""
    return int(given) if given >= 1 else round(given * steps)


def _steps(count: int) -> str:
    return f"{count} step{'s' * (count != 1)}"


def _short(number: float) -> str:
    """Text of a learning rate without zeros in front of the exponent: 1e-5, not 1e-05."""
    return re.sub(r"e([+-])0+", r"e\1", f"{number:g}")


SCHEDULES = ("cosine", "linear", "wsd")


def learning_rate(
    step: int,
    *,
    steps: int,
    base: float,
    warmup: int = 0,
    cooldown: int = 0,
    final_fraction: float = 1.0,
    schedule: str = "cosine",
) -> float:
    """Learning rate of one step out of range(steps), in the units of base.

    Three phases, with E = steps - cooldown, or 0 where the cooldown is longer than the run:
        step < warmup   rises by base / warmup per step; step 0 has 0
        step < E        cosine or linear: from base down to the floor, base * final_fraction, which
                        step E - 1 has exactly (a phase of a single step stays at base); wsd: base
        step >= E       what step E would have otherwise, times 1 - sqrt((step - E) / cooldown)

    schedule is one of SCHEDULES in any case, else ValueError.
    """
    shape = schedule.lower()
    if shape not in SCHEDULES:
        raise ValueError(f"learning_rate: schedule must be one of {SCHEDULES}, got {schedule!r}")
    end = max(steps - cooldown, 0)
    anneal = 1.0
    if cooldown and step > end:
        anneal -= math.sqrt(min((step - end) / cooldown, 1.0))
    step = min(step, end)

    if step < warmup:
        return anneal * base * step / warmup
    floor = base * final_fraction
    last = end - 1 - warmup
    position = min((step - warmup) / last, 1.0) if last > 0 else 0.0
    if shape == "cosine":
        return anneal * (floor + (base - floor) * (0.5 * math.cos(math.pi * position) + 0.5))
    if shape == "linear":
        return anneal * (base + (floor - base) * position)
    return anneal * base
