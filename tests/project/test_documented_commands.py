"""README and docs: every command runs as it is written, in their order, with what was made before.

Sizes are shortened by SHORTER, models and data are small ones under the names that the pages have,
and what cannot run here is in ELSEWHERE, with the test that runs it.
"""

from __future__ import annotations

import io
import json
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from llmq.commands.cli import _run
from llmq.data.public_sets import SETS, blob_hash
from llmq.options.presets import PRESETS
from llmq.text.tokenizer import HfTokenizer
from tests.chat_templates import CHATML, assistant, user, write_chat_tokenizer
from tests.eval_data import write_tasks
from tests.runs import CONFIG
from tests.text_data import documents

transformers = pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *(ROOT / "docs" / f"{name}.md" for name in (
        "fine-tuning", "lora", "preferences", "rl", "data", "models", "checkpoints", "export",
        "planning", "optimizer", "experts", "delta", "memory", "formats", "multi-gpu",
        "multi-machine", "logs", "evaluation", "generation", "serving", "python", "speed", "sweeps",
        "rig", "recipe", "coming-from",
    )),
]  # fmt: skip
WRITTEN_FOR = {"decisions", "extending", "walkthrough"}  # people who change llmq

PROGRAMS = r"llmq|llmq-train|pip|hf|mpirun|srun|touch|kill|PYTHONPATH=\S+"

# Commands that begin so are run by the tests behind them, or need what a test must not have.
ELSEWHERE = {
    "pip ": ".ci/run",
    "hf download": "the network",
    "llmq tokenize --dataset": "tests/text/test_text_inputs.py",
    "llmq bench --config benchmarks": "a GPU: tests/bench/test_bench.py",
    "llmq train --config": "tests/options/test_configs.py",
    "mpirun ": "tests/run/test_processes.py",
    "srun ": "tests/run/test_processes.py",
    "llmq serve": "tests/run/test_serve.py",
    "llmq eval output/mine --tasks": "tests/run/test_harness.py",
    "kill -USR1 PID": "tests/checkpoint/test_keeping.py",
    "llmq rig": "tests/rig/test_rig.py",
    "PYTHONPATH=. tools/": "tests/tools/test_tools.py",
    "llmq recipe --hours 24 --card h100 --data data/mine --rates": "tests/plan/test_recipe.py",
}

# By a pattern of a whole command, what a part of it becomes; all of them, in this order.
RUN = "--train-file 'data/mine/train*.bin' --model tiny --from-scratch --vocab-size auto"
TINY = "--device cpu --gpus 1 --steps 2 --seq-len 64 --batch-size 1 --grad-accumulation 1 "
TINY += "--ckpt-final"
SHORTER = [
    (r"^llmq-train", "llmq-train", "llmq train"),
    (r" … the same …", " … the same …", ""),
    (r"^llmq train (?!.*--model).*…", "…", RUN),
    (r"--train-file .*…", "…", ""),
    (r"^llmq train .*Qwen/.*…", "…", "--train-file 'data/talks/train*.bin'"),
    (r"^llmq train .*…", "…", "--train-file 'data/mine/train*.bin'"),
    (r"--model (Qwen\S+) --from-scratch", r"--model \S+", "--model tiny-qwen3 --vocab-size 8192"),
    (r"--model Qwen2.5-14B", r"--model \S+", "--model tiny --from-scratch --vocab-size auto"),
    (r"--hidden-size 256", r"--hidden-size .*-size 1024", "--num-layers 1"),
    (r"^llmq train .*--hidden-size 512", r"--(hidden|interm|num-heads|num-kv)\S+ \d+", ""),
    (r"^llmq train ", r"--num-layers 8", "--num-layers 1"),
    (r"^llmq train ", r"--(epochs|lmhead-chunks|attn-bwd-chunks|memory-limit) \S+", ""),
    (r"^llmq train .*--matmul-dtype", "--matmul-dtype", "--no-tune --matmul-dtype"),
    (r"^llmq train ", r"$", f" {TINY}"),
    (r"^llmq train .*--name other|--continue --name mine --steps", "--steps 2", "--steps 3"),
    (r"", r"step_00000\d00", "step_00000002"),
    (r"^llmq rl ", r"--(steps|seq-len|max-new-tokens) \d+", ""),
    (r"^llmq rl ", r"$", " --device cpu --gpus 1 --steps 1 --seq-len 64 --max-new-tokens 8"),
    (r"^llmq finetune ", r"$", " --device cpu --epochs 1 --batch-size 8 --force"),
    (r"^llmq train-tokenizer", "8192", "400"),
    (r"^llmq plan .*--(fit|largest)", "Qwen2.5-[0-9.]+B", "gpt2"),
    (r"^llmq plan .*--largest", "--card 4090", "--gpu-memory 2GiB --base-dtype nf4"),
    (r"^llmq plan .*--(fit|largest)", "$", " --batch-size 1 --grad-accumulation 1"),
    (r"^llmq plan", "rig.json", f"{ROOT}/benchmarks/h100/2026-11-23/h100_rig/rig.json"),
    (r"^llmq verify", "$", " --num-layers 1 --verify-steps 1"),
    (r"^llmq eval", "$", " --device cpu"),
    (r"^llmq score", "$", " --device cpu --gpus 1 --seq-len 64"),
    (r"^llmq score (?!.*jsonl)", "$", " --batch-size 1"),
    (r"^llmq sample", "$", " --device cpu --max-new-tokens 4"),
    (r"^llmq bench --config", "$", " --timed-steps 1 --repeats 1"),
    (r"^llmq top", "$", " --once"),
    (r"^llmq watch", "$", " --interval 0"),
    (r"^llmq recipe", "--hours 24", "--hours 0.03 --num-layers 2 --hidden-size 128 --seq-len 64"),
    (r"^llmq recipe", "$", " --matmul-dtype bf16 --batch-size 8 --grad-accumulation 1"),
    (r"^llmq sweep-lr", "$", f" {TINY} --rates 3 --depth 1"),
]  # fmt: skip


