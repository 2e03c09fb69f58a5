"""Files of others: nothing in them acts, and no bad one stops more than itself."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from rich.text import Text

from llmq.arch.model_config import ModelConfig
from llmq.base.console import doors, print_text, printable_console
from llmq.base.dtypes import F32
from llmq.base.errors import ConfigError, DataError
from llmq.base.worker import Bounds, in_worker
from llmq.checkpoint.hf import export_model
from llmq.checkpoint.manifest import digest_of
from llmq.commands.cli import _run
from llmq.data.loader import DataLoader
from llmq.data.tokens import TokenWriter
from llmq.report.views import PlainView
from llmq.text import guarded
from llmq.text.tokenize import tokenize
from llmq.text.tokenizer import EXACT_CODE, EXACT_MODULE, HfTokenizer
from tests.runs import CONFIG, flags, make_workplace, train
from tests.text_data import write_bpe, zst

FOREIGN_MAP = {"AutoTokenizer": [None, "tokenization_exact.Theirs"]}


@pytest.fixture
def tokenizer(tmp_path):
    """A folder with a tokenizer of somebody else."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    write_bpe(folder)
    return folder


def export(folder: Path, tokenizer: HfTokenizer | Path) -> Path:
    model = ModelConfig.from_hf(CONFIG)
    export_model(folder, model, lambda param: np.zeros(param.shape, np.float32), F32, tokenizer)
    return folder


# Code and links


@pytest.mark.parametrize("whole_folder", [True, False])
def test_code_of_others_is_left_behind(tokenizer, tmp_path, capsys, whole_folder):
    for name in (EXACT_MODULE, "modeling_theirs.py"):
        (tokenizer / name).write_text("import os; os.abort()\n")
    config = {"auto_map": FOREIGN_MAP, "tokenizer_class": "Qwen2Tokenizer"}
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(config))
    out = export(tmp_path / "out", tokenizer if whole_folder else HfTokenizer(tokenizer))
    said = capsys.readouterr().err
    assert said.startswith("warning: the code that ") and "tokenization_exact.Theirs" in said
    written = json.loads((out / "tokenizer_config.json").read_text())
    assert "Theirs" not in str(written)
    modules = {path.name: path.read_text() for path in out.glob("*.py")}
    assert modules in ({}, {EXACT_MODULE: EXACT_CODE})
    again = export(tmp_path / "again", out)  # our own is no code of others
    assert capsys.readouterr().err == ""
    assert json.loads((again / "tokenizer_config.json").read_text()) == written


def test_links_that_leave_the_folder_are_not_followed(tokenizer, tmp_path, capsys):
    (tmp_path / "secret").write_text("secret")
    (tokenizer / "tokenizer.model").symlink_to("../secret")
    (tokenizer / "chat_template.jinja").write_text("{{ messages }}")
    (tokenizer / "added_tokens.json").symlink_to("own.json")
    (tokenizer / "own.json").write_text("{}")
    out = export(tmp_path / "out", HfTokenizer(tokenizer))
    assert "tokenizer.model' is a link that leaves its folder" in capsys.readouterr().err
    assert not os.path.lexists(out / "tokenizer.model")
    assert (out / "added_tokens.json").read_text() == "{}"
    (tokenizer / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    (tokenizer / "tokenizer.json").symlink_to("../tokenizer.json")
    with pytest.raises(DataError, match=r"tokenizer\.json. is a link that leaves its folder"):
        HfTokenizer(tokenizer)


def test_links_of_the_hubs_cache_are_followed(tokenizer, tmp_path):
    """The hub's cache has a link to the content for every file of a snapshot."""
    snapshot = tmp_path / "models--a--b/snapshots/0123"
    snapshot.mkdir(parents=True)
    (tmp_path / "models--a--b/blobs").mkdir()
    for path in tokenizer.iterdir():
        path.rename(tmp_path / "models--a--b/blobs" / path.name)
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    out = export(tmp_path / "out", HfTokenizer(snapshot))
    assert (out / "tokenizer.json").is_file() and not (out / "tokenizer.json").is_symlink()


# Programs of others: templates and tokenizers

TALK = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}
# Each has what it does, and what is said of it. The first ones never came to an end.
TEMPLATES = {
    "product": ("{{ 'a' * 10**12 }}", "MemoryError|more memory"),
    "power": ("{{ (10**9)**(10**9) }}", "more than 0.3 s of processor"),
    "words": ("{{ lipsum(n=10**7) }}", "'lipsum' is undefined"),
    "long": ("{% for i in range(999) %}{{ 'a' * 10**5 }}{% endfor %}", "more than 64 MiB of text"),
    "nested loops": (
        "".join(f"{{% for i{n} in [1] %}}" for n in range(25)) + "{% endfor %}" * 25,
        "is no template: too many statically nested blocks",
    ),
    "nested ifs": ("{% if a %}" * 120 + "{% endif %}" * 120, "is no template"),
    "half a character": ("{{ '\\ud800' }}{{ messages[1].content }}", "half a character, U.D800"),
}


