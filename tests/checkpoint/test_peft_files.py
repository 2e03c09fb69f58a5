"""Directories as PEFT makes them of all kinds of settings: read as PEFT means them, or refused."""

from __future__ import annotations

import json
import warnings
from copy import deepcopy
from pathlib import Path

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from llmq.base.errors import ConfigError, LlmqError, ModelError
from llmq.checkpoint.exports import export
from llmq.checkpoint.merge import merge_adapter
from tests.adapters import batches
from tests.models import CONFIGS, exported, hf_model, torch_loss, trainer_for

ALL = {"embed_tokens", "lm_head"}


def saved(folder: Path, name: str, copies: bool = False, **settings: object) -> float:
    """Write such a directory, with everything that it trains moved; returns the loss with it.

    copies: write the embedding and the LM head, too.
    """
    given = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
    config = peft.LoraConfig(**deepcopy(given | settings))  # which PEFT may write to
    model = peft.get_peft_model(hf_model(name), config)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder, save_embedding_layers=copies or "auto")
    return torch_loss(model.eval(), batches()[:1]).item()


@pytest.mark.parametrize(
    "name, settings",
    [
        ("qwen2_untied", {"target_modules": "all-linear", "init_lora_weights": "gaussian"}),
        ("qwen2_untied", {"target_modules": r".*(mlp\.up|self_attn\.o)_proj", "lora_alpha": 3}),
        ("qwen2_untied", {"modules_to_save": ["lm_head"], "init_lora_weights": "orthogonal"}),
        ("qwen3", {"modules_to_save": ["norm"], "use_rslora": True}),
        ("qwen3", {"modules_to_save": sorted(ALL), "ensure_weight_tying": True}),
        ("qwen3", {"target_modules": "all-linear", "exclude_modules": ["q_proj", "up_proj"]}),
    ],
    ids=["gaussian", "pattern", "head", "norms", "tied", "excluded"],
)
def test_what_is_known(tmp_path, name, settings):
    loss = saved(tmp_path, name, **settings)
    with trainer_for(exported(name), adapter=tmp_path) as trainer:
        # F32 sums in another order.
        assert trainer.step(batches()[:1]).loss == pytest.approx(loss, abs=1e-5)


@pytest.mark.parametrize(
    "name, settings, message",
    [
        ("qwen2_untied", {"init_lora_weights": "OLoRA"}, "'OLoRA': these adapters belong to"),
        ("qwen2_untied", {"init_lora_weights": "pissa_niter_4"}, "'pissa_niter_4': these adapters"),
        ("qwen3", {"modules_to_save": ["lm_head"]}, "lm_head.weight was trained without the embed"),
        ("qwen3", {"modules_to_save": ["embed_tokens"]}, "was trained without the LM head"),
        ("qwen3", {"modules_to_save": ["mlp"]}, "mlp.down_proj.weight.* beside them, only norms"),
        ("qwen3", {"kasa_config": peft.tuners.lora.config.KasaConfig()}, "kasa_config .* is not"),
    ],
    ids=["olora", "pissa", "head", "embedding", "mlp", "kasa"],
)
def test_what_is_not_known(tmp_path, name, settings, message):
    saved(tmp_path / "in", name, **settings)
    with pytest.raises(LlmqError, match=message):
        trainer_for(exported(name), adapter=tmp_path / "in")
    with pytest.raises(LlmqError, match=message):
        merge_adapter(str(exported(name)), tmp_path / "in", tmp_path / "out", "fp32")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("r", 0, "no adapters have rank 0 and lora_alpha 8.0"),
        ("lora_alpha", float("nan"), "no adapters have rank 4 and lora_alpha nan"),
        ("lora_alpha", float("inf"), "no adapters have rank 4 and lora_alpha inf"),
    ],
)
def test_scalings_that_are_no_numbers(tmp_path, field, value, message):
    saved(tmp_path / "in", "qwen3")
    path = tmp_path / "in" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(LlmqError, match=message):
        merge_adapter(str(exported("qwen3")), tmp_path / "in", tmp_path / "out", "fp32")
    with pytest.raises(LlmqError, match=message):
        trainer_for(exported("qwen3"), adapter=tmp_path / "in")