def commands() -> list[tuple[str, str]]:
    """Page and line, and the command, of every block that is indented by four spaces."""
    found = []
    for page in PAGES:
        lines = enumerate(page.read_text().splitlines(), start=1)
        for number, line in lines:
            if not re.match(rf" {{4}}({PROGRAMS}) ", line):
                continue
            command = line.strip()
            while command.endswith("\\"):
                command = command[:-1] + next(lines)[1].strip()
            command = re.sub(r"\s+# .*$", "", command)
            found.append((f"{page.name}:{number}", command))
    return found


def shortened(command: str) -> str:
    for whole, part, instead in SHORTER:
        if re.search(whole, command):
            command = re.sub(part, instead, command)
    return command


def test_every_page_with_commands_is_among_them():
    pages = {page.stem for page in ROOT.glob("docs/*.md")} | {"README"}
    assert pages == {page.stem for page in PAGES} | WRITTEN_FOR
    told = [command for _, command in commands()]
    assert len(told) > 60
    for start, where in ELSEWHERE.items():
        assert any(command.startswith(start) for command in told), f"{start} is in no page"
        assert not where.startswith("tests/") or (ROOT / where.split()[0]).is_file(), where


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A folder with what the pages take to be there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    write_chat_tokenizer(Path("model"), CHATML)
    sizes = {"vocab_size": HfTokenizer(Path("model")).vocab_size, "max_position_embeddings": 4096}
    config = transformers.Qwen3Config(**CONFIG | sizes | {"hidden_size": 64})
    transformers.Qwen3ForCausalLM(config).float().save_pretrained("model")
    shutil.copytree("model", "models/mine")
    for name in ("Qwen2.5-7B", "Qwen2.5-0.5B", "Qwen2.5-1.5B"):
        shutil.copytree("model", tmp_path / "hub" / f"models--Qwen--{name}" / "snapshots" / "x")
    texts = documents(600)
    talks = [[user(a), assistant(b)] for a, b in zip(texts[:80], texts[80:160], strict=True)]
    lines = (json.dumps({"messages": messages}) for messages in talks)
    Path("talks.jsonl").write_text("\n".join(lines))
    pairs = zip(texts[:20], texts[20:40], texts[40:60], strict=True)
    lines = ({"prompt": p[:9], "chosen": c[:9], "rejected": r[:9]} for p, c, r in pairs)
    Path("pairs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    shutil.copy("pairs.jsonl", "held-out-pairs.jsonl")
    lines = ({"prompt": text[:9], "completion": text[9:30]} for text in texts[:20])
    Path("samples.jsonl").write_text("\n".join(map(json.dumps, lines)))
    lines = ({"prompt": f"{n} + 1 = ", "answer": n + 1} for n in range(20))
    Path("sums.jsonl").write_text("\n".join(map(json.dumps, lines)))
    function = "def score(texts, record):\n    return [float(len(text)) for text in texts]\n"
    Path("rewards.py").write_text(function)
    for name, first in (("reviews", 0), ("held-out", 60)):
        lines = ({"text": t[:40], "label": i % 5} for i, t in enumerate(texts[first : first + 60]))
        Path(f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    Path("my_texts").mkdir()
    for number in range(4):
        Path(f"my_texts/{number}.txt").write_text("\n".join(texts[number::4]))
    Path("data/code").mkdir(parents=True)
    Path("tasks").mkdir()
    tasks = write_tasks(Path("tasks"))
    for name in ("hellaswag.jsonl", "hellaswag_val.jsonl"):
        shutil.copy(tasks["hellaswag"], name)
    shutil.copy(tasks["arc"], "ARC-Easy-Test.jsonl")
    shutil.copy(tasks["piqa"], "questions.jsonl")
    Path("my.txt").write_text(texts[0])
    sweep = {"model": "tiny", "from-scratch": True, "device": "cpu", "seq-len": 64}
    Path("sweep.yaml").write_text(yaml.safe_dump(sweep | {"batch-size": 1}))
    text = "To be, or not to be\n" * 500
    found = replace(SETS["tiny-shakespeare"], blob=blob_hash(text.encode()))
    monkeypatch.setitem(SETS, "tiny-shakespeare", found)
    place = tmp_path / "web" / found.file
    place.parent.mkdir(parents=True)
    place.write_text(text)
    monkeypatch.setenv("LLMQ_DATA_ENDPOINT", (tmp_path / "web").as_uri())
    return tmp_path


def before(command: str) -> None:
    """Make the files that a page takes from other commands than its own."""
    out = re.search(r"--name (\S+)", command)
    if command.startswith("llmq train") and "--continue" not in command:
        name = out[1] if out else "llmq"
        for path in (Path("ckpt") / name, Path("output") / name):
            shutil.rmtree(path, ignore_errors=True)
    if "data/code" in command:
        for path in Path("data/mine").glob("eval*"):
            shutil.copy(path, "data/code")
    if re.match("llmq (train-)?tokenize", command):
        shutil.rmtree(shlex.split(command)[shlex.split(command).index("--out") + 1], True)
    if "--compare" in command:
        for name in ("before", "after"):
            shutil.copy("night.json", f"{name}.json")
    for made in ("best", "model-of-mine", "talks-merged"):
        shutil.rmtree(made, ignore_errors=True)


@pytest.mark.slow
def test_the_commands_of_readme_and_docs_run(workplace, monkeypatch, capsys):
    few = {"gpt2-124m": PRESETS["gpt2-124m"]}
    monkeypatch.setattr("llmq.plan.fit.PRESETS", few)
    failed = []
    for number, (place, command) in enumerate(commands()):
        if any(command.startswith(start) for start in ELSEWHERE):
            continue
        made = shortened(command)
        if made.startswith("llmq train ") and "--log-file" not in made:
            made += f" --log-file logs/%n-{number}.json"  # several of a name begin in one second
        before(made)
        monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n"))
        program, *words = shlex.split(made)
        if program == "touch":
            if not Path(words[0]).parent.is_dir():
                failed.append(f"{place}: {command}")
            continue
        status = _run(words)
        told = capsys.readouterr()
        if status != 0:
            failed.append(f"{place}: {command}\n  as {made}\n  {told.err.strip()[-400:]}")
    (code,) = re.findall(r"```python\n(.*?)```", PAGES[0].read_text(), re.DOTALL)
    exec(compile(code.replace("20", "2"), "README.md", "exec"), {})
    assert not failed, "\n".join(failed)