@pytest.fixture
def chats(tokenizer, tmp_path, monkeypatch):
    """A folder with a tokenizer of others, and conversations whose second one is the last."""
    monkeypatch.chdir(tmp_path)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(config))
    Path("chats.jsonl").write_text((json.dumps(TALK) + "\n") * 2)
    return tmp_path


def tokenized(*inputs, **options):
    options = {"tokenizer": "theirs", "record_seconds": 0.3} | options
    return tokenize([*inputs], out="out", eval_fraction=0, progress=False, **options)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_of_others_has_bounds(chats, name):
    text, said = TEMPLATES[name]
    Path("theirs.jinja").write_text(text)
    with pytest.raises(DataError, match=said) as error:
        tokenized("chats.jsonl", chat_template="theirs.jinja")
    assert "theirs.jinja" in str(error.value) and "\n" not in str(error.value)
    assert not list(Path().glob("out/*"))


def test_the_record_is_named_for_which_a_template_takes_too_much(chats):
    talk = {"messages": [*TALK["messages"], {"role": "user", "content": "for ever"}]}
    with Path("chats.jsonl").open("a") as file:
        file.write(json.dumps(talk) + "\n")
    loop = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3
    Path("theirs.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% if m.content == 'for ever' %}"
        + loop
        + "{% endif %}{% endfor %}"
    )
    with pytest.raises(DataError, match=r"^chats\.jsonl:3: it took more than 0.3 s of processor"):
        tokenized("chats.jsonl", chat_template="theirs.jinja")


def split_by(folder, pattern=None, normalizer=None):
    document = json.loads((folder / "tokenizer.json").read_text())
    if pattern is not None:
        split = {"type": "Split", "behavior": "Isolated", "invert": False}
        document["pre_tokenizer"] = split | {"pattern": {"Regex": pattern}}
    if normalizer is not None:
        document["normalizer"] = {"type": "Sequence", "normalizers": normalizer}
    (folder / "tokenizer.json").write_text(json.dumps(document))


def test_a_pattern_that_explodes_is_one_line(chats, tokenizer):
    split_by(tokenizer, r"(a+)+$")
    Path("a.jsonl").write_text('{"text": "b"}\n{"text": "%s!"}\n' % ("a" * 60))
    with pytest.raises(DataError, match=r"'theirs' fails: .*retry-limit") as error:
        tokenized("a.jsonl", record_seconds=10)
    assert "\n" not in str(error.value)


