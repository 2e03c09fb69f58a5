"""tools/peft_speed.py: peft's side and llmq's, on the CPU, and the page that is made of them."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from tools import peft_side, peft_speed
from tools.peft_side import PeftJob, PeftSide, peft_process

MIB = 1 << 20
TINY = {
    "device": "cpu", "gpus": 1, "from-scratch": True, "model": "tiny", "lora-rank": 4,
    "lora-alpha": 6, "lora-targets": "all", "batch-size": 2, "seq-len": 16,
    "grad-accumulation": 1, "grad-clip": 1.0,
}  # fmt: skip


def job(**changed) -> PeftJob:
    given = {"adapter_dtype": "fp32", "autocast": True, "steps": 1, "repeats": 2, "mode": None}
    given |= {"checkpointing": False} | changed
    shared = TINY | {key: given.pop(key) for key in set(given) & set(TINY)}
    return peft_speed.peft_job(*peft_speed.checked(shared, []), **given)


class Here:
    """Stands in for a process of peft, whose start takes seconds."""

    def __init__(self, job, limit):
        self.turns, self.error, self._side = [], None, PeftSide(job)
        self.receive = self.again = lambda: self.turns.append(self._side.measure())
        self.end, self.row = lambda: None, lambda: peft_side.Peft.row(self)


class Connection(list):
    """Keeps what is sent, and has nobody at its other end."""

    send = list.append

    def recv(self):
        raise EOFError


@pytest.mark.parametrize("dtype, more", [
    ("fp32", {}), ("fp32", {"lora-targets": "q,v"}),
    ("bf16", {"autocast": False, "checkpointing": True}),
])  # fmt: skip
def test_the_step_of_peft_trains_adapters_alone(monkeypatch, dtype, more):
    seen, attention = [], torch.nn.functional.scaled_dot_product_attention

    def spied(*args, **given):
        seen.append((given["attn_mask"], given["is_causal"]))
        return attention(*args, **given)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spied)
    side = PeftSide(job(adapter_dtype=dtype, **more))
    named = dict(side.model.named_parameters())
    trained = {name for name, value in named.items() if value.requires_grad}
    matrices = 2 if more.get("lora-targets") else 7
    assert len(trained) == len(side.trained) == 2 * matrices * 6
    assert all("lora_" in name for name in trained)
    expected = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    assert {named[name].dtype for name in trained} == {expected}
    assert {named[name].dtype for name in named.keys() - trained} == {torch.bfloat16}
    before = {name: value.detach().clone() for name, value in named.items()}
    first, second = side.step(), side.step()
    changed = {name for name, value in named.items() if not torch.equal(value, before[name])}
    assert changed == trained and first != second
    layers = 2 * 6 * (1 + bool(more.get("checkpointing")))  # steps, layers, and again in backward
    assert seen == [(None, True)] * layers
    assert side.model.config._attn_implementation == "sdpa_causal"


def test_layers_with_windows_keep_the_mask_of_transformers():
    assert job(model="tiny-gemma3").windowed and not job().windowed


def test_an_error_of_peft_is_one_line(monkeypatch, capsys):
    def fail(job):
        raise RuntimeError("no memory\nis left")

    monkeypatch.setattr(peft_side, "PeftSide", fail)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda precision: None)
    monkeypatch.setattr(peft_side, "end_with", lambda parent: None)
    sent = Connection()
    peft_process(sent, job())
    assert sent == [{"error": "RuntimeError: no memory is left"}]
    assert "Traceback" in capsys.readouterr().err


def test_a_process_that_dies_is_one_line(monkeypatch):
    monkeypatch.setattr(peft_side, "peft_process", sys.exit)
    peft = peft_side.Peft(None, limit=60)
    peft.receive()
    peft.again()
    peft.end()
    assert re.fullmatch(r"its process ended with status \d+", peft.row()["error"])


def rows():
    peft = {"form": "", "error": None, "step_seconds": [0.5, 0.4, 0.6], "first_step_seconds": 60.0}
    peft |= {"allocated": 40 * MIB << 10, "reserved": 44 * MIB << 10, "used": 45 * MIB << 10}
    ours = {"form": "--base-dtype=e4m3", "error": None, "step_seconds": [0.2, 0.2, 0.2]}
    ours |= {"first_step_seconds": 9.0, "allocated": 19 * MIB << 10, "used": 20 * MIB << 10}
    return peft, ours


def test_table():
    peft, ours = rows()
    failed = {"form": "--base-dtype=nf4", "error": "does not fit: 90 GiB are needed"}
    lines = peft_speed.table(peft, [ours, failed], tokens=1000)
    assert len({line.count("|") for line in lines[:4]}) == 1
    assert lines[2] == "| peft |  | 2,000 | 40.0% | 1.00 | 40.00 | 44.00 | 45.00 | - | 60.0 |"
    ratios = "2.50 | 19.00 | - | 20.00 | 0.50"
    assert lines[3] == f"| llmq | --base-dtype=e4m3 | 5,000 | 0.0% | {ratios} | 9.0 |"
    assert lines[4:] == ["", "llmq --base-dtype=nf4: does not fit: 90 GiB are needed"]


def test_the_rows_of_one_side_stay_when_the_other_fails():
    peft, ours = rows()
    lines = peft_speed.table({"form": "", "error": "its process ended"}, [ours], tokens=1000)
    assert lines[2].startswith("| llmq | --base-dtype=e4m3 | 5,000 | 0.0% | - | 19.00 | - | 20.00")
    assert lines[3:] == ["", "peft: its process ended"]
    second_turn = peft | {"error": "no result after 9 s (--limit)"}
    lines = peft_speed.table(second_turn, [], tokens=1000)
    assert lines[2].startswith("| peft |") and lines[3:] == ["", f"peft: {second_turn['error']}"]


def test_forms():
    assert peft_speed.options_of("--base-dtype=e4m3 --recompute-swiglu --no-keep-transposed") == {
        "base-dtype": "e4m3", "recompute-swiglu": True, "keep-transposed": False,
    }  # fmt: skip
    for forms, said in (
        (["--lora-rank=8"], "--form: --lora-rank has to be the same on both sides"),
        (["", ""], "--form: two of them are the same"),
        (["--base-dtype=e9"], "--base-dtype: "),
    ):
        with pytest.raises(peft_speed.LlmqError, match=said):
            peft_speed.checked(TINY, forms)
    peft_speed.checked(TINY | {"model": "Qwen2.5-7B", "device": "cuda"}, list(peft_speed.FORMS))


def test_rows_of_llmq(monkeypatch):
    """What a report of llmq bench means; a sweep that leaves none."""
    result = {"step_seconds": [0.2], "first_step_seconds": 9.0, "loss": 1.0}
    result["memory"] = {"used": 50 * MIB, "planned": 30 * MIB, "as_planned": True}
    ok = {"status": "ok", "result": result}
    fails = {"status": "does not fit", "message": "9 GiB are needed"}
    report = {"machine": {"device": "a card"}, "runs": [ok, fails]}

    def bench(command, env, stdout):
        file, out = (command[command.index(flag) + 1] for flag in ("--config", "--out"))
        sweep = yaml.safe_load(Path(file).read_text())
        assert sweep == {"model": "tiny", "runs": [{}, {"base-dtype": "nf4"}]}
        if report is not None:
            Path(f"{out}.json").write_text(json.dumps(report))
        return subprocess.CompletedProcess(command, 3)

    monkeypatch.setattr(peft_speed.subprocess, "run", bench)
    forms = ["", "--base-dtype=nf4"]
    first, second = peft_speed.llmq_rows({"model": "tiny"}, forms, [], beside=20 * MIB)
    assert first == {
        "form": "", "error": None, "name": "a card", "step_seconds": [0.2], "used": 30 * MIB,
        "first_step_seconds": 9.0, "allocated": 30 * MIB,
    }  # fmt: skip
    hint = "; peft waits with 0.02 GiB, --once ends it before"
    assert second == {"form": forms[1], "error": "does not fit: 9 GiB are needed" + hint}
    report = None
    why = "llmq bench ended with status 3 and without a report"
    rows = peft_speed.llmq_rows({"model": "tiny"}, forms, [], beside=0)
    assert [row["error"] for row in rows] == [why, why]


def test_command(monkeypatch, tmp_path, capsys):
    """Both sides for real, but for peft's process."""
    monkeypatch.setattr(peft_speed, "Peft", Here)
    out = tmp_path / "page.md"
    sizes = {"model": "tiny", "device": "cpu", "batch_size": 1, "seq_len": 8, "lora_rank": 2}
    peft_speed.main(**sizes, steps=1, repeats=2, compile_=False, form=[""], out=out)
    text = out.read_text()
    assert text == capsys.readouterr().out and text.startswith("# tiny with adapters beside peft, ")
    assert "Rank 2, targets all; 1 x 8 tokens a step" in text
    assert re.search(r"^peft: base in bf16; adapters in fp32 under torch.autocast", text, re.M)
    assert re.search(r"^\| peft \|  \| [0-9,]+ \| [0-9.]+% \| 1.00 \| - \|", text, re.M)
    assert re.search(r"^\| llmq \|  \| [0-9,]+ \| [0-9.]+% \| [0-9.]+ \| 0.0", text, re.M)
    assert re.search(r"^peft before and after llmq: [0-9,]+, [0-9,]+ tok/s.$", text, re.M)


def test_command_says_in_one_line_what_is_wrong(monkeypatch, tmp_path, capsys):
    with pytest.raises(SystemExit, match="error: --adapter-dtype: fp8 is not fp32 or bf16"):
        peft_speed.main(adapter_dtype="fp8")
    monkeypatch.setattr(peft_speed, "llmq_rows", lambda *_: [{"form": "", "error": "failed: no"}])
    with pytest.raises(SystemExit) as ended:
        peft_speed.main(model="tiny", device="cpu", form=[""], only="llmq")
    assert ended.value.code == 1 and "\nllmq: failed: no\n" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"error: .*nowhere"):
        peft_speed.main(model="tiny", device="cpu", form=[""], out=tmp_path / "nowhere" / "a.md")
