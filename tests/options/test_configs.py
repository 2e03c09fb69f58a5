"""The ready configurations: each fits where it says, and says what a plan says."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmq.commands.rl import load_rl
from llmq.options.option_file import read_option_file
from llmq.options.options_io import make_config
from llmq.options.rules import RULES
from tools.plan_configs import BLOCK, CONFIGS, README, ROWS, SIZES, predicted, readme

FILES = sorted(CONFIGS.glob("*.yaml"))


def test_what_there_is():
    names = {path.stem for path in FILES}
    fine = {f"finetune-qwen2.5-{size}-{memory}gb" for size in SIZES for memory in (8, 12, 16, 24)}
    fine.remove("finetune-qwen2.5-7b-8gb")  # the embedding and the head alone leave too little
    pre = {f"pretrain-qwen2.5-{size}-4x4090" for size in SIZES[:2]} | {"pretrain-gpt2-124m"}
    others = {f"prefer-qwen2.5-7b-{memory}gb" for memory in (12, 16, 24)}
    assert names == fine | pre | others | {f"rl-qwen2.5-7b-{memory}gb" for memory in (16, 24)}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_its_comment_is_its_plan(path: Path):
    """`tools/plan_configs.py` writes it anew. That it fits is a part of the plan."""
    (block,) = BLOCK.findall(path.read_text())
    assert block == predicted(path)


def test_the_table_of_the_readme_is_of_the_files():
    text = README.read_text()
    assert len(ROWS.findall(text)) == 1 and text == readme(), "run tools/plan_configs.py"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_its_options_are_good(path: Path):
    given = read_option_file(path)
    if path.stem.startswith("rl-"):
        config, *_ = load_rl({"from-scratch": True, "model": "Qwen2.5-7B"}, path, plans=True)
        rows = config.prompts_per_step * config.num_samples
        assert config.batch_size * config.grad_accumulation == rows
        assert f"llmq rl --config configs/{path.name}\n" in path.read_text()
        return
    config = make_config({}, path)
    assert RULES.idle(config) == []
    assert given["train-file"] == "data/mine/train*.bin"
    assert config.from_scratch == path.stem.startswith("pretrain")
    assert f"llmq train --config configs/{path.name}\n" in path.read_text()
    if path.stem.startswith("prefer"):
        assert (config.loss, config.lora_rank) == ("dpo", 16)
    if not path.stem.startswith("pretrain"):
        assert (config.packing, config.document_mask) == ("best-fit", True)
        assert f"--seq-len {config.seq_len}" in path.read_text()
        assert f"--tokenizer {config.model} " in path.read_text()
