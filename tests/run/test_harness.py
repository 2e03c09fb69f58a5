"""`llmq eval --tasks`: lm-evaluation-harness gets the same numbers from llmq as from
transformers."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from llmq.commands.cli import _run
from tests.chat_templates import CHATML
from tests.text_data import documents, write_bpe

lm_eval = pytest.importorskip("lm_eval")
pytest.importorskip("lm_eval.tasks")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

COMMON = """
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/{file}}}}}
test_split: test
task: own_{name}
"""
TASKS = {
    "choice": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
doc_to_choice: "{{choices}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "last_word": """
output_type: loglikelihood
doc_to_text: "{{question}}"
doc_to_target: "{{last}}"
metric_list: [{metric: perplexity}, {metric: acc}]
""",
    "rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
""",
    "generated": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{last}}"
generation_kwargs: {until: [" e"], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match}]
""",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A model, and tasks of each kind."""
    folder = tmp_path_factory.mktemp("harness")
    (folder / "model").mkdir()
    write_bpe(folder / "model")
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    names["chat_template"] = CHATML
    (folder / "model" / "tokenizer_config.json").write_text(json.dumps(names))
    torch.manual_seed(0)
    rows = transformers.AutoTokenizer.from_pretrained(folder / "model")
    config = transformers.Qwen3Config(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=64, vocab_size=len(rows),
        initializer_range=0.1, eos_token_id=rows.eos_token_id,
    )  # fmt: skip
    transformers.Qwen3ForCausalLM(config).float().save_pretrained(folder / "model")
    words = " ".join(documents(40)).split()
    parts = [words[i : i + 9] for i in range(0, 54, 9)]
    records = [
        {"question": " ".join(part[:5]), "choices": part[5:8], "answer": i % 3,
         "last": f" {part[8]}", "text": " ".join(part * (1 + i % 4))}
        for i, part in enumerate(parts)
    ]  # fmt: skip
    (folder / "own.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    for name, task in TASKS.items():
        head = COMMON.format(folder=folder, file="own.jsonl", name=name)
        (folder / f"{name}.yaml").write_text(head + task)
    return folder


@pytest.mark.parametrize("chat", [[], ["--apply-chat-template"]], ids=["texts", "chats"])
def test_numbers_are_those_of_transformers(place, monkeypatch, capsys, chat):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(place / "cache"))
    own = partial(lm_eval.tasks.TaskManager, include_defaults=False)
    monkeypatch.setattr("llmq.run.harness.TaskManager", own)
    names = [f"own_{name}" for name in TASKS if not chat or name in ("choice", "generated")]
    out = place / "results.json"
    words = f"--tasks {','.join(names)} --include-path {place} --out {out}".split()
    words += "--device cpu --gpus 1 --model-dtype fp32 --batch-tokens 256".split()
    assert _run(["eval", str(place / "model"), *words, *chat]) == 0
    assert "own_generated" in capsys.readouterr().out
    ours = json.loads(out.read_text())["results"]
    model = lm_eval.api.registry.get_model("hf")(
        pretrained=str(place / "model"), device="cpu", dtype="float32", batch_size=4
    )
    theirs = lm_eval.simple_evaluate(
        model, tasks=names, log_samples=True, apply_chat_template=bool(chat),
        task_manager=lm_eval.tasks.TaskManager(include_path=str(place), include_defaults=False),
    )  # fmt: skip
    for name in names:
        for metric, value in theirs["results"][name].items():
            if isinstance(value, float):
                assert ours[name][metric] == pytest.approx(value, rel=1e-4), (name, metric)


def test_what_is_unknown_is_said(place, monkeypatch, capsys):
    own = partial(lm_eval.tasks.TaskManager, include_defaults=False)
    monkeypatch.setattr("llmq.run.harness.TaskManager", own)
    assert _run(["eval", str(place / "model"), "--tasks", "no_such_task"]) == 2
    assert "--tasks: lm-eval has no task 'no_such_task'" in capsys.readouterr().err
    assert _run(["eval", str(place / "model")]) == 2
    assert "give --task FILE or --tasks NAME" in capsys.readouterr().err
    assert _run(["eval", "x", "--task", "a.txt", "--num-fewshot", "5"]) == 2
    assert "--num-fewshot: needs --tasks" in capsys.readouterr().err
    assert _run(["eval", "x", "--task", str(Path("a.txt")), "--tasks", "y"]) == 2
    assert "exclude each other" in capsys.readouterr().err
