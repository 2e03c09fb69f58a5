"""`llmq sample --chat`: prompts of the template, the end of a turn, one question or a talk."""

from __future__ import annotations

import io
import json
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest

import llmq.run.sampling
from llmq.commands.cli import _run
from llmq.run.sampling import Conversation, open_model
from llmq.text.chat_template import end_of_turn, load_chat_template
from llmq.text.tokenizer import ByteTokenizer, HfTokenizer
from tests.chat_templates import CHATML, TEMPLATES, write_chat_tokenizer
from tests.runs import CONFIG, make_workplace, train
from tests.text_data import run

ENDS = {
    **dict.fromkeys(("chatml", "qwen2.5", "qwen3", "parts"), "<|im_end|>"),
    **{"llama-3.1": "<|eot_id|>", "mistral": "</s>", "phi-3": "<|end|>", "zephyr": "</s>"},
    "gemma": "<end_of_turn>",
}


@pytest.mark.parametrize("name", ENDS)
def test_end_of_turn(tmp_path, name):
    tokenizer = HfTokenizer(write_chat_tokenizer(tmp_path / "t", TEMPLATES[name]))
    stop = end_of_turn(load_chat_template(tokenizer), tokenizer)
    assert {tokenizer.decode([i]) for i in stop.ids} == {ENDS[name], "</s>"}
    assert stop.text is None


@pytest.fixture
def chatml(tmp_path):
    path = tmp_path / "chatml.jinja"
    path.write_text(CHATML)
    return str(path)


def test_an_end_that_is_no_token(chatml):
    """The beginning of the end of a turn is not said before it turns out to be none."""
    tokenizer = ByteTokenizer()
    talk = Conversation(load_chat_template(tokenizer, chatml), tokenizer, "s")
    assert talk.stop == ([256], "<|im_end|>")
    for text, parts in (
        ("aé<|im<|im_end|>\nmore", ["a", "é", "<|im"]),
        ("x<|im_e", ["x", "<|im_e"]),
    ):
        prompt, said = talk.ask("q"), []
        talk.reply(prompt, iter(text.encode()), said.append)
        assert said == parts
        assert talk.messages[-1] == {"role": "assistant", "content": "".join(said)}
    assert tokenizer.decode(talk.ask("r")) == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nq<|im_end|>\n"
        "<|im_start|>assistant\naé<|im<|im_end|>\n<|im_start|>user\nq<|im_end|>\n"
        "<|im_start|>assistant\nx<|im_e<|im_end|>\n<|im_start|>user\nr<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


