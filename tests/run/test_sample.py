"""Generating text, and `llmq sample` on everything that holds a model."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models

from llmq.base.console import printable
from llmq.base.dtypes import F32
from llmq.base.errors import LlmqError
from llmq.commands.cli import _run
from llmq.formats import STORAGE
from llmq.model.generator import Generator, NewToken, Request
from llmq.options.presets import preset
from llmq.run.evaluate import Fleet, batch_shape
from llmq.run.sampling import (
    Sampler,
    Sampling,
    first_token,
    open_model,
    prompt_ids,
)
from llmq.run.script import Trainer
from llmq.runtime.device import DeviceSpec
from llmq.runtime.machine import Machine, choose_machine
from llmq.state.params import weight_table
from llmq.text import scoring
from llmq.text.scoring import make_batches
from llmq.text.tokenizer import ByteTokenizer, HfTokenizer, continuation
from tests.models import hf_model
from tests.runs import make_workplace, options, train


def test_what_would_steer_a_terminal_is_replaced():
    assert printable("a\n\tü漢\x1b[2J\r\x00\x7f\x9b") == "a\n\tü漢\ufffd[2J" + "\ufffd" * 4


def test_first_token():
    assert first_token(preset("tiny")) == 256
    assert first_token(preset("llama-2-7b")) == 1


# ------------------------------------------------------------------------------------------------
# Generating


def sampler_for(path, positions):
    with open_model(str(path)) as (config, read, _):
        return Sampler(choose_machine("cpu", 1), config, lambda w: w.load(read), positions)


def generate(sampler, prompt, count, seed=0, **how):
    choice = Sampling(max_new_tokens=count, seed=seed, **how)
    with sampler.texts(choice.requests(sampler.config, [prompt], 1, ())) as (new,):
        return list(new)


def saying(*ids):
    """In the place of Generator.stream: these tokens, of the first text."""

    def stream(self, requests):
        stop = requests[0].stop
        for id_ in ids:
            yield NewToken(0, id_, 0.0, "stop" if id_ in stop else None)

    return stream


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    hf_model("qwen3").save_pretrained(path)
    return path


def test_greedy_text_is_that_of_transformers(model_dir):
    prompt = [5, 17, 99, 3]
    expected = hf_model("qwen3").generate(
        torch.tensor([prompt]),
        max_new_tokens=20,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )[0, len(prompt) :]
    with sampler_for(model_dir, 64) as sampler:
        got = generate(sampler, prompt, 20, temperature=0)
        assert got == expected.tolist()[: len(got)]
        assert len(got) == 20 or expected[len(got)] == 2  # an end of text


def test_seed_decides_and_a_sampler_can_be_used_again(model_dir):
    with sampler_for(model_dir, 32) as sampler:
        how = {"temperature": 1.5}
        one = generate(sampler, [1, 7, 3], 12, **how)
        assert generate(sampler, [1, 7, 3], 12, seed=1, **how) != one
        generate(sampler, [4, 5], 2, **how)  # another text, in the same cache
        assert generate(sampler, [1, 7, 3], 12, **how) == one


def test_generation_stops_at_the_positions_and_at_the_end_of_text(model_dir, monkeypatch):
    with sampler_for(model_dir, 10) as sampler:
        assert len(generate(sampler, [1, 3, 4], 99, temperature=0)) <= 7
        assert len(generate(sampler, [1, 3, 4], 4, temperature=0)) <= 4
        monkeypatch.setattr(Generator, "stream", saying(7, 8, 2, 9))
        assert generate(sampler, [1], 9, temperature=0) == [7, 8]


@pytest.mark.parametrize("base", ["nf4", "int8", "e4m3", "mxfp4"])
def test_matrices_in_a_format_are_those_that_the_format_rounds(base, tmp_path):
    """Text and likelihoods are those of a model whose matrices have been rounded before."""
    hf_model("gpt_oss" if base == "mxfp4" else "qwen3").save_pretrained(tmp_path)
    request, asked = Request([5, 17, 99, 3], 8, temperature=0), [scoring.Request(np.arange(20), 19)]
    batches = make_batches(asked, partial(batch_shape, 64, 64))
    machine, found = choose_machine("cpu", 1), []
    with open_model(str(tmp_path)) as (config, read, _):
        frozen = {p.name for s in weight_table(config) if s.is_block for p in s.params}

        def rounded(param):
            values = read(param)
            if param.name not in frozen:
                return values
            return STORAGE[base].rounded(param, values.reshape(-1)).reshape(param.shape)

        for own, how in ((read, {"base_dtype": base}), (rounded, {})):
            with Sampler(machine, config, lambda w, own=own: w.load(own), 32, **how) as sampler:
                ((_, made),) = sampler.generator.run([request])
            with Fleet(machine, config, F32, batches, own, **how) as fleet:
                (likelihood,) = fleet.likelihoods(1, lambda tokens: None)
            found.append((made.ids, *made.logprobs, likelihood))
    assert found[0] == found[1]


# ------------------------------------------------------------------------------------------------
# The command


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a checkpoint and an export of the same weights."""
    folder = make_workplace(tmp_path_factory.mktemp("trained"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert train(steps=2, save_training_state=True, ckpt_interval=1) == 0
    return folder


def sample(model, *args):
    return _run(["sample", str(model), "--device=cpu", "--model-dtype=fp32", *args])


def test_export_and_checkpoint_say_the_same(trained, capsys):
    said = {}
    for name in ("out", "ckpt", "ckpt/step_00000002", "ckpt/step_00000001"):
        assert sample(trained / name, "--prompt=Hé", "--max-new-tokens=8") == 0
        said[name] = capsys.readouterr().out
    assert said["out"] == said["ckpt"] == said["ckpt/step_00000002"]
    assert said["ckpt/step_00000001"] != said["out"]
    assert said["out"].startswith("Hé")


def test_what_the_first_token_has_waited_for(trained, capsys):
    assert sample(trained / "out", "--prompt=a", "--max-new-tokens=2", "-v") == 0
    line = capsys.readouterr().err.splitlines()[-1]
    said, *parts = re.split(": |, ", line)
    total, *seconds = (float(re.search(r"[0-9.]+", part)[0]) for part in (said, *parts))
    names = [part.rpartition(" ")[0] for part in parts]
    assert names[:3] == ["imports", "device", "model and tokenizer"]
    assert names[3:] == ["plan", "memory", "weights", "first token"]
    assert sum(seconds) == pytest.approx(total, abs=0.1)


def test_several_samples(trained, capsys):
    args = ("--prompt=a", "--max-new-tokens=5", "--num-samples=3", "--temperature=1.5")
    assert sample(trained / "out", *args) == 0
    out = capsys.readouterr().out
    first, *others = out.split("\n---\n")
    assert len(others) == 2
    assert first not in others
    assert sample(trained / "out", *args) == 0
    assert capsys.readouterr().out == out
    assert sample(trained / "out", *args, "--seed=1") == 0
    assert capsys.readouterr().out != out


def write_prompts(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return f"--prompts={path}"


def test_prompts_of_a_file(trained, tmp_path, capsys):
    """Lines are in the order of the file, and the first prompt has the texts of `--prompt`."""
    args = ("--max-new-tokens=5", "--num-samples=2", "--temperature=1.5")
    records = [{"prompt": "a"}, {"prompt": "bcd" * 9, "id": 7}, {"prompt": ""}]
    assert sample(trained / "out", write_prompts(tmp_path / "p.jsonl", *records), *args) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(r["prompt"], r.get("id")) for r in found] == [
        (r["prompt"], r.get("id")) for r in records for _ in range(2)
    ]
    for record in found:
        assert record["finish"] in ("stop", "length") and record["logprob"] < 0
        assert record["tokens"] == 5 or record["finish"] == "stop"
    assert sample(trained / "out", "--prompt=a", *args) == 0
    texts = capsys.readouterr().out.removesuffix("\n").split("\n---\n")
    assert ["a" + record["text"] for record in found[:2]] == texts


@pytest.mark.parametrize(
    ("content", "args", "message"),
    [
        ("", (), "p.jsonl' has no record"),
        ('{"prompt": "a"}', ("--base-dtype=nf2",), "--base-dtype: must be nf4, int8, e4m3, mxfp4"),
        ('{"prompt": "a"}', ("--base-dtype=mxfp4",), "--base-dtype: mxfp4 is for experts, which"),
        ("no JSON", (), "p.jsonl' is no JSON: give a record on each line"),
        ('{"prompt": "a"}\n{"prompt": 5}', (), "p.jsonl:2: neither 'prompt' is a text nor 'mes"),
        ('{"messages": [{"role": "user"}]}', (), "--chat: the tokenizer of"),
        (json.dumps({"prompt": "x" * 70}), (), "p.jsonl:1: --prompts: it has 70 tokens, but the"),
        ('{"prompt": "a"}', ("--prompt=b",), "--prompts: excludes --prompt"),
        ('{"prompt": "a"}', ("--system=b",), "--system: needs --chat, or a file of prompts with"),
    ],
)
def test_files_that_hold_no_prompts(trained, tmp_path, capsys, content, args, message):
    (tmp_path / "p.jsonl").write_text(content)
    assert sample(trained / "out", f"--prompts={tmp_path / 'p.jsonl'}", *args) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1) and message in err


def test_a_file_of_prompts_that_is_not_there(trained, capsys):
    assert sample(trained / "out", "--prompts=nowhere.jsonl") == 2
    assert "--prompts: No such file or directory: 'nowhere.jsonl'" in capsys.readouterr().err


def test_empty_prompt_begins_a_text(trained, capsys):
    assert sample(trained / "out", "--max-new-tokens=3", "--temperature=0") == 0
    empty = capsys.readouterr().out
    args = ("--prompt=<|endoftext|>", "--max-new-tokens=3", "--temperature=0")
    assert sample(trained / "out", *args) == 0
    assert capsys.readouterr().out == "<|endoftext|>" + empty


@pytest.mark.parametrize("half", ["\udcff", "\ud800"])
def test_what_is_no_text_in_a_prompt(trained, capsys, half):
    """A byte that the shell hands on, and half a character of a JSON file."""
    assert sample(trained / "out", f"--prompt=a{half}", "--max-new-tokens=1") == 0
    assert capsys.readouterr().out.startswith("a\ufffd")
    assert prompt_ids(ByteTokenizer(), preset("tiny"), f"a{half}") == [97, *"\ufffd".encode()]


@pytest.mark.parametrize(
    ("prompt", "new", "text"),
    [
        ([0], [1, 1], " world world"),
        ([], [1, 0], "world Hello"),
        ([2], [1], "world"),  # the prompt's text is no prefix of the whole
    ],
)
def test_the_space_behind_a_prompt(prompt, new, text):
    """The decoder of Llama 2 strips the first one."""
    model = Tokenizer(models.WordLevel({"\u2581Hello": 0, "\u2581world": 1, "\ufffd": 2}, "\ufffd"))
    model.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
            decoders.Replace("\ufffd ", "?"),  # what follows changes the text before
        ]
    )
    decode = SimpleNamespace(decode=lambda ids: model.decode(list(ids)))
    assert continuation(decode, prompt, new) == text


