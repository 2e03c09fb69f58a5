"""Models with more than a language model: what their exports keep, and what they say they lack."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from llmq.arch.model_config import ModelConfig
from llmq.base.errors import ConfigError, LlmqError
from llmq.checkpoint.checkpoint import CheckpointReader
from llmq.checkpoint.exports import export
from llmq.checkpoint.hf import HfWeights
from llmq.checkpoint.manifest import MANIFEST, read_manifest
from llmq.checkpoint.merge import merge_adapter
from llmq.checkpoint.source_model import FIELDS, FILES
from llmq.options.presets import resolve_model
from llmq.run.sampling import open_model
from llmq.state.params import weight_table
from llmq.text.tokenizer import TEMPLATES, is_tokenizer_file
from tests.models import VOCAB, exported, random_batch, trainer_for
from tests.text_data import write_bpe

BATCH = [random_batch(np.random.default_rng(0))]
WEIGHTS = "model.safetensors"
SIZES = {"vocab_size": VOCAB, "hidden_size": 64, "max_position_embeddings": 64}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1, "bos_token_id": None}
QWEN = SIZES | {"intermediate_size": 96, "head_dim": 64, "num_hidden_layers": 4, "eos_token_id": 0}
QWEN |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2}
QWEN |= {"linear_num_value_heads": 4}
QWEN["rope_parameters"] = {
    **{"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    **{"mrope_section": [3, 3, 2], "mrope_interleaved": True},
}
EXPERTS = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
EXPERTS |= {"num_experts": 4, "num_experts_per_tok": 2}
VISION = {"hidden_size": 32, "intermediate_size": 48}
QWEN_VISION = VISION | {"depth": 1, "num_heads": 2, "out_hidden_size": 64}
QWEN_VISION |= {"num_position_embeddings": 16}
GEMMA = SIZES | {"intermediate_size": 96, "eos_token_id": 1, "head_dim": 16, "num_hidden_layers": 2}
GEMMA |= {"query_pre_attn_scalar": 16, "sliding_window": 8}
GEMMA_VISION = VISION | {"num_hidden_layers": 1, "num_attention_heads": 2}
GEMMA_VISION |= {"image_size": 32, "patch_size": 8}
KINDS = {
    "qwen3_5": (QWEN, QWEN_VISION, {"image_token_id": 100, "video_token_id": 101}),
    "qwen3_5_moe": (QWEN | EXPERTS, QWEN_VISION, {"image_token_id": 100, "video_token_id": 101}),
    "gemma3": (GEMMA, GEMMA_VISION, {"mm_tokens_per_image": 4, "image_token_index": 100}),
}
MTP = ("mtp.fc.weight", "mtp.norm.weight", "mtp.layers.0.mlp.up_proj.weight")
PREPROCESSOR = '{"image_processor_type": "SomeImageProcessor", "patch_size": 16}\n'
GENERATION = {"eos_token_id": [2, 5], "pad_token_id": 3, "temperature": 0.7, "odd": [1]}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder by kind, of a model with a vision tower, and of Qwen with MTP layers, as published.
    Their tokenizers do not matter, nor do their images."""
    found = {}
    for kind, (text, vision, more) in KINDS.items():
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(
            kind, text_config=text, vision_config=vision, **more
        )
        model = transformers.AutoModelForImageTextToText.from_config(config).float()
        folder = tmp_path_factory.mktemp(kind)
        model.save_pretrained(folder)
        tensors, content = load_file(folder / WEIGHTS), read(folder, "config.json")
        if kind != "gemma3":
            tensors |= {name: torch.randn(8, 4).to(torch.bfloat16) for name in MTP}
            content["text_config"]["mtp_num_hidden_layers"] = 1
        tensors["model.other.count"] = torch.arange(3, dtype=torch.int64)
        save_file(tensors, folder / WEIGHTS, {"format": "pt"})
        content |= {"a_field_of_theirs": {"x": [1, None]}, "_name_or_path": "/home/someone/x"}
        content["vision_config"]["theirs"] = 2
        write(folder, "config.json", content)
        write(folder, "generation_config.json", GENERATION)
        (folder / "preprocessor_config.json").write_text(PREPROCESSOR)
        found[kind] = folder
    return found


def read(folder: Path, name: str) -> dict:
    return json.loads((folder / name).read_text())


def write(folder: Path, name: str, content: object) -> None:
    (folder / name).write_text(json.dumps(content))


