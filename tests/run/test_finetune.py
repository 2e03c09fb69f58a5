"""`llmq finetune`: what it takes files for, what it chooses, and what is there in the end."""

import json
import re
import shutil

import numpy as np
import pytest
import torch
import transformers

from llmq.base.errors import ConfigError
from llmq.commands.cli import _run
from llmq.options.options_io import make_config
from llmq.run.finetune import STEPS, sequence_length
from llmq.run.finetune_data import parse_map
from tests.chat_templates import CHATML, assistant, user, write_chat_tokenizer

WORDS = "red green blue cat dog tree house river stone light".split()
SIZES = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
SIZES |= {"hidden_size": 64, "intermediate_size": 64, "head_dim": 32, "vocab_size": 304}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = write_chat_tokenizer(tmp_path_factory.mktemp("of") / "model", CHATML)
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        **SIZES, max_position_embeddings=256, tie_word_embeddings=True
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with records of each format."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    pairs = [tuple(rng.choice(WORDS, 2)) for _ in range(60)]
    talks = [[user(f"After {a}?"), assistant(f"Then {b}, {i}.")] for i, (a, b) in enumerate(pairs)]
    write("talks.jsonl", ({"messages": talk} for talk in talks))
    write(
        "qa.jsonl", ({"question": f"{a}?", "answer": f"{b} {i}"} for i, (a, b) in enumerate(pairs))
    )
    write(
        "more.jsonl", ({"prompt": f"{a} {i}?", "completion": b} for i, (a, b) in enumerate(pairs))
    )
    write(
        "pairs.jsonl",
        (
            {"prompt": f"{i}, {a}?", "chosen": f"{a}, {b}.", "rejected": "No."}
            for i, (a, b) in enumerate(pairs)
        ),
    )
    return tmp_path


def write(name, records):
    with open(name, "w") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def finetune(*words, model, capsys):
    """Exit status, and what is printed."""
    status = _run(["finetune", *words, "--model", model, "--device", "cpu"])
    printed = capsys.readouterr()
    return status, printed.out + printed.err


def test_sixty_conversations_make_a_better_model(here, model, capsys):
    status, said = finetune("talks.jsonl", model=model, capsys=capsys)
    assert status == 0, said
    out = here / "finetune" / "talks"
    for line in ("Data:    54 conversations of talks.jsonl (messages)", "6 held out"):
        assert line in said
    steps = int(re.search(r"^Steps: +(\d+) of", said, re.MULTILINE)[1])
    assert steps >= STEPS
    before, best = map(float, re.search(r"Held-out loss: ([\d.]+) before, ([\d.]+)", said).groups())
    assert best < 0.8 * before
    assert "⟦Then" in said and "before:" in said and "after:" in said
    assert (out / "model" / "model.safetensors").is_file()
    page = (out / "card.html").read_text()
    assert "data:image/png;base64," in page and "A held-out question" in page
    assert (out / "card.txt").read_text().strip() in said
    again = make_config({}, out / "finetune.yaml")
    assert again.train_patterns == [
        str(p.relative_to(here)) for p in out.glob("data/*/train-*.bin")
    ]
    assert f"llmq train --config {out.relative_to(here) / 'finetune.yaml'}" in said
    status, said = finetune("talks.jsonl", model=model, capsys=capsys)
    assert status == 2 and "--overwrite" in said


def test_formats_are_mixed_and_fields_are_named(here, model, capsys):
    words = ("talks.jsonl", "qa.jsonl", "more.jsonl", "--dry-run", "--name", "all")
    status, said = finetune(
        *words, "--map", "prompt=question,completion=answer", model=model, capsys=capsys
    )
    assert status == 0, said
    assert "162 conversations of talks.jsonl (messages), qa.jsonl more.jsonl (prompt)" in said
    assert "Nothing was trained. To train: llmq" in said and "--dry-run" not in said
    assert not (here / "finetune" / "all" / "model").exists()
    status, said = finetune("qa.jsonl", model=model, capsys=capsys)
    assert status == 2 and "--map prompt=question,completion=answer" in said
    status, said = finetune(
        "qa.jsonl", "--map", "prompt=nothing,completion=answer", model=model, capsys=capsys
    )
    assert status == 2 and "question, answer" in said


