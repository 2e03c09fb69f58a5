"""The loss of an exported model in transformers, on the same sequences that llmq evaluates.

python tools/eval_hf.py MODEL 'EVAL*.bin' --seq-len 1024 --batch-size 32 [--device cuda]
"""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
import typer

from llmq.data.loader import DataLoader
from llmq.options.options import TrainConfig

SEED = TrainConfig.__dataclass_fields__["eval_seed"].default


def main(
    model: Path, files: str, seq_len: int = 1024, batch_size: int = 32, device: str = "cpu"
) -> None:
    """Print the mean loss over all sequences, in the format of the export, softmax in F32."""
    network = transformers.AutoModelForCausalLM.from_pretrained(model, dtype="auto").to(device)
    transformers.AutoTokenizer.from_pretrained(model)
    total, count = 0.0, 0
    with DataLoader(
        files,
        seq_len=seq_len,
        micro_batch=batch_size,
        seed=SEED,
        vocab_size=network.config.vocab_size,
        everything=True,
    ) as loader:
        for _ in range(loader.batches_per_epoch):
            inputs, targets = (
                torch.from_numpy(x).long().to(device) for x in loader.next_batch()[:2]
            )
            for row, target in zip(inputs, targets, strict=True):  # logits of a row at a time
                with torch.no_grad():
                    logits = network(row[None]).logits[0].float()
                total += torch.nn.functional.cross_entropy(
                    logits, target, ignore_index=-100, reduction="sum"
                ).item()
                count += int((target != -100).sum())
    print(f"transformers {transformers.__version__}: loss {total / count:.6f} over {count} tokens")


if __name__ == "__main__":
    typer.run(main)
