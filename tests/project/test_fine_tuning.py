"""docs/fine-tuning.md as it stands, with a model so small that it takes seconds."""

from __future__ import annotations

import io
import json
import random
import re
import shlex
from pathlib import Path

import pytest

from llmq.commands.cli import _run
from llmq.options.option_file import read_option_file
from llmq.run.model_of_run import packing_of_data
from llmq.text.chat_template import load_chat_template
from llmq.text.tokenizer import HfTokenizer
from tests.chat_templates import CHATML, assistant, user, write_chat_tokenizer
from tests.runs import CONFIG
from tests.text_data import documents, run
from tools.plan_configs import CONFIGS

transformers = pytest.importorskip("transformers")

NOTEBOOK = Path(__file__).parents[2] / "examples" / "finetune.ipynb"
PAGE = (Path(__file__).parents[2] / "docs" / "fine-tuning.md").read_text()
SMALL = {
    "train": "--device cpu --model-dtype fp32",
    "eval": "--device cpu",
    "sample": "--device cpu --max-new-tokens 5",
}


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A folder with 200 conversations and a random model with tokenizer and template."""
    monkeypatch.chdir(tmp_path)
    write_chat_tokenizer(Path("model"), CHATML)
    vocab = HfTokenizer(Path("model")).vocab_size
    config = CONFIG | {"vocab_size": vocab, "max_position_embeddings": 1024}
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**config))
    model.float().save_pretrained("model")
    question = re.search(r"^ {4}(\{\"question.*\})$", PAGE, re.MULTILINE)[1]
    Path("questions.jsonl").write_text(f"{question}\n" * 3)
    rng = random.Random(0)
    texts = iter(documents(1000))
    with open("talks.jsonl", "w") as file:
        for _ in range(200):
            turns = [(user(next(texts)), assistant(next(texts))) for _ in range(rng.randint(1, 2))]
            file.write(json.dumps({"messages": [m for turn in turns for m in turn]}) + "\n")


def test_the_commands_run(workplace, capsys, monkeypatch):
    block = re.search(r"talk to:\n\n((?: {4}.*\n)+)", PAGE)[1].replace("\\\n", " ")
    commands = [shlex.split(line) for line in block.strip().splitlines()]
    assert [words[1] for words in commands] == [
        *("tokenize", "show", "train", "eval", "sample", "sample")
    ]
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n"))
    said = []
    for _, command, *args in commands:
        assert _run([command, *args, *SMALL.get(command, "").split()]) == 0, capsys.readouterr().err
        said.append(capsys.readouterr())
    assert "200 documents, vocabulary of " in said[0].out and " of them trained (" in said[0].out
    assert "<|im_start|>assistant\n⟦" in said[1].out and "<|im_end|>\n⟧" in said[1].out
    assert "[V]" in said[2].out and "(train, best-fit, masked)" in said[2].out
    files = {"train_file": ("data/talks/train*.bin",)}
    assert packing_of_data(files) == {"packing": "best-fit"}
    assert packing_of_data(files | {"packing": "concat"}) == {}
    assert packing_of_data(files | {"document_mask": False}) == {}
    assert packing_of_data({"train_file": ("missing.bin",)}) == {}
    Path("data/talks/train-000.docs").unlink()
    assert packing_of_data(files) == {}
    assert re.search(r"^arc +acc +[01]\.\d{4} ", said[3].out, re.MULTILINE)
    assert said[5].out.count("\n") >= 1


def test_the_commands_of_a_ready_configuration(workplace, capsys):
    """The commands are those of its head, with the small model in the place of the real one."""
    path = CONFIGS / "finetune-qwen2.5-7b-12gb.yaml"  # it offloads and shards all there is
    lines = re.findall("^# {4,}(.*)\n", path.read_text(), re.MULTILINE)
    _, *commands = "\n".join(lines).replace("\\\n", " ").splitlines()
    words = [shlex.split(line) for line in commands if line.startswith("llmq ")]
    assert [command for _, command, *_ in words] == ["tokenize", "show", "train"]
    Path("configs").symlink_to(CONFIGS)
    Path("Qwen").mkdir()
    Path("model").rename(read_option_file(path)["model"])
    small = f"{SMALL['train']} --seq-len 128 --warmup 5"  # in 18 steps
    for _, command, *args in words:
        more = small.split() if command == "train" else []
        assert _run([command, *args, *more]) == 0, capsys.readouterr().err
    said = capsys.readouterr()
    assert "(train, best-fit, masked)" in said.out and "[V]" in said.out
    assert "warning" not in said.err


def test_the_template_for_base_models(tmp_path):
    """The template marks as trained what the page promises."""
    (tmp_path / "t.jinja").write_text(re.search(r"```jinja\n(.*?)```", PAGE, re.DOTALL)[1])
    talk = {"messages": [user("q"), assistant("a"), user("r"), assistant("b")]}
    (tmp_path / "a.jsonl").write_text(json.dumps(talk))
    folder = write_chat_tokenizer(tmp_path / "t")
    out = tmp_path / "out"
    how = {"tokenizer": str(folder), "chat_template": str(tmp_path / "t.jinja")}
    run(tmp_path / "a.jsonl", out=out, **how)
    template = load_chat_template(HfTokenizer(out / "tokenizer"))
    text, spans = template.render(talk["messages"])
    assert text == "### user\nq\n### assistant\na</s>\n### user\nr\n### assistant\nb</s>\n"
    assert [text[start:end] for start, end in spans] == ["a</s>", "b</s>"]
    prompt = template.render(talk["messages"][:1], add_generation_prompt=True).text
    assert prompt == "### user\nq\n### assistant\n"


def test_the_notebook_runs(workplace):
    """In a kernel of Jupyter, with the small model; the live view is one output that changes."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not [cell for cell in notebook.cells if cell.get("outputs")], "clear all outputs"
    names, tokenize, train, plot, sample = (c for c in notebook.cells if c.cell_type == "code")
    names.source = 'MODEL, TALKS, SEQ_LEN, EPOCHS = "model", "few.jsonl", 128, 1'
    lines = Path("talks.jsonl").read_text().splitlines()[:40]
    Path("few.jsonl").write_text("\n".join(lines))
    nbclient.NotebookClient(notebook, timeout=60, kernel_name="python3").execute()

    def said(cell):
        return "".join(o.get("text", "") or o.data["text/plain"] for o in cell.outputs)

    assert "40 documents" in said(tokenize) and "\033[32m" in said(tokenize), "what is trained"
    (shown,) = (output for output in train.outputs if output.output_type == "display_data")
    assert re.search(r"step (\d+)/\1 .* tok/s", shown.data["text/plain"])
    assert "Saving model to `output/talks`" in shown.data["text/plain"]
    assert "[T]" not in "".join(o.get("text", "") for o in train.outputs)
    assert [o for o in plot.outputs if "image/png" in o.get("data", {})]
    assert said(sample).strip()
