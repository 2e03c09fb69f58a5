"""Compare losses and gradients with TRL's, for pairs and for sampled texts.

Losses of pairs are compared in a second step, so that the reference model differs from the trained
model. Sampled texts have random log-probabilities.

    pip install trl
    python -m tools.trl_reference [dpo ipo simpo reward grpo dr-grpo dapo gspo cispo]

Prints for each loss llmq's value, TRL's value, and the largest relative difference of a gradient.
Both sides compute in fp32 on the CPU, with a tiny model of bytes. ORPO is left out, because TRL's
cross-entropy counts the tokens of prompts, too, and is a mean over tokens. KTO is left out, because
its shift depends on chance.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from datasets import Dataset
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, RewardConfig, RewardTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer

from llmq import Trainer
from llmq.base.batch import Batch
from llmq.commands.cli import _run
from llmq.text.tokenizer import ByteTokenizer

WORDS = "tell why how a cat sees rain fall on old red roofs and then sleeps".split()
PAIRS, T = 6, 192
LOSSES = {
    "dpo": (DPOTrainer, DPOConfig, {"loss_type": "sigmoid", "beta": 0.1}),
    "ipo": (DPOTrainer, DPOConfig, {"loss_type": "ipo", "beta": 0.1}),
    "simpo": (
        CPOTrainer,
        CPOConfig,
        {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 0.5, "cpo_alpha": 0.0},
    ),
    "reward": (RewardTrainer, RewardConfig, {}),
}
PROMPT, SAMPLES = 4, [9, 30, 17, 23, 12, 26]  # tokens
POLICIES = {
    "grpo": ({"loss_type": "grpo", "epsilon_high": 0.2}, {}),
    "dr-grpo": (
        {"loss_type": "dr_grpo", "epsilon_high": 0.2, "max_completion_length": 32},
        {"length": 32},
    ),
    "dapo": ({"loss_type": "dapo", "epsilon_high": 0.28}, {}),
    "gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_high": 0.2},
        {"epsilon": 0.2, "epsilon-high": 0.2},
    ),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 1.2}, {"most": 1.2}),
}


def records() -> list[dict[str, str]]:
    """Records of prompts and answers of random words."""
    rng = np.random.default_rng(0)

    def text(count: int) -> str:
        return " ".join(rng.choice(WORDS, count))

    names = (("prompt", 3), ("chosen", 5), ("rejected", 4))
    return [{name: f" {text(n)}" for name, n in names} for _ in range(PAIRS)]


def ours(folder: Path, loss: str) -> tuple[float, dict[str, np.ndarray]]:
    """Return loss and mean gradients of the second step, by transformers' names; export the model
    before this step."""
    how = {"model": str(folder / "base"), "device": "cpu", "gpus": 1, "model_dtype": "fp32"}
    how |= {"train_file": (str(folder / "data" / "train-000.bin"),), "eval_file": "none"}
    how |= {"seq_len": T, "batch_size": PAIRS, "grad_accumulation": 1, "packing": "best-fit"}
    how |= {"checkpoint_dir": str(folder / f"ckpt-{loss}"), "learning_rate": 1e-3, "warmup": 0}
    with Trainer(loss=loss, steps=2, **how) as trainer:
        trainer.step()
        trainer.export(folder / loss)
        result, found = trainer.step(), {}
        values = trainer.gradients()
        for param in (p for slab in trainer._step.table for p in slab.params):
            for part in param.hf:
                sums = values[param.name].reshape(-1, *param.row_shape)[part.start : part.stop]
                found[part.name] = part.stored(sums) / PAIRS
        return result.loss, found


def theirs(folder: Path, loss: str, **more: Any) -> tuple[float, dict[str, np.ndarray]]:
    """Return TRL's loss and gradients of the exported model."""
    make, config, how = LOSSES[loss]
    kind = transformers.AutoModelForCausalLM
    if loss == "reward":
        kind = transformers.AutoModelForSequenceClassification
    model = kind.from_pretrained(folder / loss)
    args = config(
        output_dir=str(folder / "trl"), per_device_train_batch_size=PAIRS, max_length=T,
        use_cpu=True, bf16=False, report_to="none", gradient_checkpointing=False,
        disable_dropout=True, **how,
    )  # fmt: skip
    if make is DPOTrainer:
        more["ref_model"] = kind.from_pretrained(folder / "base")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "base")
    tokenizer.bos_token = None  # some of TRL's trainers would put BOS before prompts
    data = Dataset.from_list(records())
    trainer = make(model, args=args, train_dataset=data, processing_class=tokenizer, **more)
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.model.train()
    value = trainer.compute_loss(trainer.model, batch)
    value.backward()
    named = trainer.model.named_parameters()
    return value.item(), {name: p.grad.numpy() for name, p in named if p.grad is not None}


def samples() -> dict[str, np.ndarray]:
    """Return ids (B, PROMPT + longest); mask, sampled and scores (B, longest), which cover the
    sampled tokens; and advantages (B, 1)."""
    rng, (B, longest) = np.random.default_rng(0), (len(SAMPLES), max(SAMPLES))
    near = -np.log(256) + 0.4 * rng.normal(size=(2, B, longest))
    return {
        "ids": rng.integers(0, 256, (B, PROMPT + longest)),
        "mask": np.arange(longest) < np.array(SAMPLES)[:, None],
        "sampled": near[0].astype(np.float32),
        "scores": near[1].astype(np.float32),
        "advantages": rng.normal(size=(B, 1)).astype(np.float32),
    }


