"""A small model and a file of each kind of task, always the same: lm-eval's numbers for them are
kept in golden/lm_eval.json, which tools/eval_reference.py writes."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import transformers
from tokenizers import processors
from transformers import AutoModelForCausalLM

from llmq.text.tokenizer import END_OF_TEXT
from tests.text_data import write_bpe

WORDS = (
    "the cat sat on a mat while dogs bark loudly near Über rivers and 12 birds sing at dawn of "
    "every [title] [step] day"
).split(" ")
POSITIONS = 64
KINDS = ("hellaswag", "arc", "piqa", "winogrande", "openbookqa", "boolq", "mmlu", "text")


def write_model(folder: Path, *, adds_bos: bool) -> Path:
    """A Llama with random weights and a tokenizer that may put its first token before each text."""
    write_bpe(folder)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        bos_token=END_OF_TEXT if adds_bos else None,
        eos_token=END_OF_TEXT,
    )
    if adds_bos:
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{END_OF_TEXT} $A", special_tokens=[(END_OF_TEXT, 0)]
        )
    tokenizer.save_pretrained(folder)
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=160, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=POSITIONS,
        bos_token_id=0, eos_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).float()
    rng = np.random.default_rng(0)  # torch's own numbers may change with its version
    for name, parameter in model.named_parameters():
        mean = 1.0 if "norm" in name else 0.0
        values = rng.normal(mean, 0.2 if "embed" in name else 0.08, parameter.shape)
        parameter.data = parameter.data.new_tensor(values)
    model.save_pretrained(folder)
    return folder


def records(kind: str) -> list[dict]:
    """Some of a kind, in the shape of Hugging Face's data sets."""
    rng = random.Random(kind)

    def say(least: int, most: int | None = None) -> str:
        return " ".join(rng.choice(WORDS) for _ in range(rng.randint(least, most or least)))

    def labelled(count: int) -> dict:
        labels = rng.choice([list("ABCD"), list("1234")])
        return {"text": [say(1, 4) for _ in range(count)], "label": labels[:count]}

    made = []
    for i in range(10):
        four = [say(1, 4) for _ in range(4)]
        choices = labelled(4 if i else 3)
        answer = {"choices": choices, "answerKey": rng.choice(choices["label"])}
        made.append(
            {
                "hellaswag": {
                    "activity_label": say(2), "ctx_a": say(6) + ".", "ctx_b": say(0, 2).upper(),
                    "endings": [say(1, 9) for _ in four], "label": str(rng.randrange(4)),
                },
                "arc": {"question": say(5) + "?", **answer},
                "openbookqa": {"question_stem": say(5) + " " * (i % 2), **answer},
                "piqa": {"goal": say(5), "sol1": say(4), "sol2": say(6), "label": i % 2},
                "winogrande": {
                    "sentence": f"{say(2)} _ {say(4)}.", "option1": say(1), "option2": say(1),
                    "answer": rng.choice("12"),
                },
                # Longer than the model's positions: the beginning is lost.
                "boolq": {"passage": say(60 if i == 3 else 12), "question": say(5), "label": i % 2},
                "mmlu": {
                    "question": f" {say(5)} ", "subject": "high_school_biology", "choices": four,
                    "answer": rng.randrange(4),
                },
                "text": {"text": say(1, 200 if i < 3 else 20) + "\n" * (i % 2)},
            }[kind]
        )  # fmt: skip
    return made


def write_tasks(folder: Path) -> dict[str, Path]:
    """A JSON-lines file of each kind, by kind."""
    paths = {kind: folder / f"{kind}.jsonl" for kind in KINDS}
    for kind, path in paths.items():
        path.write_text("".join(json.dumps(record) + "\n" for record in records(kind)))
    return paths
