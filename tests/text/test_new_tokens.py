"""`--add-tokens`: special tokens behind those of a tokenizer, and rows of a model for them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from llmq.commands.cli import _run
from llmq.text.tokenizer import HfTokenizer
from tests.chat_templates import assistant, user
from tests.text.test_conversations import read
from tests.text_data import documents, write_bpe

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TOKENS = "<|im_start|>,<|im_end|>"
SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256,
}  # fmt: skip
TRAIN = (
    "--train-file data/train*.bin --eval-file none --seq-len 64 --batch-size 2 --steps 3 "
    "--grad-accumulation 1 --device cpu --gpus 1 --warmup 0 --no-tune --overwrite"
).split()


def make_model(folder: Path, rows: int, *, tied: bool) -> None:
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**SIZES, vocab_size=rows, tie_word_embeddings=tied)
    transformers.Qwen3ForCausalLM(config).float().save_pretrained(folder)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A base model whose tokenizer has no tokens of ChatML, and conversations."""
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    write_bpe(Path("model"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    Path("model/tokenizer_config.json").write_text(json.dumps(names))
    texts = iter(documents(60))
    talks = [{"messages": [user(next(texts)), assistant(next(texts))]} for _ in range(30)]
    Path("a.jsonl").write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    make_model(Path("model"), HfTokenizer(Path("model")).vocab_size, tied=False)


def tokenize(*more: str) -> int:
    words = "tokenize a.jsonl --tokenizer model --chat-template chatml --eval-fraction 0".split()
    return _run([*words, "--out", "data", *more])


def train(*more: str) -> int:
    return _run(["train", "--model", "model", *TRAIN, *more])


def test_a_turn_that_would_end_in_pieces_is_refused(place, capsys):
    assert tokenize() == 2
    assert (
        "the end of a turn, <|im_end|>, is no token of the tokenizer 'model', so that the model "
        f"would hardly learn to stop: give --add-tokens '{TOKENS}' here and to llmq train, or "
    ) in capsys.readouterr().err
    assert tokenize("--add-tokens", "<|endoftext|>") == 2
    assert "--add-tokens: <|endoftext|> is a token of 'model' already" in capsys.readouterr().err
    assert not Path("data").exists()
    assert tokenize("--add-tokens", TOKENS) == 0
    ours = HfTokenizer(Path("data/tokenizer"))
    first = HfTokenizer(Path("model")).vocab_size
    assert ours.encode("<|im_start|><|im_end|>") == [first, first + 1]
    theirs = transformers.AutoTokenizer.from_pretrained("data/tokenizer")
    text, _ = read(Path("data"))[0]
    assert theirs.encode(text) == ours.encode(text) and len(theirs) == first + 2
    assert {"<|im_start|>", "<|im_end|>"} <= {*theirs.all_special_tokens}


@pytest.mark.parametrize(("tied", "spare"), [(False, 1), (True, 9)])
def test_new_rows_begin_as_the_mean_of_the_old_ones(place, capsys, tied, spare):
    """Behind the last row, or where a model has rows to spare."""
    first = HfTokenizer(Path("model")).vocab_size
    make_model(Path("model"), first + spare, tied=tied)
    assert tokenize("--add-tokens", TOKENS) == 0
    how = ["--model-dtype", "fp32", "--name", "new"]
    assert train(*how) == 2
    assert "give --add-tokens if this was given there" in capsys.readouterr().err
    assert train(*how, "--add-tokens", TOKENS, "--steps", "0") == 0
    old, new = (load_file(f"{f}/model.safetensors") for f in ("model", "output/new"))
    rows = max(first + spare, first + 2)
    for name in ["model.embed_tokens.weight", *([] if tied else ["lm_head.weight"])]:
        assert new[name].shape == (rows, 64)
        np.testing.assert_array_equal(new[name][:first], old[name][:first])
        mean = old[name][:first].astype(np.float64).mean(0).astype(np.float32)
        np.testing.assert_array_equal(new[name][first : first + 2], [mean, mean])
        np.testing.assert_array_equal(new[name][first + 2 :], old[name][first + 2 :])
    assert train(*how, "--add-tokens", TOKENS, "--learning-rate", "1e-3") == 0
    model = transformers.AutoModelForCausalLM.from_pretrained("output/new")
    tokenizer = transformers.AutoTokenizer.from_pretrained("output/new")
    assert model.config.vocab_size == rows and len(tokenizer) == first + 2
    assert first + 1 in np.atleast_1d(model.generation_config.eos_token_id)
    trained = model.get_input_embeddings().weight[first : first + 2]
    assert not torch.equal(trained[0], trained[1])  # each has learned
    capsys.readouterr()
    plan = ["plan", "--model", "model", "--device", "cpu", "--json", "--seq-len", "64"]
    assert _run([*plan, "--add-tokens", TOKENS]) == 0
    out = capsys.readouterr().out
    tables = 1 if tied else 2
    grown = json.loads(out[out.index("{") :])["parameters"]
    assert _run(plan) == 0
    out = capsys.readouterr().out
    assert (
        grown - json.loads(out[out.index("{") :])["parameters"]
        == tables * (rows - first - spare) * 64
    )


def test_adapters_train_the_new_rows_alone(place, capsys):
    peft = pytest.importorskip("peft")
    first = HfTokenizer(Path("model")).vocab_size
    assert tokenize("--add-tokens", TOKENS) == 0
    how = "--lora-rank 4 --base-dtype nf4 --name new --add-tokens".split()
    how += [TOKENS]
    for more, message in (
        (["--train", "norms"], "nothing trains the new rows beside adapters: give --train=norms,n"),
        (["--train", "head,new-rows"], "--train: embeddings and head have the new rows"),
        (["--head-dtype", "e4m3", "--matmul-dtype", "e4m3"], "has no gradient of new rows alone"),
    ):
        assert train(*how, *more) == 2
        assert message in capsys.readouterr().err
    assert train(*how, "--learning-rate", "1e-2") == 0
    stored = load_file("output/new/adapter_model.safetensors")
    shapes = {name: x.shape for name, x in stored.items() if "lora" not in name}
    delta = "token_adapter.trainable_tokens_delta"
    of_model = "base_model.model"
    assert shapes == {
        f"{of_model}.model.embed_tokens.{delta}": (2, 64), f"{of_model}.lm_head.{delta}": (2, 64),
    }  # fmt: skip
    merge = ["merge", "model", "output/new", "--base-dtype", "bf16", "--model-dtype", "fp32"]
    assert _run([*merge, "--out", "merged"]) == 0
    merged = transformers.AutoModelForCausalLM.from_pretrained("merged")
    model = transformers.AutoModelForCausalLM.from_pretrained("model", dtype=torch.float32)
    model.resize_token_embeddings(first + 2)  # as PEFT wants it
    model = peft.PeftModel.from_pretrained(model, "output/new")
    ids = torch.tensor([[first, 5, 6, first + 1, 7]])
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, merged(ids).logits, atol=1e-4, rtol=1e-3)
    go_on = ["--adapter", "output/new", "--add-tokens", TOKENS, "--base-dtype", "nf4"]
    assert train(*go_on, "--name", "on", "--ckpt-final") == 0
    assert _run(["export", "--checkpoint-dir", "ckpt/on", "--out-dir", "again"]) == 0
    for name, x in load_file("output/on/adapter_model.safetensors").items():
        np.testing.assert_array_equal(load_file("again/adapter_model.safetensors")[name], x)
    capsys.readouterr()
    assert train("--adapter", "output/new") == 2
    assert "rows: give --add-tokens as in their training" in capsys.readouterr().err
    assert _run(["sample", "model", "--adapter", "output/new", "--chat", "--prompt", "Hi",
                 "--max-new-tokens", "2", "--device", "cpu"]) == 0  # fmt: skip


def test_new_tokens_of_new_models_are_refused(place, capsys):
    assert tokenize("--add-tokens", TOKENS) == 0
    assert train("--lora-rank", "4", "--train", "new-rows") == 2
    assert "--train: new-rows are those of --add-tokens" in capsys.readouterr().err
    assert train("--from-scratch", "--add-tokens", TOKENS) == 2
    assert "--add-tokens: a new model has rows for all of its tokenizer" in capsys.readouterr().err
