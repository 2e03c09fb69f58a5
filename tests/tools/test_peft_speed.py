"""tools/peft_speed.py: peft's side and llmq's, on the CPU, and the page that is made of them."""

import json
import re
import time
from pathlib import Path

import pytest
import torch
import yaml

from tools import peft_side, peft_speed
from tools.peft_side import PeftJob, PeftSide

MIB = 1 << 20
TINY = {
    "device": "cpu", "gpus": 1, "from-scratch": True, "model": "tiny", "lora-rank": 4,
    "lora-alpha": 6, "lora-targets": "all", "batch-size": 2, "seq-len": 16,
    "grad-accumulation": 1, "grad-clip": 1.0,
}  # fmt: skip


def job(**changed) -> PeftJob:
    given = {"adapter_dtype": "fp32", "autocast": True, "steps": 1, "repeats": 2}
    given |= {
        "compiled": "none",
        "mode": "default",
        "checkpointing": False,
        "masked": False,
    } | changed
    shared = TINY | {key: given.pop(key) for key in set(given) & set(TINY)}
    return peft_speed.peft_job(*peft_speed.checked(shared, []), **given)


def side_of(job: PeftJob, tell=lambda name: None) -> PeftSide:
    return PeftSide(job, time.time(), tell)


class Here(peft_side.Peft):
    """Stands in for a process of peft, whose start takes seconds."""

    def __init__(self, job):
        self.phases, self.found, self.error, self._job = [("start", 0.0)], None, None, job

    def receive(self, limit, began):
        def tell(name):
            self.phases.append((name, self.phases[-1][1] + 0.5))
            began(name)

        self.found = side_of(self._job, tell).measure()

    def end(self):
        self.phases.append(("end", self.phases[-1][1] + 0.5))


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
    side = side_of(job(adapter_dtype=dtype, **more))
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
    assert job(model="tiny-gemma3").masked and job(masked=True).masked and not job().masked


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


@pytest.mark.parametrize("run, error", [
    ({"status": "ok"}, None),
    ({"status": "does not fit", "message": "9 GiB are needed"}, "does not fit: 9 GiB are needed"),
    (None, "llmq bench ended with status 3 and without a report"),
    ("late", "ended after 5 s (--limit)"),
])  # fmt: skip
def test_a_row_of_llmq(monkeypatch, run, error):
    """The meaning of a report of llmq bench; one that leaves none; one that takes too long."""
    result = {"step_seconds": [0.2], "first_step_seconds": 9.0, "loss": 1.0}
    result["memory"] = {"used": 50 * MIB, "planned": 30 * MIB, "as_planned": True}

    def bench(command, environment, limit):
        file, out = (command[command.index(flag) + 1] for flag in ("--config", "--out"))
        sweep = yaml.safe_load(Path(file).read_text())
        assert sweep == {"model": "tiny", "runs": [{"base-dtype": "nf4"}]} and limit == 5
        if run == "late":
            return None
        if run is not None:
            report = {"machine": {"device": "a card"}, "runs": [{"result": result} | run]}
            Path(f"{out}.json").write_text(json.dumps(report))
        return 3

    monkeypatch.setattr(peft_speed, "status_of", bench)
    row = {
        "form": "--base-dtype=nf4", "error": None, "name": "a card", "step_seconds": [0.2],
        "first_step_seconds": 9.0, "allocated": 30 * MIB, "used": 50 * MIB,
    }  # fmt: skip
    found = peft_speed.llmq_row({"model": "tiny"}, row["form"], [], 5)
    assert found == (row if error is None else {"form": row["form"], "error": error})


SIZES = {"model": "tiny", "device": "cpu", "batch_size": 1, "seq_len": 8, "lora_rank": 2}


def test_command(monkeypatch, tmp_path, capsys):
    """Rows of both sides, of which only peft's is measured, are on the page as soon as known."""
    out, pages = tmp_path / "page.md", []
    given = {"error": None, "step_seconds": [0.5], "first_step_seconds": 0.01, "name": "CPU"}

    def row(shared, form, how, limit):
        assert 0 < limit < 900 and how == ["--timed-steps", "1", "--repeats", "2"]
        pages.append(out.read_text())
        return given | {"form": form}

    monkeypatch.setattr(peft_speed, "Peft", Here)
    monkeypatch.setattr(peft_speed, "llmq_row", row)
    forms = ["", "--base-dtype=nf4"]
    peft_speed.main(**SIZES, steps=1, repeats=2, compile_="none", form=forms, out=out)
    text = out.read_text()
    printed = capsys.readouterr()
    assert text == printed.out and text.startswith("# tiny with adapters beside peft, CPU")
    assert "Rank 2, targets all; 1 x 8 tokens a step" in text and "Not the end" not in text
    assert re.search(r"^peft: base in bf16; adapters in fp32 under torch.autocast", text, re.M)
    assert re.search(r"^\| peft \|  \| [0-9,]+ \| [0-9.]+% \| 1.00 \| - \|", text, re.M)
    assert re.search(r"^\| llmq \|  \| 16 \| 0.0% \| [0-9.]+ \|", text, re.M)
    assert "llmq's first row, measured again after peft: 16 tok/s." in text
    assert "Seconds of peft's phases: start 0.5, imports 0.5, model 0.5, adapters 0.5, " in text
    assert [page.count("| llmq |") for page in pages] == [0, 1, 2]
    now = "this page was written during llmq"
    assert [page.count(now) for page in pages] == [1, 1, 1] and now + " --base-dtype" in pages[1]
    said = re.findall(r"^\[ *\d+\.\d s\] (.*)$", printed.err, re.M)
    assert said[:4] == ["llmq ...", "llmq: 16 tok/s", "llmq --base-dtype=nf4 ...", said[3]]
    assert said[4:7] == ["peft: start", "peft: imports", "peft: model"]
    assert said[-1] == "llmq, again: 16 tok/s"


def test_a_command_that_is_ended_leaves_its_rows_and_where_it_was(monkeypatch, tmp_path):
    class Ended(Here):
        def receive(self, limit, began):
            began("model")
            raise SystemExit(1)

    monkeypatch.setattr(peft_speed, "Peft", Ended)
    monkeypatch.setattr(peft_speed, "llmq_row", lambda *_: rows()[1])
    with pytest.raises(SystemExit):
        peft_speed.main(**SIZES, form=[""], out=tmp_path / "page.md")
    text = (tmp_path / "page.md").read_text()
    assert "| llmq | --base-dtype=e4m3 | 40 |" in text
    assert "Not the end: this page was written during peft's phase: model." in text
    assert "torch.compile of each layer, the last norm, the loss (mode default" in text


def test_command_says_in_one_line_what_is_wrong(monkeypatch, tmp_path, capsys):
    with pytest.raises(SystemExit, match="error: --adapter-dtype: fp8 is not fp32 or bf16"):
        peft_speed.main(adapter_dtype="fp8")
    failed = {"form": "", "error": "failed: no"}
    monkeypatch.setattr(peft_speed, "llmq_row", lambda *_: failed)
    with pytest.raises(SystemExit) as ended:
        peft_speed.main(model="tiny", device="cpu", form=[""], only="llmq")
    assert ended.value.code == 1 and "\nllmq: failed: no\n" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"error: .*nowhere"):
        peft_speed.main(model="tiny", device="cpu", form=[""], out=tmp_path / "nowhere" / "a.md")