def language(name: str) -> bool:
    return "language_model" in name or name == "lm_head.weight"


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def kept(old: Mapping, new: Mapping, *, but: tuple[str, ...] = ()) -> None:
    """Assert that one object has all fields of another, inner ones too."""
    for name, value in old.items():
        if isinstance(value, dict):
            kept(value, new[name], but=but)
        elif name not in but:
            assert new[name] == value, name


def check_whole(source: Path, out: Path, *, trained: bool) -> None:
    """Assert that an export is the source, but for weights that were trained, and that transformers
    finds all tensors of it."""
    old, new = load_file(source / WEIGHTS), load_file(out / WEIGHTS)
    assert old.keys() == new.keys()
    others = [name for name in old if not language(name)]
    assert all(same(old[name], new[name]) for name in others) and len(others) > 10
    assert trained != all(same(old[name], new[name]) for name in old)
    config = read(out, "config.json")
    kept(read(source, "config.json"), config, but=("_name_or_path",))
    assert "_name_or_path" not in config
    assert (out / "preprocessor_config.json").read_text() == PREPROCESSOR
    ends = [2, 5, config["text_config"]["eos_token_id"]]
    assert read(out, "generation_config.json") == GENERATION | {"eos_token_id": ends}
    assert ModelConfig.from_hf(config) == ModelConfig.from_hf(read(source, "config.json"))
    load = transformers.AutoModelForImageTextToText.from_pretrained
    model, found = load(out, output_loading_info=True)
    assert type(model).__name__ == config["architectures"][0]
    assert found.pop("unexpected_keys") <= {"model.other.count"}
    assert not any(found.values()), found


@pytest.mark.parametrize("kind", KINDS)
def test_an_untouched_model_is_exported_as_it_is(kind, made, tmp_path):
    export(made[kind], tmp_path / "out", verify=True)
    check_whole(made[kind], tmp_path / "out", trained=False)


@pytest.mark.parametrize("kind", KINDS)
def test_training_keeps_the_other_parts(kind, made, tmp_path, capsys):
    source = shutil.copytree(made[kind], tmp_path / "source")
    with trainer_for(source) as trainer:
        trainer.step(BATCH)
        checkpoint = trainer.save(tmp_path / "ckpt")
        trainer.export(tmp_path / "out")
    check_whole(source, tmp_path / "out", trained=True)
    err = capsys.readouterr().err
    assert "model.other.count, which no model here has" in err and "are not trained: they" in err
    assert ("mtp: 3" in err) == (kind != "gemma3")
    export(checkpoint, tmp_path / "again")
    assert (tmp_path / "again" / WEIGHTS).read_bytes() == (tmp_path / "out" / WEIGHTS).read_bytes()
    for name in ("config.json", "generation_config.json", "preprocessor_config.json"):
        assert (tmp_path / "again" / name).read_text() == (tmp_path / "out" / name).read_text()


def test_a_checkpoint_on_another_machine_names_what_is_not_there(made, tmp_path):
    source = shutil.copytree(made["qwen3_5"], tmp_path / "source")
    with trainer_for(source) as trainer:
        trainer.step(BATCH)
        checkpoint = trainer.save(tmp_path / "ckpt")
        trainer.export(tmp_path / "out")
    moved, out = source.rename(tmp_path / "moved"), tmp_path / "again"
    lost = r"tensors \(model.other: 1, model.visual: \d+, mtp: 3\) are not trained"
    with pytest.raises(
        LlmqError, match=rf"{lost} .* as --base, or leave them out with --text-only"
    ):
        export(checkpoint, out)
    with pytest.raises(LlmqError, match=rf"{lost} .*'{made['gemma3']}' has others"):
        export(checkpoint, out, base=str(made["gemma3"]))
    assert not out.exists()
    export(checkpoint, out, base=str(moved))
    assert (out / WEIGHTS).read_bytes() == (tmp_path / "out" / WEIGHTS).read_bytes()
    assert read(out, "config.json") == read(tmp_path / "out", "config.json")
    # A folder of text alone has the sizes, and not the rest: a run that goes on says so.
    export(moved, tmp_path / "text", text_only=True)
    with trainer_for(tmp_path / "text") as trainer:
        with pytest.raises(LlmqError, match=rf"{lost} .* as --model, or leave them out"):
            trainer.load(checkpoint)
        assert trainer.steps_done == 0
    for options in ({"text_only": True}, {"base": str(moved)}):
        export(checkpoint, tmp_path / str(len(options)), overwrite=True, **options)
    moved.rename(source)
    with trainer_for(tmp_path / "text") as trainer:  # the checkpoint knows where they are
        trainer.load(checkpoint)
        trainer.export(tmp_path / "third")
    assert read(tmp_path / "third", "config.json") == read(tmp_path / "out", "config.json")
    third = tmp_path / "third" / WEIGHTS
    assert third.read_bytes() == (tmp_path / "out" / WEIGHTS).read_bytes()