def test_terminals_get_no_control_characters(trained, capsys, monkeypatch):
    monkeypatch.setattr(HfTokenizer, "decode", lambda self, ids: "\x1b[2J")
    assert sample(trained / "out", "--max-new-tokens=1") == 0
    assert capsys.readouterr().out == "\x1b[2J\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert sample(trained / "out", "--max-new-tokens=1") == 0
    assert capsys.readouterr().out == "\ufffd[2J\n"


def test_what_cannot_be_sampled(trained, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    no_tokenizer = shutil.copytree(trained / "out", tmp_path / "no_tokenizer")
    for path in no_tokenizer.glob("*token*.json"):
        path.unlink()
    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters" / "adapter_config.json").write_text("{}")
    for model, args, message in (
        (tmp_path / "adapters", (), "adapter_config.json': peft_type None is not supported"),
        (tmp_path / "empty", (), "empty' holds neither a model nor a complete checkpoint: give"),
        (tmp_path / "nothing", (), "is neither a directory nor a repository in the Hugging Face"),
        (no_tokenizer, (), "has neither tokenizer.json nor"),
        (trained / "out", (f"--prompt={'x' * 64}",), "--prompt: it has 64 tokens, but the model"),
        (trained / "ckpt" / "step_00000007", (), "is neither a directory"),
        ("Tiny", (), "MODEL: 'Tiny' is a preset, which has no weights: give the directory of a mo"),
    ):
        assert sample(model, *args) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert err.startswith("error: ")
        assert message in err and "--from-scratch" not in err


def test_options_that_do_nothing_without_chance(trained, capsys):
    options = ["--top-k=5", "--top-p=0.5", "--num-samples=2", "--max-new-tokens=1"]
    assert sample(trained / "out", "--prompt=a", "--temperature=0", *options) == 0
    flags = [line.split(" has no effect with --temperature 0: ")[0]
             for line in capsys.readouterr().err.splitlines()]  # fmt: skip
    assert flags == ["warning: --top-k 5", "warning: --top-p 0.5", "warning: --num-samples 2"]
    for one in (["--temperature=0"], options):
        assert sample(trained / "out", "--prompt=a", "--max-new-tokens=1", *one) == 0
        assert capsys.readouterr().err == ""


def test_tokenizer_of_another_model(trained, tmp_path, capsys):
    mixed = shutil.copytree(trained / "out", tmp_path / "mixed")
    path = mixed / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["x"] = 999
    path.write_text(json.dumps(tokenizer))
    assert sample(mixed, "--prompt=x") == 2
    assert "token 999 is outside the model's vocabulary of 257" in capsys.readouterr().err


def test_memory_that_is_not_there(trained, capsys, monkeypatch):
    monkeypatch.setattr("llmq.runtime.machine.available_host_memory", lambda: 1000)
    assert sample(trained / "out") == 2
    assert capsys.readouterr().err.startswith("error: out of memory: ")


def test_sizes_that_a_gpu_cannot_compute(trained, capsys, monkeypatch):
    """Found before the device is opened."""
    spec = DeviceSpec(name="GPU", capability=90, num_sms=1, memory=0, library_workspace=0)
    machine = Machine(kind="cuda", spec=spec, note=None)
    monkeypatch.setattr("llmq.run.sampling.choose_machine", lambda device, gpus: machine)
    monkeypatch.setattr(Machine, "open", lambda *args, **kwargs: pytest.fail("it was opened"))
    monkeypatch.setattr("llmq.plan.checks.MAX_HEAD_DIM", 8)
    assert _run(["sample", str(trained / "out"), "--device=cuda"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: the model's head_dim is 16; on a GPU it must be a")


def test_checkpoint_without_a_tokenizer(trained, tmp_path, capsys, monkeypatch):
    """The model has an unknown vocabulary."""
    folder = make_workplace(tmp_path)
    monkeypatch.chdir(folder)
    config = json.loads(Path("model/config.json").read_text())
    Path("model/config.json").write_text(json.dumps(config | {"vocab_size": 300}))
    assert train(steps=1, save_training_state=True) == 0
    capsys.readouterr()
    assert sample("ckpt") == 2
    assert "does not know its tokenizer" in capsys.readouterr().err


def test_text_is_printed_while_it_is_made(trained, monkeypatch):
    """Each piece reaches the reader before the next token is chosen."""
    events = []

    def stream(self, requests):
        for id_ in [*"é!".encode(), ord("x")]:
            events.append("token")
            yield NewToken(0, id_, 0.0, "length" if id_ == ord("x") else None)

    def write(text, end="\n"):
        if text + end:
            events.append(text + end)

    monkeypatch.setattr(Generator, "stream", stream)
    monkeypatch.setattr("llmq.base.console.print_own", write)
    assert sample(trained / "out", "--prompt=ab", "--max-new-tokens=4", "--temperature=1") == 0
    assert events == ["token", "token", "abé", "token", "!", "token", "x"]


def test_a_text_that_cannot_be_begun_is_not_printed(trained, monkeypatch, capsys):
    def fail(*_, **__):
        raise LlmqError("not finite")
        yield

    monkeypatch.setattr(Generator, "stream", fail)
    assert sample(trained / "out", "--prompt=ab") == 2
    assert capsys.readouterr().out == ""


# ------------------------------------------------------------------------------------------------
# From a running trainer

RUNS = [
    {"model-dtype": "fp32", "gpus": 2, "zero-level": 3, "lmhead-chunks": 2, "document-mask": True,
     "document-separator": 51},
    {"gpus": 2, "zero-level": 3, "offload-master": True, "grad-accumulation": 1},
    {"matmul-dtype": "e4m3", "fp8-recipe": "delayed", "master-dtype": "fp32"},
]  # fmt: skip


def running(**changes) -> Trainer:
    left_out = ("ckpt-interval", "eval-every-n-steps", "save-training-state")
    given = {n: v for n, v in options(**changes).items() if n not in left_out}
    return Trainer(**{name.replace("-", "_"): value for name, value in given.items()})


@pytest.mark.parametrize("changes", RUNS)
def test_sampling_changes_no_bit_of_the_training(tmp_path, monkeypatch, changes):
    """Before, between and within steps, of sharded, offloaded and fp8 weights; and what it says in
    fp32 is what the export says. Smaller formats round at other places in a pass over a whole row.
    """
    monkeypatch.chdir(make_workplace(tmp_path))
    changes = {"model-dtype": "bf16", "steps": 4} | changes

    def train(say) -> tuple:
        with running(**changes) as trainer:
            say(trainer)
            results = [trainer.step(), trainer.step()]
            say(trainer)
            ticket = trainer.enqueue_step()
            say(trainer)
            results += [trainer.result(ticket), trainer.validate(2), trainer.step()]
            text = say(trainer)
            trainer.export("out")
            times = {"begin": 0, "end": 0}
            state = {name: weight.tobytes() for name, weight in trainer.weights().items()}
            return [replace(result, **times) for result in results], state, text

    def say(trainer):
        return trainer.sample("Hé", max_new_tokens=12, seed=3)

    results, state, text = train(say)
    assert text.startswith("Hé")
    assert train(lambda trainer: None)[:2] == (results, state)
    if changes["model-dtype"] == "fp32":
        with redirect_stdout(io.StringIO()) as out:
            assert sample("out", "--prompt=Hé", "--seed=3", "--max-new-tokens=12") == 0
        assert out.getvalue() == text + "\n"


def test_what_a_trainer_cannot_sample(tmp_path, monkeypatch):
    monkeypatch.chdir(make_workplace(tmp_path))
    with running(steps=1) as trainer:
        with pytest.raises(LlmqError, match=r"--prompt: 'x{16}' has 16 tokens, --seq-len is 16: "):
            trainer.sample("x" * 16)
        assert len(trainer.sample("x" * 14, temperature=0, max_new_tokens=9)) <= 16
        with pytest.raises(TypeError, match="top_q"):
            trainer.sample("x", top_q=1)
        trainer.tokenizer = None
        with pytest.raises(LlmqError, match="it is not known which tokenizer made the training"):
            trainer.sample("x")
        assert trainer.step().loss > 0