def test_a_terminal_is_asked_about_unclear_fields(here, model, capsys, monkeypatch):
    """Once; an answer that is no field is asked for again, an empty one is the likely one."""
    answers = iter(["", "", "reply", "answer"])
    for stream in ("stdin", "stdout"):
        monkeypatch.setattr(f"sys.{stream}.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda question: print(question) or next(answers))
    status, said = finetune("qa.jsonl", "--dry-run", model=model, capsys=capsys)
    assert status == 0 and not [*answers], said
    assert "'qa.jsonl' has the fields question, answer." in said
    assert "Which field is the prompt? [question]" in said and "one of question, answer" in said
    assert "The same without questions: --map prompt=question,completion=answer" in said


def test_a_model_that_is_not_there_is_named(here, capsys):
    status, said = finetune("talks.jsonl", model="nothing", capsys=capsys)
    assert status == 2 and said.startswith("error: --model: 'nothing' is no directory of a model")


def test_the_model_of_a_run_is_found_by_its_name(here, model, capsys):
    shutil.copytree(model, here / "output" / "mine")
    status, said = finetune("talks.jsonl", "--dry-run", model="mine", capsys=capsys)
    assert status == 0 and "Model:   output/mine, all weights are trained" in said, said
    (here / "adapters").mkdir()
    (here / "adapters" / "adapter_config.json").write_text("{}")
    status, said = finetune("talks.jsonl", model="adapters", capsys=capsys)
    assert status == 2 and said.startswith("error: --model: 'adapters' holds adapters: ")


def test_pairs_go_to_dpo(here, model, capsys):
    status, said = finetune("pairs.jsonl", "--dry-run", model=model, capsys=capsys)
    assert status == 0, said
    assert "54 pairs of pairs.jsonl" in said
    status, said = finetune("pairs.jsonl", "talks.jsonl", "--dry-run", model=model, capsys=capsys)
    assert status == 2 and "train on the one without, and then on the pairs" in said


def test_a_plan_for_another_gpu_trains_nothing(here, model, capsys):
    status = _run(["finetune", "talks.jsonl", "--model", model, "--gpu-memory", "8GiB"])
    said = capsys.readouterr().out
    assert status == 0 and "Nothing was trained" in said and "--gpu-memory" not in said
    assert not (here / "finetune" / "talks" / "model").exists()


def test_given_options_win(here, model, capsys):
    words = ("--eval-file", "none", "--sample-prompt", "red", "--steps", "20", "--seq-len", "32")
    status, said = finetune("talks.jsonl", *words, model=model, capsys=capsys)
    assert status == 0, said
    assert re.search(r"^Steps: +20 of \d+ x 32 tokens", said, re.MULTILINE)
    log = (here / "finetune" / "talks" / "log.json").read_text()
    assert '"prompt": "red"' in log and "Held-out loss" not in said


def test_too_few_records_are_refused(here, model, capsys):
    lines = (here / "talks.jsonl").read_text().splitlines()[:6]
    (here / "few.jsonl").write_text("\n".join(lines))
    status, said = finetune("few.jsonl", "--epochs", "2", model=model, capsys=capsys)
    assert status == 2 and "steps change a model too little" in said and "--force" in said
    assert not (here / "finetune" / "few" / "model").exists()


@pytest.mark.parametrize(
    ("size", "sizes", "method"),
    [
        ("7B", (3584, 18944, 28, 28, 4), r"adapters of rank 16 on (nf4|e4m3) weights"),
    ],
)
def test_a_card_of_8_gb_takes_7b(here, model, capsys, tmp_path, size, sizes, method):
    """A plan of 500 conversations, which needs no weights."""
    folder = write_chat_tokenizer(tmp_path / size, CHATML)
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    values = dict(zip((*names, "num_key_value_heads"), sizes, strict=True))
    config = transformers.Qwen2Config(**values, vocab_size=151936, max_position_embeddings=4096)
    (folder / "config.json").write_text(
        json.dumps(config.to_dict() | {"architectures": ["Qwen2ForCausalLM"]})
    )
    talks = [[user(f"{w} {i}?"), assistant(f"{w}, " * 40)] for i in range(50) for w in WORDS]
    write("many.jsonl", ({"messages": talk} for talk in talks))
    status = _run(["finetune", "many.jsonl", "--model", str(folder), "--card", "rtx 4060"])
    printed = capsys.readouterr()
    assert status == 0, printed.err
    assert re.search(method, printed.out)
    assert re.search(r"^Time: +about \d+ minutes? ± \d+ %$", printed.out, re.MULTILINE)
    used, there = re.search(r"Memory: +(\d+) MiB of (\d+) MiB", printed.out).groups()
    assert int(used) <= int(there) < 8192


@pytest.mark.parametrize("text", ["prompt", "prompt=", "question=prompt", "=answer"])
def test_a_map_names_known_fields(text):
    with pytest.raises(ConfigError, match="--map: expected FIELD=NAME"):
        parse_map([text])


def test_sequences_are_as_long_as_the_data_need():
    assert sequence_length(np.array([10, 70]), 4096) == 128
    assert sequence_length(np.array([10, 70]), 100) == 64
    assert sequence_length(np.array([10] * 999 + [100_000]), 32768) == 2048
    assert sequence_length(np.array([10_000] * 10), 32768) == 4096