def test_a_normalizer_that_explodes_ends_with_its_record(chats, tokenizer):
    ten = {"type": "Replace", "pattern": {"String": "z"}, "content": "z" * 100}
    split_by(tokenizer, normalizer=[ten] * 6)
    Path("a.jsonl").write_text('{"text": "b"}\n{"text": "zzz"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl:2: .*(memory|processor time)"):
        tokenized("a.jsonl")


CPU = ["--device", "cpu"]
SAMPLE = ["sample", "model", *CPU, "--max-new-tokens", "2", "--prompt", "zebra"]
TRAIN = ["train", "--model", "model", "--train-file", "out/train*.bin", "--eval-file", "none"]
TRAIN += ["--seq-len", "8", "--batch-size", "2", "--steps", "1", "--ckpt-interval", "0", *CPU]
COMMANDS = {
    "sample": SAMPLE,
    "sample --chat": [*SAMPLE, "--chat"],
    "eval": ["eval", "model", "--task", "text=zebra.txt", *CPU],
    "show": ["show", "out", "--tokenizer", "model"],
    "export": ["export", "model", "--out", "new"],
    "gguf": ["export", "model", "--out", "new.gguf", "--format", "gguf"],
    "fp8": ["export", "model", "--out", "new", "--format", "fp8"],
    "train": [*TRAIN, "--allow-other-tokenizer", "--out-dir", "new"],
    "train --eval-task": [*TRAIN, "--allow-other-tokenizer", "--eval-task", "text=zebra.txt"],
    "train --sample-prompt": [*TRAIN, "--allow-other-tokenizer", "--sample-prompt", "zebra"],
    "train --add-tokens": [*TRAIN, "--allow-other-tokenizer", "--add-tokens", "<a>"],
    "tokenize": ["tokenize", "zebra.txt", "--tokenizer", "model", "--out", "new"],
}


@pytest.fixture
def model(chats, monkeypatch):
    """A model folder with a tokenizer of others and a chat template, and token files of both."""
    bounds = replace(guarded.BOUNDS, seconds=0.3, memory=1 << 30)
    monkeypatch.setattr(guarded, "BOUNDS", bounds)
    monkeypatch.setattr(guarded, "_ONCE", bounds)
    monkeypatch.setenv("LLMQ_CACHE_DIR", str(chats / "cache"))
    config = CONFIG | {"vocab_size": HfTokenizer(Path("theirs")).vocab_size}
    config = ModelConfig.from_hf(config | {"eos_token_id": 0})
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    Path("theirs/chat_template.jinja").write_text(template)
    export_model(
        Path("model"), config, lambda p: np.zeros(p.shape, np.float32), F32, Path("theirs")
    )
    Path("model/llmq.json").unlink(missing_ok=True)
    Path("zebra.txt").write_text("zebra " * 40)
    tokenized("zebra.txt")
    return Path("model")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_runs_tokenizers_in_bounds(model, command, capsys):
    """With a tokenizer that explodes the command ends in one line; with a good one it works."""
    if command != "train --add-tokens":
        assert _run(COMMANDS[command]) == 0, capsys.readouterr().err
        shutil.rmtree("new", ignore_errors=True)
        Path("new.gguf").unlink(missing_ok=True)
    capsys.readouterr()
    shutil.rmtree("cache", ignore_errors=True)
    replaced = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 200}
    split_by(model, normalizer=[replaced] * 6)
    assert _run([*COMMANDS[command], *(["--overwrite"] * (command[:5] == "train"))]) == 2
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if not line.startswith("warning: ")]
    assert re.search("memory|processor time", lines[-1])
    assert "the tokenizer 'model" in lines[-1] or "model/tokenizer" in lines[-1]
    assert "[T]" not in out  # nothing was trained in vain
    assert len([line for line in lines if line.startswith("error: ")]) == 1
    assert not [*Path().glob("new*/model*")] and not Path("new.gguf").exists()