@pytest.mark.parametrize("kind", KINDS)
def test_merging_keeps_the_other_parts(kind, made, tmp_path):
    with trainer_for(made[kind], lora_rank=4) as trainer:
        trainer.step(BATCH)
        assert read_manifest(trainer.save(tmp_path / "ckpt") / MANIFEST).get("source") is None
        trainer.export(tmp_path / "adapter")
    merge_adapter(str(made[kind]), tmp_path / "adapter", tmp_path / "out")
    check_whole(made[kind], tmp_path / "out", trained=True)
    export(tmp_path / "adapter", tmp_path / "merged", merge=True)
    assert (tmp_path / "merged" / WEIGHTS).read_bytes() == (tmp_path / "out" / WEIGHTS).read_bytes()
    merge_adapter(str(made[kind]), tmp_path / "adapter", tmp_path / "text", text_only=True)
    check_text(made[kind], tmp_path / "text")


def check_text(source: Path, out: Path) -> None:
    """Assert that an export is the language model alone, with its own fields."""
    config, old = read(out, "config.json"), read(source, "config.json")
    assert not any(map(language, load_file(out / WEIGHTS).keys() - {"lm_head.weight"}))
    assert config["architectures"][0].endswith("ForCausalLM")
    assert not any(name.startswith(("mtp_", "vision")) for name in config)
    kept(
        {n: v for n, v in old["text_config"].items() if not n.startswith("mtp_")},
        config,
        but=("_name_or_path",),
    )
    assert not (out / "preprocessor_config.json").exists()
    load = transformers.AutoModelForCausalLM.from_pretrained
    _, found = load(out, output_loading_info=True)
    assert not any(found.values()), found


@pytest.mark.parametrize("kind", KINDS)
def test_text_only_is_the_language_model(kind, made, tmp_path):
    export(made[kind], tmp_path / "out", text_only=True, verify=True)
    check_text(made[kind], tmp_path / "out")
    with trainer_for(made[kind], text_only=True) as trainer:
        trainer.step(BATCH)
        checkpoint = trainer.save(tmp_path / "ckpt")
        trainer.export(tmp_path / "trained")
    check_text(made[kind], tmp_path / "trained")
    export(checkpoint, tmp_path / "again")
    assert read(tmp_path / "again", "config.json") == read(tmp_path / "trained", "config.json")
    with trainer_for(made[kind]) as trainer:  # the checkpoint has not forgotten the rest
        trainer.load(checkpoint)
        trainer.export(tmp_path / "whole")
    check_whole(made[kind], tmp_path / "whole", trained=True)


def test_text_only_where_it_has_no_meaning(made, tmp_path, capsys):
    export(exported("qwen3"), tmp_path / "out", text_only=True)
    assert "--text-only has no effect: the model has no other parts" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="--text-only: a new model has no other parts"):
        trainer_for(made["qwen3_5"], text_only=True, from_scratch=True)
    with pytest.raises(ConfigError, match="--text-only: adapters are exported alone"):
        trainer_for(made["qwen3_5"], text_only=True, lora_rank=4)
    with trainer_for(made["qwen3_5"], lora_rank=4) as trainer:
        trainer.export(tmp_path / "adapter")
    with pytest.raises(LlmqError, match="--text-only: adapters have no other parts: add --merge"):
        export(tmp_path / "adapter", tmp_path / "x", text_only=True)
    with trainer_for(exported("qwen3"), from_scratch=True) as trainer:
        checkpoint = trainer.save(tmp_path / "ckpt")
    export(checkpoint, tmp_path / "new", text_only=True)
    assert "--text-only has no effect: the checkpoint has no" in capsys.readouterr().err
    with pytest.raises(LlmqError, match="--base: the checkpoint of 'llmq' lacks nothing"):
        export(checkpoint, tmp_path / "x", base=str(made["qwen3_5"]))


def test_a_gguf_file_has_no_other_parts(made, tmp_path):
    pytest.importorskip("gguf")
    out = tmp_path / "m.gguf"
    said = (
        r"--format gguf: \d+ tensors \(model.other: 1, model.visual: \d+, mtp: 3\) of .*text-only"
    )
    with pytest.raises(LlmqError, match=said):
        export(made["qwen3_5"], out, to="gguf")
    assert not [*tmp_path.iterdir()]
    export(made["qwen3_5"], out, to="gguf", text_only=True)
    assert out.exists()