def our_policy(folder: Path, loss: str) -> tuple[float, dict[str, np.ndarray]]:
    """Return loss and mean gradients of a step on samples, all packed into one row."""
    found, at, shape = samples(), 0, (1, T)
    inputs, targets = np.zeros(shape, np.int32), np.full(shape, -100, np.int32)
    starts = np.arange(T, dtype=np.int32)[None].copy()
    named = {name: np.zeros(shape, np.float32) for name in ("sampled", "scores", "advantages")}
    for number, length in enumerate(SAMPLES):
        end, ids = at + PROMPT + length, found["ids"][number]
        places = slice(at + PROMPT - 1, end - 1)
        inputs[0, at:end], starts[0, at:end] = ids[: PROMPT + length], at
        targets[0, places] = ids[PROMPT : PROMPT + length]
        for name, array in named.items():
            array[0, places] = found[name][number][:length]
        at = end
    how = {"model": str(folder / "base"), "device": "cpu", "gpus": 1, "model_dtype": "fp32"}
    how |= {
        "seq_len": T,
        "batch_size": 1,
        "grad_accumulation": 1,
        "document_mask": True,
        "steps": 1,
    }
    with Trainer(loss=loss, loss_params={"beta": 0.05, **POLICIES[loss][1]}, **how) as trainer:
        result, gradients = trainer.step([Batch(inputs, targets, starts, 0, named)]), {}
        values, per_token = trainer.gradients(), loss in ("dapo", "cispo")
        count = sum(SAMPLES) if per_token else len(SAMPLES)
        for param in (p for slab in trainer._step.table for p in slab.params):
            for part in param.hf:
                sums = values[param.name].reshape(-1, *param.row_shape)[part.start : part.stop]
                gradients[part.name] = part.stored(sums) / count
        return result.loss, gradients


def their_policy(folder: Path, loss: str) -> tuple[float, dict[str, np.ndarray]]:
    """Return TRL's loss and gradients of the same samples."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "base")
    args = GRPOConfig(
        output_dir=str(folder / "trl"), per_device_train_batch_size=len(SAMPLES), use_cpu=True,
        num_generations=3, bf16=False, report_to="none", gradient_checkpointing=False,
        disable_dropout=True, epsilon=0.2, beta=0.05, **POLICIES[loss][0],
    )  # fmt: skip
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "base")
    data = Dataset.from_list([{"prompt": record["prompt"]} for record in records()])
    trainer = GRPOTrainer(
        model, lambda completions, **_: [0.0] * len(completions), args=args,
        train_dataset=data, processing_class=tokenizer,
    )  # fmt: skip
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    found = {name: torch.from_numpy(array) for name, array in samples().items()}
    batch = {"prompt_ids": found["ids"][:, :PROMPT], "completion_ids": found["ids"][:, PROMPT:]}
    batch |= {"prompt_mask": torch.ones(len(SAMPLES), PROMPT, dtype=torch.long)}
    batch |= {"completion_mask": found["mask"].long(), "advantages": found["advantages"][:, 0]}
    batch |= {"old_per_token_logps": found["sampled"], "ref_per_token_logps": found["scores"]}
    batch["num_items_in_batch"] = found["mask"].sum()
    value = trainer._compute_loss(trainer.model, batch)
    value.backward()
    named = trainer.model.named_parameters()
    return value.item(), {name: p.grad.numpy() for name, p in named if p.grad is not None}


def main(losses: list[str]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines = "".join(json.dumps(record) + "\n" for record in records())
        (folder / "pairs.jsonl").write_text(lines)
        words = ["tokenize", str(folder / "pairs.jsonl"), "--tokenizer=bytes", "--eval-fraction=0"]
        assert _run([*words, "--out", str(folder / "data")]) == 0
        how = {"model": "tiny", "from_scratch": True, "vocab_size": "auto", "device": "cpu"}
        how |= {"gpus": 1, "model_dtype": "fp32", "eval_file": "none", "packing": "best-fit"}
        data = (str(folder / "data" / "train-000.bin"),)
        with Trainer(train_file=data, loss="simpo", seq_len=T, **how) as trainer:
            trainer.export(folder / "base")
        ByteTokenizer().save(folder / "base")
        config = json.loads((folder / "base" / "config.json").read_text())
        config["pad_token_id"] = ByteTokenizer.eos_id  # TRL's default
        (folder / "base" / "config.json").write_text(json.dumps(config))
        for loss in losses or (*LOSSES, *POLICIES):
            both = (our_policy, their_policy) if loss in POLICIES else (ours, theirs)
            (our_loss, got), (their_loss, wanted) = (compute(folder, loss) for compute in both)
            norm = max(np.linalg.norm(g) for g in wanted.values())
            worst = max(
                np.linalg.norm(got[n] - g) / max(np.linalg.norm(g), 1e-3 * norm)
                for n, g in wanted.items()
            )
            print(f"{loss:7} {our_loss:.7f} {their_loss:.7f}, gradients differ by {worst:.1e}")


if __name__ == "__main__":
    main(sys.argv[1:])