@pytest.mark.parametrize(
    "template", ["{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3, "{{ [1] * 10**9 }}"]
)
def test_a_template_of_a_chat_has_bounds(model, template, capsys):
    (model / "chat_template.jinja").write_text(template)
    assert _run(COMMANDS["sample --chat"]) == 2
    err = capsys.readouterr().err
    assert re.search("memory|processor time", err) and err.count("error: ") == 1
    Path("loop.jinja").write_text(template)
    args = ["sample", "model", *CPU, "--chat", "--prompt", "a", "--chat-template", "loop.jinja"]
    assert _run(args) == 2


def test_a_process_beside_threads_does_not_run_the_users_script(model):
    Path("script.py").write_text(
        "import threading, time\n"
        "print('once')\n"
        "threading.Thread(target=time.sleep, args=(9,), daemon=True).start()\n"
        "from llmq.text.guarded import guarded_tokenizer\n"
        "tokenizer = guarded_tokenizer('model')\n"
        "print(tokenizer.decode(tokenizer.encode('zebra')), __file__)\n"
    )
    command = [sys.executable, "script.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["once", f"zebra {Path('script.py').absolute()}"], (
        done.stderr
    )


def test_files_that_cannot_be_read_are_one_line_from_a_worker_too(chats, capsys):
    os.remove("theirs/tokenizer_config.json")
    os.mkdir("theirs/tokenizer_config.json")
    capsys.readouterr()
    assert _run(["tokenize", "chats.jsonl", "--tokenizer", "theirs", "--out", "out"]) == 2
    err = capsys.readouterr().err
    assert err == "error: Is a directory: theirs/tokenizer_config.json\n"


def test_workers_that_are_killed_name_the_record():
    """The system kills what takes too much memory of all."""
    with pytest.raises(DataError, match=r"^a\.jsonl:1: a worker process was killed, perhaps"):
        in_worker(killed, "a.jsonl:1", Bounds())


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_lost_terminal_ends_a_run_with_workers_in_silence(chats, workers):
    Path("long.jsonl").write_text('{"text": "some words of a text"}\n' * 300_000)
    command = [sys.executable, "-m", "llmq", "tokenize", "long.jsonl", "--tokenizer", "theirs"]
    command += ["--out", "out", "--workers", str(workers)]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=partial(signal.signal, signal.SIGHUP, signal.SIG_DFL),  # nohup has it ignored
    ) as process:
        wait_for(lambda: list(Path().glob("out/*train*")) or process.poll() is not None)
        os.killpg(process.pid, signal.SIGHUP)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (128 + signal.SIGHUP, "", "")


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# Sizes


@pytest.mark.parametrize("kind", ["jsonl", "json", "jsonl.gz", "jsonl.zst", "json.gz"])
def test_a_record_that_is_too_long_is_refused_before_it_is_read(chats, kind):
    record = json.dumps({"text": "a b " * 5000})
    good = json.dumps({"text": "good"})
    text = f"{good}\n{record}\n" if kind.startswith("jsonl") else f"[{good}, {record}]"
    pack = {"gz": gzip.compress, "zst": zst}.get(kind.rpartition(".")[2], bytes)
    Path(f"a.{kind}").write_bytes(pack(text.encode()))
    with pytest.raises(
        DataError, match=rf"a\.{kind}(:2|' at byte \d+): a record of more than 20,0"
    ):
        tokenized(f"a.{kind}", max_record=20_000, tokenizer="bytes")
    assert tokenized(f"a.{kind}", max_record=20_012, tokenizer="bytes").documents == 2


@pytest.mark.parametrize("ending", ["txt.gz", "jsonl.zst"])
def test_a_bomb_is_one_line(chats, ending):
    pack = gzip.compress if ending.endswith("gz") else zst
    Path(f"bomb.{ending}").write_bytes(pack(bytes(90 << 20)))
    start = time.process_time()
    with pytest.raises(DataError, match=rf"bomb\.{ending}(' holds more than|:1: a record of more)"):
        tokenized(f"bomb.{ending}", tokenizer="bytes")
    assert time.process_time() - start < 5