@pytest.mark.parametrize("kind", ["qwen3_5", "gemma3"])
def test_other_parts_beside_codes(kind, made, tmp_path):
    """FP8 is for the language model; logits of text are those of the language model alone."""
    pytest.importorskip("compressed_tensors")
    ids, found = torch.arange(24)[None], []
    for text_only in (False, True):
        out = tmp_path / str(text_only)
        export(made[kind], out, to="fp8", text_only=text_only, verify=True)
        load = transformers.AutoModelForImageTextToText.from_pretrained
        load = transformers.AutoModelForCausalLM.from_pretrained if text_only else load
        model, info = load(out, output_loading_info=True)
        assert info.pop("unexpected_keys") <= {"model.other.count"}
        assert not any(info.values()), info
        found.append(model(input_ids=ids).logits.detach())
    torch.testing.assert_close(*found)
    old, new = (load_file(folder / WEIGHTS) for folder in (made[kind], tmp_path / "False"))
    assert all(same(tensor, new[name]) for name, tensor in old.items() if not language(name))
    assert any(tensor.dtype == torch.float8_e4m3fn for tensor in new.values())


def test_a_score_head_leaves_the_other_parts_out(made, tmp_path, capsys):
    options = {"num_labels": 3, "packing": "none"}
    with trainer_for(made["qwen3_5"], **options) as trainer:
        trainer.export(tmp_path / "out")
        checkpoint = trainer.save(tmp_path / "ckpt")
        trainer.load(checkpoint)
        trainer.export(tmp_path / "again")
    export(checkpoint, tmp_path / "third")
    assert "a model with a score head has no other parts" in capsys.readouterr().err
    config = read(tmp_path / "out", "config.json")
    assert config == read(tmp_path / "again", "config.json")
    assert config == read(tmp_path / "third", "config.json")
    assert config["architectures"] == ["Qwen3_5TextForSequenceClassification"]
    assert not (tmp_path / "out" / "generation_config.json").exists()
    load = transformers.AutoModelForSequenceClassification.from_pretrained
    _, found = load(tmp_path / "out", output_loading_info=True)
    assert not any(found.values()), found


def test_mtp_layers_beside_a_flat_model(tmp_path):
    """Their codes, of a model in FP8, become values as all others do."""
    source = shutil.copytree(exported("qwen3_5"), tmp_path / "source")
    tensors, config = load_file(source / WEIGHTS), read(source, "config.json")
    codes = torch.randn(32, 16).to(torch.float8_e4m3fn)
    tensors |= {"mtp.fc.weight": codes, "mtp.fc.weight_scale_inv": torch.tensor([[0.5], [2.0]])}
    tensors["mtp.norm.weight"] = torch.ones(4, dtype=torch.float16)
    save_file(tensors, source / WEIGHTS)
    quantized = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    write(source, "config.json", config | {"quantization_config": quantized, "auto_map": {"a": 1}})
    export(source, tmp_path / "out", verify=True)
    found, new = load_file(tmp_path / "out" / WEIGHTS), read(tmp_path / "out", "config.json")
    assert found.keys() == tensors.keys() - {"mtp.fc.weight_scale_inv"}
    scales = torch.tensor([[0.5], [2.0]]).repeat_interleave(16, 0)
    assert torch.equal(found["mtp.fc.weight"], codes.float() * scales)
    assert same(found["mtp.norm.weight"], tensors["mtp.norm.weight"])
    kept(config, new)
    assert not new.keys() & {"quantization_config", "auto_map"}


def test_unknown_tensors_inside_of_the_model_are_refused(tmp_path):
    """Unknown tensors would change what the model computes."""
    source = shutil.copytree(exported("qwen3"), tmp_path / "source")
    for name in ("model.layers.0.extra.weight", "model.norm.bias", "layers.1.extra.weight"):
        tensors = load_file(exported("qwen3") / WEIGHTS) | {name: torch.ones(2)}
        save_file(tensors, source / WEIGHTS)
        model, _ = resolve_model(str(source), from_scratch=False)
        with HfWeights(source) as weights, pytest.raises(LlmqError, match=f"holds {name}, which"):
            weights.check(weight_table(model))


# ------------------------------------------------------------------------------------------------
# Files and fields


