#!/usr/bin/env python3
"""Compare a GRPO step of llmq with a GRPO step of TRL: seconds and memory of both.

    pip install trl
    PYTHONPATH=. tools/rl_speed.py MODEL --limit 24 --base-dtype nf4 [--sides llmq,trl]

MODEL is a folder with weights and tokenizer. Each side samples --samples texts for each of
--prompts prompts, with at most --new tokens a text. A text's reward is its fraction of vowels. Each
side then trains adapters of all linear layers by GRPO, once on these samples. llmq runs with
--memory-limit. TRL samples with transformers' `generate` and checkpoints gradients; its weights are
in bf16 (bitsandbytes' 4-bit weights would be smaller and slower), and torch refuses memory beyond
the same limit. Each side runs in a process of its own. A row has the median time of the --steps
steps after a first step (--steps 0: the time of the first step), the mean length of a text, and the
memory. llmq's memory is the driver's count, context and kernels included; TRL's memory is the peak
that torch has reserved.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

import typer

RANK = 16
PROMPT = "Count the letters of line {}, and say which of these letters stands there most often: "
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True)
class Job:
    """The work of one side. limit: GiB of GPU memory. batch: number of texts (TRL) or sequences
    (llmq) in a micro-batch. steps: number of steps after the first one. recompute: True if llmq
    keeps no activations within blocks."""

    model: str
    limit: float
    base_dtype: str
    prompts: int
    samples: int
    new: int
    batch: int
    steps: int
    recompute: bool
    device: str


Found = dict[str, Any]


def vowels(text: str) -> float:
    """The reward of a text: about its fraction of vowels."""
    return sum(text.count(letter) for letter in "aeiou") / (1 + len(text))


def llmq_side(job: Job) -> Found:
    """Train with llmq; return each step's seconds, its seconds of sampling and its mean length of
    texts, and the memory in bytes."""
    from llmq import Trainer
    from llmq.run.rollouts import Rollouts

    sizes = {"batch_size": job.batch, "seq_len": -(-(job.new + 64) // 64) * 64}
    sizes |= {"grad_accumulation": job.prompts * job.samples, "max_new_tokens": job.new}
    own = {"loss": "grpo", "prompts_per_step": job.prompts, "num_samples": job.samples}
    how = {"model": job.model, "lora_rank": RANK, "eval_file": "none"}
    how |= {"recompute_swiglu": True, "recompute_norm": True, "recompute_block": job.recompute}
    how |= {"device": job.device, "gpus": 1, "steps": 1 + job.steps, "ckpt_interval": 0}
    how |= {"document_mask": True, "keep_equal": True, "learning_rate": 1e-5}
    if job.device == "cuda":
        how |= {"base_dtype": job.base_dtype, "memory_limit": f"{job.limit}GiB"}
    seconds, sampled, lengths = [], [], []
    with Trainer(**how, **sizes, **own) as trainer:
        prompts = [{"prompt": PROMPT.format(i)} for i in range(job.prompts * (1 + job.steps))]
        rollouts = Rollouts(trainer, prompts, lambda texts, _: [vowels(text) for text in texts])
        for _ in range(1 + job.steps):
            start = time.perf_counter()
            trainer.step()
            seconds.append(time.perf_counter() - start)
            sampled.append(rollouts.last["sample_ms"] / 1e3)
            lengths.append(rollouts.last["length"])
        memory = 0
        if job.device == "cuda":
            import cupy

            free, whole = cupy.cuda.runtime.memGetInfo()
            memory = whole - free
    return {"seconds": seconds, "sampled": sampled, "length": lengths, "memory": memory}


def trl_side(job: Job) -> Found:
    """Train with TRL; return each step's seconds and its mean length of texts, and the memory in
    bytes."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    cuda = job.device == "cuda"
    if cuda:
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(job.limit * 2**30 / whole)
    seconds, lengths = [], []

    class Clock(TrainerCallback):
        """Callback that times each step between two synchronisations of the device."""

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.start = self._now()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds.append(self._now() - self.start)

        def on_log(self, *_: Any, logs: Found | None = None, **__: Any) -> None:
            if logs and "completions/mean_length" in logs:
                lengths.append(logs["completions/mean_length"])

        def _now(self) -> float:
            if cuda:
                torch.cuda.synchronize()
            return time.perf_counter()

    tokenizer = AutoTokenizer.from_pretrained(job.model, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(
        job.model, dtype=torch.bfloat16, device_map=job.device, attn_implementation="sdpa"
    )
    texts = job.prompts * job.samples
    with tempfile.TemporaryDirectory() as out:
        config = GRPOConfig(
            output_dir=out, per_device_train_batch_size=job.batch, num_generations=job.samples,
            gradient_accumulation_steps=texts // job.batch, max_completion_length=job.new,
            max_steps=1 + job.steps, bf16=cuda, use_cpu=not cuda, gradient_checkpointing=True,
            beta=0.0, learning_rate=1e-5, logging_steps=1, save_strategy="no", report_to="none",
            loss_type="grpo", disable_tqdm=True,
        )  # fmt: skip
        trainer = GRPOTrainer(
            model, lambda completions, **_: [vowels(text) for text in completions], args=config,
            train_dataset=Dataset.from_list(
                [{"prompt": PROMPT.format(i)} for i in range(job.prompts * (1 + job.steps))]
            ),
            processing_class=tokenizer, callbacks=[Clock()],
            peft_config=LoraConfig(r=RANK, lora_alpha=RANK, target_modules=PROJECTIONS),
        )  # fmt: skip
        trainer.train()
    memory = torch.cuda.max_memory_reserved() if cuda else 0
    return {"seconds": seconds, "length": lengths, "memory": memory}


def median(values: list[float]) -> float:
    """Return the median of the values after the first one; a single value is returned itself."""
    return statistics.median(values[1:] or values)


SIDES = {"llmq": llmq_side, "trl": trl_side}


def row(side: str, found: Found, job: Job) -> str:
    """Return a side's row of the table."""
    step, length = (median(found[name]) for name in ("seconds", "length"))
    cells = [side, f"{step:.2f}"]
    cells += [f"{median(found['sampled']):.2f}" if "sampled" in found else "-"]
    cells += [f"{job.prompts * job.samples * length / step:,.0f}", f"{length:.0f}"]
    cells += [f"{found['memory'] / 2**30:.2f}", f"{found['seconds'][0]:.1f}"]
    return f"| {' | '.join(cells)} |"


def measured(side: str, job: Job) -> Found:
    """Run a side in a process of its own; return its result, or {"error": end of stderr} if the
    process fails."""
    command = [
        sys.executable,
        __file__,
        job.model,
        "--side",
        side,
        "--job",
        json.dumps(asdict(job)),
    ]
    with tempfile.TemporaryFile("w+") as errors:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        errors.seek(0)
        if done.returncode:
            return {"error": " ".join(errors.read().split())[-600:]}
    return json.loads(done.stdout.splitlines()[-1])


def main(
    model: str,
    limit: Annotated[float, typer.Option(help="GiB of GPU memory.")] = 24,
    base_dtype: Annotated[str, typer.Option(help="Frozen weights of llmq.")] = "nf4",
    prompts: int = 8,
    samples: int = 8,
    new: int = 512,
    batch: Annotated[int, typer.Option(help="Texts that TRL trains at a time.")] = 8,
    sequences: Annotated[int, typer.Option(help="Sequences that llmq trains at a time.")] = 8,
    steps: int = 3,
    recompute: Annotated[bool, typer.Option(help="llmq's --recompute-block.")] = False,
    device: str = "cuda",
    sides: str = "llmq,trl",
    side: Annotated[str | None, typer.Option(hidden=True)] = None,
    job: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Measure the sides and print a table."""
    if side is not None and job is not None:
        print(json.dumps(SIDES[side](Job(**json.loads(job)))))
        return
    given = Job(model, limit, base_dtype, prompts, samples, new, batch, steps, recompute, device)
    print(f"{prompts} prompts x {samples} samples x {new} tokens, {limit} GiB, {base_dtype}\n")
    print("| | step, s | of these samples, s | tokens/s | tokens of a text | GiB | first step, s |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    found = {}
    for name in sides.split(","):
        one = measured(name, replace(given, batch=sequences) if name == "llmq" else given)
        print(f"{name}: {one['error']}" if "error" in one else row(name, one, given), flush=True)
        found[name] = median(one.get("seconds", [0.0]))
    if found.get("llmq") and found.get("trl"):
        print(f"\nA step of TRL takes {found['trl'] / found['llmq']:.2f} times as long.")


if __name__ == "__main__":
    typer.run(main)