def test_vast_options_and_sizes_end_at_once(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("o.yaml").write_text("model: '" + "x" * (20 << 20) + "'")
    config = CONFIG | {"num_attention_heads": 10_000_000, "num_key_value_heads": 10_000_000}
    Path("vast").mkdir()
    Path("vast/config.json").write_text(
        json.dumps(config | {"hidden_size": 10_000_000, "head_dim": 1})
    )
    start = time.process_time()
    assert _run(["plan", "--config", "o.yaml"]) == 2
    assert "o.yaml is too large" in capsys.readouterr().err
    assert _run(["plan", "--model", "vast", "--from-scratch"]) == 2
    assert "num_attention_heads: must be at most" in capsys.readouterr().err
    assert time.process_time() - start < 3


@pytest.mark.parametrize("wrong", [0, -1, 10**9])
def test_key_value_heads_are_one_or_more(wrong):
    with pytest.raises(ConfigError, match="num_key_value_heads"):
        ModelConfig.from_hf(CONFIG | {"num_key_value_heads": wrong})


@pytest.mark.parametrize("count", [0, 1])
def test_a_token_file_without_a_pair_is_told_so(tmp_path, count):
    with TokenWriter(tmp_path / "a.bin", 100) as writer:
        writer.write(np.zeros(count, np.int32))
    with pytest.raises(DataError, match=r"has 0 sequences of 8 tokens, but one "):
        DataLoader(tmp_path / "a.bin", seq_len=8, micro_batch=1, seed=0, vocab_size=100)


# The terminal

STEERING = "\x1b[2J\x1b]0;x\x07\x9b1m\x7f\u202e"  # clears it, names its window, colours, turns
ODD = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def shown(capsys, *args):
    """The status of a command that prints the name which the test has put somewhere."""
    capsys.readouterr()
    status = _run([*map(str, args)])
    out, err = capsys.readouterr()
    assert not ODD.search(out + err), ascii(out + err)
    assert "ODD" in out + err, out + err
    return status


def test_no_text_of_others_steers_the_terminal(chats, capsys, monkeypatch):
    odd = f"ODD{STEERING}"
    # Names of tensors in an index, and a dtype
    export(chats / "model", chats / "theirs")
    path = chats / "model/model.safetensors"
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    norm = header.pop("model.norm.weight")
    moved = norm | {"data_offsets": [at + 4 for at in norm["data_offsets"]]}
    for changed in ({odd: moved}, {"model.norm.weight": norm | {"dtype": odd}}):
        text = json.dumps(header | changed, ensure_ascii=False).encode()
        data = whole[8 + length :] + bytes(4 if odd in changed else 0)
        path.write_bytes(len(text).to_bytes(8, "little") + text + data)
        assert shown(capsys, "check", "model") == 2
    path.rename(chats / "model/a.safetensors")
    index = {"weight_map": {odd: "a.safetensors"}}
    (chats / "model/model.safetensors.index.json").write_text(json.dumps(index))
    assert shown(capsys, "check", "model") == 2
    # Words of a template, fields of records, and keys of options
    Path("odd.jinja").write_text(f"{{{{ raise_exception('{odd}') }}}}")
    more = ["--tokenizer", "theirs", "--out", "out"]
    assert shown(capsys, "tokenize", "chats.jsonl", "--chat-template", "odd.jinja", *more) == 2
    Path("a.jsonl").write_text(json.dumps({odd: 1}) + "\n")
    assert shown(capsys, "tokenize", "a.jsonl", "--field", "b", *more) == 2
    Path("o.yaml").write_text(
        f'"{odd}": 1\n'.encode("unicode_escape").decode().replace("\\n", "\n")
    )
    assert shown(capsys, "plan", "--config", "o.yaml") == 2
    # A log says these of a run and of GPUs
    gpu = {"log": "gpu-model", "time": "2026-01-01T00:00:00", "step": 0, "name": odd, "rank": 0}
    gpu |= {"uuid": odd, "machine": odd}
    start = {"log": "cmd", "time": "2026-01-01T00:00:00", "step": 0, "cmd": "x", "resumed_at": 0}
    start["run"] = {"id": "0" * 12, "name": odd}
    Path("log.json").write_text("[\n" + ",\n".join(map(json.dumps, (start, gpu))) + "\n]\n")
    assert shown(capsys, "top", "log.json", "--once") == 0
    assert shown(capsys, "plot", f"{odd}.json") == 2


def test_colours_of_ours_reach_the_terminal(monkeypatch):
    read, write = os.openpty()
    with open(write, "w", closefd=False) as terminal, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal)
        patch.setenv("TERM", "xterm")
        with doors():
            PlainView().line(f"ODD{STEERING}", bold=True)
            printable_console().print(Text(f"ODD{STEERING}", "red"))
            print_text(STEERING)
            print(STEERING)
    got = b""
    while got.count(b"\n") < 3:
        got += os.read(read, 10_000)
    os.close(read), os.close(write)
    got = got.decode()
    assert "\x1b[1mODD\ufffd[2J" in got and "\x1b[31mODD\ufffd[2J" in got
    assert set(re.findall(r"\x1b\[\d*\w", got)) == {"\x1b[1m", "\x1b[22m", "\x1b[31m", "\x1b[0m"}
    assert not ODD.search(re.sub(r"\x1b\[\d+m|\r", "", got))


