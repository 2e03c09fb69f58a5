"""Compares losses and gradients of pairs with TRL's, in a second step, so that the reference is
another model than the one that is trained.

    pip install trl
    python -m tools.trl_reference [dpo ipo simpo reward]

Prints, for each loss, ours, TRL's, and the largest relative difference of a gradient. All of it is
in fp32 on the CPU, with a tiny model of bytes. ORPO is not among them: TRL's cross-entropy counts
the tokens of prompts, too, and its mean is over tokens; nor is KTO, whose shift is by chance.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from datasets import Dataset
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer

from llmq import Trainer
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


def records() -> list[dict[str, str]]:
    """Prompts and answers of random words."""
    rng = np.random.default_rng(0)

    def text(count: int) -> str:
        return " ".join(rng.choice(WORDS, count))

    names = (("prompt", 3), ("chosen", 5), ("rejected", 4))
    return [{name: f" {text(n)}" for name, n in names} for _ in range(PAIRS)]


def ours(folder: Path, loss: str) -> tuple[float, dict[str, np.ndarray]]:
    """Loss and mean gradients of the second step, by names of transformers; the model before it is
    exported."""
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
    """The same by TRL, of the exported model."""
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
    tokenizer.bos_token = None  # some of its trainers would put it in front of prompts
    data = Dataset.from_list(records())
    trainer = make(model, args=args, train_dataset=data, processing_class=tokenizer, **more)
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.model.train()
    value = trainer.compute_loss(trainer.model, batch)
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
        config["pad_token_id"] = ByteTokenizer.eos_id  # as TRL has it, where nothing else is said
        (folder / "base" / "config.json").write_text(json.dumps(config))
        for loss in losses or LOSSES:
            (our_loss, got), (their_loss, wanted) = ours(folder, loss), theirs(folder, loss)
            norm = max(np.linalg.norm(g) for g in wanted.values())
            worst = max(
                np.linalg.norm(got[n] - g) / max(np.linalg.norm(g), 1e-3 * norm)
                for n, g in wanted.items()
            )
            print(f"{loss:7} {our_loss:.7f} {their_loss:.7f}, gradients differ by {worst:.1e}")


if __name__ == "__main__":
    main(sys.argv[1:])