def test_ends_of_text_are_those_of_both_files(tmp_path):
    """config.json has one, generation_config.json others; training and sampling know all."""
    source = shutil.copytree(exported("qwen3"), tmp_path / "source")
    write_bpe(source)
    write(source, "generation_config.json", GENERATION)
    with trainer_for(source) as trainer:
        trainer.step(BATCH)
        checkpoint = trainer.save(tmp_path / "ckpt")
        trainer.export(tmp_path / "out")
    with trainer_for(source, lora_rank=4) as trainer:
        trainer.export(tmp_path / "adapter")
    merge_adapter(str(source), tmp_path / "adapter", tmp_path / "merged")
    export(source, tmp_path / "untouched")
    shutil.rmtree(source)
    export(checkpoint, tmp_path / "again")
    for name in ("out", "merged", "untouched", "again"):
        assert read(tmp_path / name, "generation_config.json") == GENERATION | {"bos_token_id": 1}
        assert read(tmp_path / name, "config.json")["eos_token_id"] == 2
    with open_model(str(tmp_path / "merged")) as (model, _, _):
        assert model.eos_token_ids == (2, 5)


def test_a_new_end_of_text_is_added(tmp_path):
    source = shutil.copytree(exported("qwen3"), tmp_path / "source")
    cases = [([5], [5, 2]), (5, [5, 2]), ([2, 5], [2, 5]), (2, 2), (None, 2), ([[1], "a"], 2)]
    for ends, expected in cases:
        write(source, "generation_config.json", {"eos_token_id": ends, "top_k": 4})
        export(source, tmp_path / "out", overwrite=True)
        found = read(tmp_path / "out", "generation_config.json")
        assert (found["eos_token_id"], found["top_k"]) == (expected, 4)
    for torn in ("{", "[]"):
        (source / "generation_config.json").write_text(torn)
        export(source, tmp_path / "out", overwrite=True)
        assert read(tmp_path / "out", "generation_config.json")["eos_token_id"] == 2


def test_a_checkpoint_has_the_files_of_its_tokenizer(tmp_path, capsys):
    """An export, and a run that goes on, need no other folder."""
    source = write_bpe(shutil.copytree(exported("qwen3"), tmp_path / "source"))
    (source / "chat_template.jinja").write_text("{{ messages }}")
    with trainer_for(source) as trainer:
        trainer.step(BATCH)
        checkpoint = trainer.save(tmp_path / "ckpt")
        trainer.export(tmp_path / "out")
    alone = tmp_path / "alone"
    alone.mkdir()
    for name in ("config.json", WEIGHTS):
        (source / name).rename(alone / name)
    shutil.rmtree(source)
    export(checkpoint, tmp_path / "again")
    with trainer_for(alone, allow_other_tokenizer=True) as trainer:
        trainer.load(checkpoint)
        later = trainer.save(tmp_path / "later")
        trainer.export(tmp_path / "third")
    export(later, tmp_path / "fourth")
    names = ("tokenizer.json", "chat_template.jinja", "generation_config.json", "config.json")
    for folder in ("again", "third", "fourth"):
        for name in names:
            assert (tmp_path / folder / name).read_bytes() == (tmp_path / "out" / name).read_bytes()
    with CheckpointReader(checkpoint) as reader:
        reader._tokenizer.tensors["../x.json"] = reader._tokenizer.tensors["tokenizer.json"]
        with pytest.raises(LlmqError, match=r"holds '\.\./x\.json', no tokenizer's file"):
            reader.restore_tokenizer(tmp_path / "third")


def test_names_of_tokenizer_files():
    for name in ("tokenizer.json", "merges.txt", f"{TEMPLATES}/tool_use.jinja"):
        assert is_tokenizer_file(name)
    for name in ("x/tokenizer.json", "../merges.txt", f"{TEMPLATES}/../x.jinja", "a.jinja", ""):
        assert not is_tokenizer_file(name)


def test_templates_beside_the_tokenizer_are_copied(tmp_path):
    source = write_bpe(shutil.copytree(exported("qwen3"), tmp_path / "source"))
    names = ["chat_template.json", f"{TEMPLATES}/rag.jinja", f"{TEMPLATES}/tool_use.jinja"]
    (source / TEMPLATES).mkdir()
    for name in names:
        (source / name).write_text(name)
    for _ in range(2):  # the second one replaces the first
        files = export(source, tmp_path / "out", overwrite=True)
        assert {*names} <= {*files}
        assert [(tmp_path / "out" / name).read_text() for name in names] == names
    (source / names[1]).unlink()
    export(source, tmp_path / "out", overwrite=True)
    assert [(tmp_path / "out" / name).exists() for name in names] == [True, False, True]


def test_the_table_of_files_is_documented():
    text = (Path(__file__).parents[2] / "docs" / "export.md").read_text()
    for name, (fate, why) in [*FILES.items(), *FIELDS.items()]:
        shown = "every other one" if name == "*" else ", ".join(f"`{n}`" for n in name.split(", "))
        assert f"| {shown} | {fate} | {why} |" in text, name