# Checkpoints and indexes


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A folder with a run and its checkpoint of step 1."""
    folder = make_workplace(tmp_path_factory.mktemp("run"))
    with contextlib.chdir(folder):
        assert train(steps=1, save_training_state=True, eval_file="none") == 0
    return folder


@pytest.fixture
def manifest(run_folder, tmp_path, monkeypatch):
    """The manifest of a copy's checkpoint, in whose folder the test is."""
    monkeypatch.chdir(shutil.copytree(run_folder, tmp_path / "run"))
    path = Path("ckpt/step_00000001/checkpoint.json")
    document = json.loads(path.read_text())

    def sign(**entry):
        whole = document | {"files": [*document["files"], {**document["files"][0], **entry}]}
        path.write_text(json.dumps(whole | {"sha256": digest_of(whole)}))
        return path.parent

    return sign


@pytest.fixture
def soon():
    """A test that hangs fails after 30 s."""

    def stop(*_):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(30)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


READERS = (["check", "ckpt"], ["export", "--checkpoint-dir=ckpt", "--out-dir=new"])


@pytest.mark.parametrize("kind", ["pipe", "socket", "device"])
def test_what_is_no_file_in_a_checkpoint_is_not_waited_for(manifest, kind, soon, capsys):
    """A pipe in a checkpoint seems to be a file of 0 bytes."""
    path = manifest(name="extra.json", bytes=0) / "extra.json"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as made, contextlib.chdir(path.parent):
            made.bind(path.name)
    else:
        path.symlink_to("/dev/zero")
    for args in (*READERS, ["train", *flags(steps=2, **{"continue": ""})]):
        capsys.readouterr()
        assert _run([*args]) == 2
        assert "is a pipe or a device" in capsys.readouterr().err


@pytest.mark.parametrize("field", ["name", "sha256"])
@pytest.mark.parametrize("odd", ["\0", "a\0b", "\ud800", "", ".."])
def test_odd_names_and_hashes_of_a_manifest_are_one_line(manifest, field, odd, capsys):
    manifest(**{field: odd})
    for args in READERS:
        capsys.readouterr()
        assert _run([*args]) == 2
        err = capsys.readouterr().err
        assert "is none of llmq's: it " in err and err.count("\n") == 1


@pytest.mark.parametrize("odd", [3, None, "../x", "\0", ["a"]])
def test_an_odd_index_in_the_hubs_cache_is_one_line(tmp_path, monkeypatch, capsys, odd):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(make_workplace(tmp_path))
    snapshot = tmp_path / "models--a--b/snapshots/0123"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(CONFIG))
    (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": odd}}))
    capsys.readouterr()
    assert _run(["train", *flags(model="a/b", from_scratch=None)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1