def test_scalings_that_are_not_trained(tmp_path):
    """Fixed scalings can be multiplied into the adapters, as PEFT does."""
    loss = saved(tmp_path / "in", "qwen3", lora_alpha=-4)
    with pytest.raises(ConfigError, match=r"--adapter: .* has lora_alpha -4.0, and only one"):
        trainer_for(exported("qwen3"), adapter=tmp_path / "in")
    merge_adapter(str(exported("qwen3")), tmp_path / "in", tmp_path / "out", "fp32")
    with trainer_for(tmp_path / "out") as trainer:
        assert trainer.step(batches()[:1]).loss == pytest.approx(loss, abs=1e-5)  # F32


@pytest.mark.parametrize("dropout", [1, -0.5, float("nan")])
def test_dropouts_that_are_not_trained(tmp_path, dropout):
    saved(tmp_path, "qwen3")
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"lora_dropout": dropout}))
    with pytest.raises(ConfigError, match=r"--adapter: .* has lora_dropout .* give --lora-dropout"):
        trainer_for(exported("qwen3"), adapter=tmp_path)
    with trainer_for(exported("qwen3"), adapter=tmp_path, lora_dropout=0.5) as trainer:
        assert trainer.config.lora_dropout == 0.5


def test_sums_that_are_too_large(tmp_path):
    """With adapters whose numbers are all finite: nothing is written."""
    saved(tmp_path / "in", "qwen3", lora_alpha=1e308)
    with pytest.raises(ModelError, match=r"layers.0.*qkv.* holds NaN or infinity: .* of 2.5e\+307"):
        merge_adapter(str(exported("qwen3")), tmp_path / "in", tmp_path / "out", "fp32")
    assert not (tmp_path / "out").exists()