# ------------------------------------------------------------------------------------------------
# The command


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A trained model of bytes, whose tokenizer has a template with the briefest marks."""
    folder = make_workplace(tmp_path_factory.mktemp("trained"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert train(steps=1) == 0
    source = "{% for m in messages %}{{ m.role[0] ~ m.content ~ ';' }}{% endfor %}"
    source += "{% if add_generation_prompt %}a{% endif %}"
    (folder / "out" / "chat_template.jinja").write_text(source)
    return folder / "out"


@pytest.fixture
def said(monkeypatch):
    """A model that has learned its answers by heart; the prompts that it gets."""
    prompts, replies = [], []

    def reply(request):
        prompts.append((bytes(request.prompt).decode(), request.max_new_tokens, request.stop))
        yield from replies[len(prompts) - 1].encode()

    @contextmanager
    def texts(self, requests):
        yield [reply(request) for request in requests]

    monkeypatch.setattr("llmq.run.sampling.Sampler.texts", texts)
    return prompts, replies


def chat(model, *args):
    return _run(["sample", str(model), "--device=cpu", "--model-dtype=fp32", "--chat", *args])


def test_one_question(model, said, capsys):
    prompts, replies = said
    replies += ["hello;u!", "bye"]
    assert chat(model, "--prompt=hi", "--system=be", "--num-samples=2", "--max-new-tokens=9") == 0
    assert capsys.readouterr().out == "hello\n---\nbye\n"
    assert prompts == [("sbe;uhi;a", 9, {256})] * 2


def test_a_conversation(model, said, capsys, monkeypatch):
    prompts, replies = said
    replies += ["one;", "two;"]
    monkeypatch.setattr("sys.stdin", io.StringIO("first\n\nsecond\n"))
    assert chat(model) == 0
    assert capsys.readouterr().out == "one\ntwo\n"
    assert [text for text, *_ in prompts] == ["ufirst;a", "ufirst;aone;usecond;a"]


def test_on_a_terminal(model, said, capsys, monkeypatch):
    """Ctrl-C ends a reply and not the conversation."""
    prompts, replies = said
    replies += ["one", "two"]
    typed = iter(["first", "second"])

    def read(mark):
        assert mark == "> "
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    def interrupted(new):
        yield next(new)
        raise KeyboardInterrupt

    stdin = io.StringIO()
    stdin.isatty = lambda: True
    monkeypatch.setattr("sys.stdin", stdin)
    monkeypatch.setattr("builtins.input", read)
    until = llmq.run.sampling._until_interrupted
    monkeypatch.setattr(
        llmq.run.sampling, "_until_interrupted", lambda new: until(interrupted(new))
    )
    assert chat(model) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["o", "t"]
    assert prompts[1][0] == "ufirst;ao;usecond;a"


def test_conversations_of_a_file(model, tmp_path, capsys):
    """Messages are answered as what the user says."""
    how = ("--max-new-tokens=4", "--temperature=0", "--device=cpu", "--model-dtype=fp32")
    talk = [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}]
    (tmp_path / "p.jsonl").write_text(json.dumps({"messages": talk}))
    assert _run(["sample", str(model), f"--prompts={tmp_path / 'p.jsonl'}", *how]) == 0
    of_messages = json.loads(capsys.readouterr().out)
    assert of_messages["messages"] == talk
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "hi"}))
    given = (f"--prompts={tmp_path / 'p.jsonl'}", "--system=be")
    assert chat(model, *given, *how[:2]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == of_messages["text"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--num-samples=2"], "--num-samples: with --chat it needs --prompt"),
        (["--prompt=" + "x" * 70], "--prompt: it has 73 tokens, but the model has 64 positions"),
        (["--prompt=x", "--chat-template=nowhere"], "--chat-template nowhere: there is neither"),
    ],
)
def test_bad_options(model, capsys, args, message):
    assert chat(model, *args) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1) and message in err


def test_what_chat_needs(model, tmp_path, capsys, monkeypatch, chatml):
    bare = shutil.copytree(model, tmp_path / "bare")
    (bare / "chat_template.jinja").unlink()
    assert chat(bare, "--prompt=x") == 2
    assert f"--chat: the tokenizer of '{bare}' has no chat template" in capsys.readouterr().err
    assert _run(["sample", str(bare), "--system", "x"]) == 2
    assert "--system: needs --chat" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", io.StringIO("x" * 30))
    assert chat(bare, "--chat-template", chatml) == 2
    assert "the conversation has 80 tokens, and there is room for 64" in capsys.readouterr().err
    config = bare / "tokenizer_config.json"
    content = json.loads(config.read_text()) | {"chat_template": "{{ raise_exception('no') }}"}
    config.write_text(json.dumps(content))
    assert chat(bare, "--prompt=x") == 2
    assert capsys.readouterr().err == f"error: the chat template of '{bare}' says: no\n"


# ------------------------------------------------------------------------------------------------
# Training on conversations


@pytest.fixture
def talks(tmp_path, monkeypatch):
    """A workplace with conversations, rendered by another template than that of the model."""
    folder = make_workplace(tmp_path)
    monkeypatch.chdir(folder)
    tokenizer = write_chat_tokenizer(folder / "model", "{{ 'of the model' }}")
    vocab = HfTokenizer(tokenizer).vocab_size
    config = json.loads(Path("model/config.json").read_text())
    Path("model/config.json").write_text(json.dumps(config | {"vocab_size": vocab}))
    Path("t.jinja").write_text(CHATML)
    talk = [{"role": "user", "content": "q" * 40}, {"role": "assistant", "content": "a"}]
    Path("a.jsonl").write_text((json.dumps({"messages": talk}) + "\n") * 9)
    run("a.jsonl", out=Path("chat"), tokenizer="model", chat_template="t.jinja")


def test_a_model_trained_on_conversations_stops_at_the_end_of_a_turn(talks):
    """The export has the data's template, and the end of a turn among its EOS tokens."""
    assert train(steps=1, train_file="chat/*.bin", eval_file="none") == 0
    assert load_chat_template(HfTokenizer(Path("out"))).source() == CHATML
    ends = [CONFIG["eos_token_id"], *HfTokenizer(Path("out")).encode("<|im_end|>")]
    assert json.loads(Path("out/generation_config.json").read_text())["eos_token_id"] == ends
    assert json.loads(Path("out/config.json").read_text())["eos_token_id"] == ends


def test_adapters_trained_on_conversations_bring_the_template_and_its_end(talks):
    """Added to the model, in memory or as a new one, they are as a model that was trained so."""
    run("t.jinja", out=Path("text"), tokenizer="model")
    text = {"train_file": "text/train*.bin", "eval_file": "none", "seq_len": 4, "batch_size": 1}
    assert train(steps=0, out_dir="base", **text) == 0
    data = {"train_file": "chat/*.bin", "eval_file": "none", "checkpoint_dir": "other"}
    options = {"steps": 1, "model": "base", "from_scratch": None, "lora_rank": 2, "name": "talks"}
    assert train(**data, **options, out_dir="adapters") == 0
    ends = [CONFIG["eos_token_id"], *HfTokenizer(Path("adapters")).encode("<|im_end|>")]
    assert _run(["merge", "base", "adapters", "--out=merged"]) == 0
    for model, adapter in (("base", Path("adapters")), ("merged", None)):
        with open_model(model, adapter) as (config, _, source):
            assert list(config.eos_token_ids) == ends
            assert load_chat_template(HfTokenizer(Path(source))).source() == CHATML
    assert json.loads(Path("merged/generation_config.json").read_text())["eos_token_id"] == ends
    with open_model("base") as (config, _, source):
        assert list(config.eos_token_ids) == ends[:1]
        assert load_chat_template(HfTokenizer(Path(source))).source() == "{{ 'of the model' }}"