def test_damaged_directories(tmp_path):
    saved(tmp_path, "qwen3")
    path = tmp_path / "adapter_config.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"base_model_name_or_path": 5}))
    with pytest.raises(LlmqError, match=r"is damaged .*base_model_name_or_path is 5.*: copy it"):
        trainer_for(exported("qwen3"), adapter=tmp_path)
    path.write_text("[" * 100_000)
    with pytest.raises(LlmqError, match=r"adapter_config.json' is damaged .*recursion.*: copy it"):
        trainer_for(exported("qwen3"), adapter=tmp_path)
    path.write_text(json.dumps(content))
    save_file({}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(LlmqError, match=r"has no adapters in adapter_model.safetensors"):
        trainer_for(exported("qwen3"), adapter=tmp_path)


@pytest.mark.parametrize("name", ["qwen3", "qwen2_untied", "gpt2"])
def test_copies_of_embeddings(tmp_path, name):
    """They are not trained, as in PEFT; where they are not the model's, one has to say what to do.

    Whoever adds the adapters to the model takes them, as PEFT does.
    """
    base, folder = exported(name), tmp_path / "in"
    targets = {"target_modules": ["c_attn"], "fan_in_fan_out": True} if name == "gpt2" else {}
    loss = saved(folder, name, copies=True, **targets)
    with trainer_for(base, adapter=folder) as trainer:
        assert trainer.config.train == ()
        assert trainer.step(batches()[:1]).loss == pytest.approx(loss, abs=1e-5)  # F32
        trainer.export(tmp_path / "out")
    written = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert written and all(".lora_" in key for key in written)

    path = folder / "adapter_model.safetensors"
    stored = load_file(path)
    copies = [key for key in stored if ".lora_" not in key]
    assert len(copies) == 2
    save_file({key: x + 0.01 if key in copies else x for key, x in stored.items()}, path)
    model = peft.PeftModel.from_pretrained(hf_model(name), folder)
    loss = torch_loss(model.eval(), batches()[:1]).item()
    parts = "embeddings,head" if name == "qwen2_untied" else "embeddings"
    says = parts.replace(",", " and the ")
    with pytest.raises(LlmqError, match=f"not name all of the {says}: --train={parts} "):
        trainer_for(base, adapter=folder)
    merge_adapter(str(base), folder, tmp_path / "merged", "fp32")
    with trainer_for(tmp_path / "merged") as trainer:
        assert trainer.step(batches()[:1]).loss == pytest.approx(loss, abs=1e-5)
    with trainer_for(base, adapter=folder, train=parts) as trainer:
        assert trainer.step(batches()[:1]).loss == pytest.approx(loss, abs=1e-5)


TIED = {"ensure_weight_tying": True}
OF_GPT2 = {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True}


@pytest.mark.parametrize(
    "name, settings, part",
    [
        ("gpt2", OF_GPT2 | {"modules_to_save": ["wpe"]}, "embeddings"),
        ("gpt2", OF_GPT2 | {"modules_to_save": ["ln_1"]}, "norms"),
        ("gpt2", OF_GPT2 | TIED | {"modules_to_save": ["wte", "lm_head"]}, "embeddings"),
        ("qwen3", {"modules_to_save": ["q_norm"]}, "norms"),
    ],
    ids=["positions", "some-norms", "tokens", "query-norms"],
)
@pytest.mark.parametrize("copies", [False, True], ids=["", "copies"])
def test_a_part_of_which_some_was_trained(tmp_path, name, settings, part, copies):
    """PEFT has it as it is; here all of it is trained or nothing, and one has to say which."""
    base, folder = exported(name), tmp_path / "in"
    loss = saved(folder, name, copies, **settings)
    merge_adapter(str(base), folder, tmp_path / "merged", "fp32")
    with trainer_for(tmp_path / "merged") as trainer:
        assert trainer.step(batches()[:1]).loss == pytest.approx(loss, abs=1e-5)  # F32
    with pytest.raises(LlmqError, match=f"not name all of the {part}: --train={part} goes on"):
        trainer_for(base, adapter=folder)
    with trainer_for(base, adapter=folder, train=part) as trainer:
        assert trainer.step(batches()[:1]).loss == pytest.approx(loss, abs=1e-5)

    path = folder / "adapter_model.safetensors"
    stored = load_file(path)
    lacking = max(key for key in stored if settings["modules_to_save"][0] in key)
    stored.pop(lacking)
    save_file(stored, path)
    with pytest.raises(LlmqError, match=r"lacks |was trained without"):
        merge_adapter(str(base), folder, tmp_path / "damaged", "fp32")


@pytest.mark.parametrize(
    "name, settings, train",
    [
        ("qwen2_untied", {"modules_to_save": ["embed_tokens"]}, "embeddings"),
        ("qwen2_untied", {"modules_to_save": ["lm_head"]}, "head"),
        ("qwen2_untied", {"modules_to_save": sorted(ALL)}, "embeddings,head"),
        ("qwen3", TIED | {"modules_to_save": sorted(ALL)}, "embeddings"),
        ("gpt2", OF_GPT2 | TIED | {"modules_to_save": ["wte", "wpe", "lm_head"]}, "embeddings"),
    ],
    ids=["embedding", "head", "both", "tied", "gpt2"],
)
def test_modules_that_are_saved_three_times(tmp_path, name, settings, train):
    """As save_embedding_layers does, beside what modules_to_save has saved: that counts."""
    base, folder = exported(name), tmp_path / "in"
    saved(folder, name, copies=True, **settings)
    path = folder / "adapter_model.safetensors"
    stored = load_file(path)
    others = [key for key in stored if "modules_to_save" in key or "original_module" in key]
    assert len(others) >= 2
    save_file({key: x + 0.1 if key in others else x for key, x in stored.items()}, path)
    model = peft.PeftModel.from_pretrained(hf_model(name), folder)
    loss = torch_loss(model.eval(), batches()[:1]).item()
    with trainer_for(base, adapter=folder) as trainer:
        assert ",".join(trainer.config.train) == train
        assert trainer.step(batches()[:1]).loss == pytest.approx(loss, abs=1e-5)  # F32


def test_names_that_peft_does_not_find(tmp_path):
    saved(tmp_path / "in", "qwen3")
    path = tmp_path / "in" / "adapter_model.safetensors"
    stored = {key.removeprefix("base_model.model."): x for key, x in load_file(path).items()}
    save_file(stored, path)
    message = r"v_proj.lora_B.weight does not|q_proj.lora_A.weight does not begin with 'base_model"
    with pytest.raises(LlmqError, match=message):
        trainer_for(exported("qwen3"), adapter=tmp_path / "in")
    with pytest.raises(LlmqError, match=message):
        merge_adapter(str(exported("qwen3")), tmp_path / "in", tmp_path / "out", "fp32")


def test_adapters_that_another_program_has_replaced(tmp_path, capsys):
    """Replaced adapters do not belong to the codes that llmq.json notes."""
    base, folder = exported("qwen3"), tmp_path / "a"
    options = {"lora_rank": 4, "base_dtype": "nf4"}
    with trainer_for(base, **options, learning_rate=1e-2) as trainer:
        trainer.step(batches()[1:2])
        trainer.export(folder)
    theirs = peft.PeftModel.from_pretrained(hf_model("qwen3"), folder, is_trainable=True)
    with torch.no_grad():
        for parameter in (p for p in theirs.parameters() if p.requires_grad):
            parameter.add_(0.05 * torch.randn_like(parameter))
    theirs.save_pretrained(folder)
    loss = torch_loss(theirs.eval(), batches()[:1]).item()
    capsys.readouterr()
    merge_adapter(str(base), folder, tmp_path / "other", "fp32")
    assert "another program has replaced it, or it is damaged" in capsys.readouterr().err
    for given in ({"model": tmp_path / "other"}, {"model": base, "adapter": folder}):
        with trainer_for(given.pop("model"), **given) as trainer:
            assert trainer.step(batches()[:1]).loss == pytest.approx(loss, abs=1e-5)  # F32
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: --adapter: adapter_model.safetensors in '{folder}' is not")


def test_pickled_adapters(tmp_path):
    saved(tmp_path, "qwen3")
    file = tmp_path / "adapter_model.safetensors"
    torch.save(load_file(file), tmp_path / "adapter_model.bin")
    file.unlink()
    with pytest.raises(LlmqError, match=r"in adapter_model.bin, which cannot be read: load it"):
        trainer_for(exported("qwen3"), adapter=tmp_path)


def model_that_sees_images() -> transformers.Gemma3ForConditionalGeneration:
    """With the language model of models.py in it, whose modules' names others have, too."""
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    config = transformers.Gemma3Config(
        text_config=CONFIGS["gemma3"](), vision_config=vision, mm_tokens_per_image=4,
        image_token_index=130, boi_token_index=128, eoi_token_index=129,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return model


@pytest.mark.parametrize("train", ["", "norms,embeddings"])
def test_a_language_model_with_other_parts(tmp_path, train):
    """PEFT finds its modules in the whole model, which is what transformers loads; and back."""
    base, out, theirs = (tmp_path / name for name in ("base", "out", "theirs"))
    model_that_sees_images().save_pretrained(base)
    options = {"lora_rank": 4, "learning_rate": 1e-2} | ({"train": train} if train else {})
    with trainer_for(base, **options) as trainer:
        for batch in batches()[1:4]:
            trainer.step([batch])
        trainer.export(out)
        export(trainer.save(tmp_path / "ckpt"), tmp_path / "again")
        want = trainer.step(batches()[:1]).loss
    for file in ("adapter_config.json", "adapter_model.safetensors", "llmq.json"):
        assert (tmp_path / "again" / file).read_bytes() == (out / file).read_bytes()
    whole = transformers.AutoModelForCausalLM.from_pretrained(base)
    assert whole.model.vision_tower is not None
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Found missing adapter keys")
        model = peft.PeftModel.from_pretrained(whole, out)
    loss = torch_loss(model.eval(), batches()[:1]).item()
    assert loss == pytest.approx(want, abs=1e-5)  # F32 sums in another order
    model.save_pretrained(theirs)
    with trainer_for(base, adapter=theirs) as trainer:
        assert trainer.step(batches()[:1]).loss == want


def test_the_name_of_another_model(tmp_path, capsys):
    """All that is known of adapters made elsewhere; whoever adds them to a model is told."""
    base = exported("qwen3")
    saved(tmp_path / "in", "qwen3")
    path = tmp_path / "in" / "adapter_config.json"
    content = json.loads(path.read_text())
    for name, told in (("of/another-model", True), (f"of/{base.name}", False)):
        path.write_text(json.dumps(content | {"base_model_name_or_path": name}))
        capsys.readouterr()
        with trainer_for(base, adapter=tmp_path / "in"):
            assert ("was made for the model 'of/another-model'" in capsys.readouterr().err) is told
        merge_adapter(str(base), tmp_path / "in", tmp_path / str(told), "fp32")
        assert ("was made for the model 'of/another-model'" in capsys.readouterr().err) is told
