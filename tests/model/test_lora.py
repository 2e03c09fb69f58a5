"""Adapters: the same numbers as peft's, in its files and back, and the guarantees of training."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from llmq.base.errors import ConfigError, LlmqError
from llmq.checkpoint.exports import export
from llmq.checkpoint.merge import merge_adapter
from llmq.options.cards import card_of
from llmq.options.conditions import Ranks
from llmq.options.options import TrainConfig
from llmq.options.presets import preset
from llmq.options.rules import RULES
from llmq.plan.estimate import Planner
from llmq.plan.plan import make_plan
from llmq.run.sampling import open_model
from llmq.runtime.device import HOST_SPEC
from llmq.state.params import weight_table
from llmq.state.placement import trained_count
from llmq.state.weights import Weights
from tests.adapters import batches, targets
from tests.bases import block_weights
from tests.models import exported, hf_model, torch_loss, trainer_for

LORA = {"lora_rank": 4, "lora_alpha": 6.0, "lora_scaling": "rs", "lora_plus": 2.0}
LORA["weight_decay"] = 0.1
MODELS = ["qwen2", "qwen3", "llama_biases", "phi3", "olmo2", "gpt2", "granite", "gemma4"]
MODELS += ["deepseek_v3", "gemma4_e2b", "granitemoehybrid"]
LATENT = {"lora_targets": "q_a,q_b,kv_a,kv_b,o"}  # PEFT takes names of MLPs for those of experts


def tensors(trainer, values) -> dict[str, np.ndarray]:
    """Adapters by PEFT's names, as its files have them."""
    found = {}
    for param in (p for slab in trainer._step.table for p in slab.params if p.of_adapter):
        for part in param.hf:
            found[part.name] = part.stored(values[param.name][part.start : part.stop])
    return found


def peft_model(name: str, trainer, **more) -> peft.PeftModel:
    """With the adapters of the trainer."""
    config = peft.LoraConfig(
        r=4, lora_alpha=6, use_rslora=True, target_modules=targets(name),
        fan_in_fan_out=name == "gpt2", **more,
    )  # fmt: skip
    model = peft.get_peft_model(hf_model(name), config)
    state = {n: torch.from_numpy(x) for n, x in tensors(trainer, trainer.weights()).items()}
    if not trainer.config.is_quantized:  # magnitudes begin as theirs do
        begun = {_own_name(n): x for n, x in model.named_parameters() if "magnitude" in n}
        for key, value in begun.items():
            torch.testing.assert_close(state[key], value.detach(), rtol=1e-5, atol=0)  # F32 sums
    loaded = peft.set_peft_model_state_dict(model, state)
    assert not loaded.unexpected_keys
    assert not [key for key in loaded.missing_keys if "lora_" in key]
    return model


def take_weights(model: peft.PeftModel, trainer) -> None:
    """Put the trainer's weights of blocks, as products read them, into the PEFT model."""
    modules = dict(model.named_modules())
    for param, values in block_weights(trainer).items():
        for part in param.hf:
            module = modules[f"base_model.model.{part.name.removesuffix('.weight')}.base_layer"]
            stored = part.stored(values[part.start : part.stop])
            assert np.abs(module.weight.detach().numpy() - stored).max() > 0
            module.weight.copy_(torch.from_numpy(np.ascontiguousarray(stored)))


def _own_name(parameter: str) -> str:
    """The parameter's name in PEFT's files."""
    return parameter.replace(".default", "").replace("magnitude_vector.weight", "magnitude_vector")


def gradients(model: peft.PeftModel, tokens: int) -> dict[str, np.ndarray]:
    """The gradients of the sum of losses, by the names of PEFT's files."""
    return {
        _own_name(name): p.grad.numpy() * tokens
        for name, p in model.named_parameters()
        if p.requires_grad
    }


# With weights that are kept as codes: theirs are what these stand for.
CODED = [
    ("qwen2", "e4m3"),
    ("gemma4", "nf4"),
    ("gemma4_e2b", "nf4"),
    ("phi3", "nf4"),
    ("olmo2", "nf4"),
    ("gpt2", "int8"),
    ("qwen3", "nf4"),
    ("qwen2", "nvfp4"),
    ("granitemoehybrid", "nf4"),
    ("phi3", "e4m3-blocks"),
]


# With magnitudes, on every base.
DORA = [("phi3", None), ("gpt2", None), ("qwen2", "nf4"), ("qwen3", "e4m3"), ("olmo2", "int8")]
DORA += [("granite", None), ("granite", "int8"), ("deepseek_v3", None)]


@pytest.mark.parametrize(
    "name, base, dora",
    [
        *((name, None, False) for name in MODELS),
        *((*each, False) for each in CODED),
        *((*each, True) for each in DORA),
    ],
)
def test_equals_peft(name, base, dora):
    options = LORA | (LATENT if name == "deepseek_v3" else {})
    with trainer_for(exported(name), **options, base_dtype=base, lora_dora=dora) as trainer:
        model = peft_model(name, trainer, use_dora=dora)
        if base is not None:
            with torch.no_grad():
                take_weights(model, trainer)
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        trained = [p for _, p in named]
        groups = [{"params": [p for n, p in named if f"lora_{x}" in n]} for x in "ABm"]
        groups[2]["weight_decay"] = 0.0  # of magnitudes
        optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.1)
        for step, batch in enumerate(batches()[: 4 if dora else None]):
            for group, factor in zip(
                optimizer.param_groups, (1, LORA["lora_plus"], 1), strict=True
            ):
                group["lr"] = factor * trainer.learning_rate(step)
            loss = torch_loss(model, [batch])
            optimizer.zero_grad()
            loss.backward()
            result = trainer.step([batch])
            # The issue asks for 1e-4; F32 sums in another order, over ten updates.
            assert result.loss == pytest.approx(loss.item(), abs=1e-5)
            want = gradients(model, result.tokens)
            got = tensors(trainer, trainer.gradients())
            assert got.keys() == want.keys()
            for key, value in want.items():
                # In the first steps AdamW makes +-lr of gradients that are nothing but rounding.
                bound = 1e-4 * np.linalg.norm(value) + 1e-6 * result.tokens**0.5
                assert np.linalg.norm(got[key] - value) < bound, (step, key)
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()


def logits(model, inputs) -> np.ndarray:
    with torch.no_grad():
        return model(torch.from_numpy(inputs).long()).logits.numpy()


@pytest.mark.parametrize(
    "name, options",
    [
        ("qwen2", {"lora_targets": "q,v,down", "train": "norms,embeddings"}),
        ("qwen2_untied", {"train": "embeddings,head"}),
        ("phi3", {"lora_targets": "gate,up", "train": "norms"}),
        ("gpt2", {"lora_targets": "o", "train": "norms,embeddings"}),
        ("gemma3", {}),
        ("qwen3_next", {"lora_targets": "q,delta_qkv,delta_z,delta_b,delta_a", "lora_dora": True}),
        ("qwen3", {"lora_targets": "q,v,gate", "lora_dora": True}),
        ("nemotron_h", {"lora_targets": "q,mamba_in,up,fused_experts", "lora_rank": 8}),
    ],
)
def test_files_are_those_of_peft(tmp_path, name, options):
    """The files written give the same losses in peft; what peft then writes goes on here."""
    batch = batches()[0]
    with trainer_for(exported(name), **(LORA | options), learning_rate=1e-2) as trainer:
        for other in batches()[1:4]:
            trainer.step([other])
        trainer.export(tmp_path / "out")
        want = trainer.gradients(), trainer.step([batch]).loss
        want = want[1], trainer.gradients()
    model = peft.PeftModel.from_pretrained(hf_model(name), tmp_path / "out", is_trainable=True)
    assert torch_loss(model, [batch]).item() == pytest.approx(want[0], abs=2e-6)  # F32
    model.save_pretrained(tmp_path / "theirs")
    if name == "qwen2":  # as if the head had stayed
        stored = load_file(tmp_path / "theirs" / "adapter_model.safetensors")
        stored["base_model.model.lm_head.weight"] += 1
        (tmp_path / "apart").mkdir()
        save_file(stored, tmp_path / "apart" / "adapter_model.safetensors")
        shutil.copy(tmp_path / "theirs" / "adapter_config.json", tmp_path / "apart")
        with pytest.raises(LlmqError, match="was trained without the LM head"):
            trainer_for(exported(name), adapter=tmp_path / "apart")
    for folder in ("out", "theirs"):
        more = {"weight_decay": 0.1, "adapter": tmp_path / folder, "learning_rate": 1e-2}
        with trainer_for(exported(name), **more) as trainer:
            assert trainer.config.lora_rank == options.get("lora_rank", 4)
            assert trainer.config.lora_scaling == "rs"
            result = trainer.step([batch])
            assert result.loss == want[0]
            for key, value in trainer.gradients().items():
                np.testing.assert_array_equal(value, want[1][key], err_msg=key)


MEMORY = {
    "recompute": {"recompute_block": True},
    "keep_more": {"recompute_att": True, "recompute_swiglu": False, "recompute_norm": False},
    "ffn": {"recompute_ffn": True},
    "offload": {
        "offload_residual": True, "offload_opt_m": True, "offload_opt_v": True,
        "offload_master": True, "shard_weights": True,
    },
}  # fmt: skip


def losses(accumulation=2, batch_size=2, **options) -> tuple[list[float], dict[str, np.ndarray]]:
    """The losses of three steps, and the weights after them."""
    with trainer_for(
        exported("qwen3"),
        **{"lora_rank": 3, "lora_plus": 4.0, "lora_dropout": 0.25, "train": "norms"}
        | {"learning_rate": 1e-2, "grad_accumulation": accumulation, "batch_size": batch_size}
        | options,
    ) as trainer:
        own = [tuple(x[:batch_size] for x in batch) for batch in batches(12)]
        found = [trainer.step(own[2 * i : 2 * i + 2]).loss for i in range(3)]
        assert trainer.usage == trainer.plan.usage
        return found, trainer.weights()


@cache
def plain(dtype: str, batch_size: int = 2) -> tuple[list[float], dict[str, np.ndarray]]:
    return losses(model_dtype=dtype, batch_size=batch_size)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("options", MEMORY.values(), ids=MEMORY)
def test_memory_options_change_no_bit(dtype, options):
    found, weights = losses(model_dtype=dtype, **options)
    assert found == plain(dtype)[0]
    for name, value in plain(dtype)[1].items():
        np.testing.assert_array_equal(weights[name], value, err_msg=name)


@pytest.mark.parametrize(
    "options", [{}, {"zero_level": 3, "memcpy_all_gather": True}, {"zero_level": 2}], ids=str
)
def test_ranks_compute_what_one_does(options):
    """Also the same dropout: a sequence has it wherever it is computed.

    They are numbered as the loaders deal them, one to each rank in turn.
    """
    want = plain("fp32", batch_size=1)
    found, weights = losses(accumulation=1, gpus=2, batch_size=1, **options)
    # F32 sums over ranks in another order.
    assert found == pytest.approx(want[0], abs=1e-5)
    for name, value in want[1].items():
        if "lora" not in name:  # of nothing but rounding AdamW makes steps of full size
            np.testing.assert_allclose(weights[name], value, atol=1e-3, err_msg=name)


@pytest.mark.parametrize(
    "options, most",
    [
        ({}, 0.02),
        ({"lora_dropout": 0.1}, 0.02),
        # Other roundings before fp8 codes are made are other codes.
        ({"matmul_dtype": "e4m3", "base_dtype": "e4m3", "fp8_fast_accumulation": "all"}, 0.1),
    ],
    ids=["bf16", "dropout", "fp8"],
)
def test_adapters_within_products(options, most, tmp_path, monkeypatch):
    """Gradients are those beside the products, but for BF16's roundings: without the adapters' part
    the difference is 40 % and more.

    Adapters with random B have a part in the first step, before updates make roundings larger.
    """
    torch.manual_seed(1)
    random = {"lora_alpha": 1, "init_lora_weights": False}
    config = peft.LoraConfig(r=4, target_modules=targets("qwen2"), **random)
    peft.get_peft_model(hf_model("qwen2"), config).save_pretrained(tmp_path)

    def gradients():
        more = {"adapter": tmp_path, "model_dtype": "bf16"} | options
        entries = Counter()
        with trainer_for(exported("qwen2"), **more) as trainer:
            launch = trainer.dev.launch

            def counted(kernel, *args, **kwargs):
                entries[kernel.entry] += 1
                launch(kernel, *args, **kwargs)

            with trainer.dev.instead(launch=counted):
                trainer.step(batches()[:1])
            return trainer.gradients(), entries["matmul_adapted"]

    want, none = gradients()
    monkeypatch.setenv("LLMQ_FUSED", "matmul_adapted")
    found, count = gradients()
    # In front of the first adapters nothing is trained: qkv's input there has no gradient.
    assert (none, count) == (0, 4 * 2 if "lora_dropout" in options else 4 * 2 * 2 - 1)
    for name, value in want.items():
        value, other = value.astype(np.float64), found[name].astype(np.float64)
        assert np.linalg.norm(other - value) < most * np.linalg.norm(value), name


def test_dropout_is_of_the_sequence():
    """Four sequences in one batch, or in two."""
    four = [np.concatenate(pair) for pair in zip(*batches()[:2], strict=True)]
    with trainer_for(
        exported("qwen3"), lora_rank=3, lora_dropout=0.5, learning_rate=1e-2, batch_size=4
    ) as trainer:
        together = [trainer.step([four]).loss for _ in range(3)]
    with trainer_for(
        exported("qwen3"), lora_rank=3, lora_dropout=0.5, learning_rate=1e-2, grad_accumulation=2
    ) as trainer:
        apart = [trainer.step(batches()[:2]).loss for _ in range(3)]
    assert together == pytest.approx(apart, abs=1e-5)  # sums of gradients in another order
    with trainer_for(
        exported("qwen3"), lora_rank=3, lora_dropout=0.0, learning_rate=1e-2, grad_accumulation=2
    ) as trainer:
        without = [trainer.step(batches()[:2]).loss for _ in range(3)]
    assert abs(without[2] - apart[2]) > 1e-3


@pytest.mark.parametrize("gpus", [1, 2])
def test_resume(tmp_path, gpus):
    options = {
        "lora_rank": 3, "lora_dropout": 0.25, "train": "embeddings", "learning_rate": 1e-2,
        "grad_accumulation": 2 // gpus, "gpus": gpus, "batch_size": 1,
    }  # fmt: skip
    every = [tuple(x[:1] for x in batch) for batch in batches()]
    steps = [every[2 * i : 2 * i + 2] for i in range(4)]
    with trainer_for(exported("qwen3"), **options) as trainer:
        for step in steps[:2]:
            trainer.step(step)
        path = trainer.save(tmp_path)
        want = [trainer.step(step).loss for step in steps[2:]]
        weights = trainer.weights()
    stored = load_file(next(path.glob("weights.shard_000*")))
    assert all("lora" in name or "embed" in name for name in stored)
    with trainer_for(exported("qwen3"), **options) as trainer:
        trainer.load(path)
        assert [trainer.step(step).loss for step in steps[2:]] == want
        for name, value in trainer.weights().items():
            np.testing.assert_array_equal(value, weights[name], err_msg=name)
    if gpus == 2:  # on one rank
        with trainer_for(exported("qwen3"), **options | {"gpus": 1, "grad_accumulation": 2}) as one:
            one.load(path)
            # F32 sums over ranks in another order.
            assert [one.step(step).loss for step in steps[2:]] == pytest.approx(want, abs=1e-5)


def test_magnitudes(tmp_path):
    """Magnitudes of DoRA go on from checkpoints, agree on two ranks, and are merged as by PEFT."""
    options = {"lora_rank": 3, "lora_dora": True, "lora_targets": "q,v,up", "learning_rate": 1e-2}
    steps = [[tuple(x[i : i + 1] for x in batch) for i in (0, 1)] for batch in batches()[:4]]
    alone = {"batch_size": 1, "grad_accumulation": 2}
    with trainer_for(exported("qwen3"), **options, **alone) as trainer:
        for step in steps[:2]:
            trainer.step(step)
        path = trainer.save(tmp_path / "saved")
        trainer.export(tmp_path / "out")
        want = [trainer.step(step).loss for step in steps[2:]]
    ranks = {"gpus": 2, "batch_size": 1, "zero_level": 3}
    with trainer_for(exported("qwen3"), **options, **ranks) as trainer:
        trainer.load(path)
        # F32 sums over ranks in another order.
        assert [trainer.step(step).loss for step in steps[2:]] == pytest.approx(want, abs=1e-5)
    with pytest.raises(LlmqError, match="was made with --lora-dora"):
        trainer_for(exported("qwen3"), **options | {"lora_dora": False}).load(path)
    merge_adapter(str(exported("qwen3")), tmp_path / "out", tmp_path / "merged", "fp32")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    theirs = peft.PeftModel.from_pretrained(hf_model("qwen3"), tmp_path / "out").merge_and_unload()
    for name, value in theirs.state_dict().items():
        np.testing.assert_allclose(model.state_dict()[name], value, atol=1e-6, err_msg=name)


def test_checkpoint_of_another_base(tmp_path):
    with trainer_for(exported("qwen3"), lora_rank=3) as trainer:
        path = trainer.save(tmp_path / "ckpt")
        trainer.export(tmp_path / "adapter")
    hf_model("qwen3", seed=1).save_pretrained(tmp_path / "other")
    for model, rank, match in (
        (tmp_path / "other", 3, r"has adapters of the model '.*qwen3-.*', whose"),
        (exported("qwen3"), 4, "made with --lora-rank=3: continue it so, not with"),
        (exported("qwen3"), 0, "made with --lora-rank=3: continue it so, not with"),
    ):
        with (
            trainer_for(model, lora_rank=rank) as trainer,
            pytest.raises(LlmqError, match=match),
        ):
            trainer.load(path)
    with pytest.raises(LlmqError, match=r"--adapter: .* has adapters of the model"):
        trainer_for(tmp_path / "other", adapter=tmp_path / "adapter")


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"lora_rank": 65},
            "65 is larger than the matrix of q_proj, 128 x 64: use at most 64, or leave",
        ),
        ({"lora_rank": 4, "lora_targets": "q,z"}, "--lora-targets: expected some of .* got 'z'"),
        ({"lora_rank": 4, "train": "norm"}, "--train: expected some of .* got 'norm'"),
        ({"lora_rank": 4, "train": "head"}, "--train: the head is the embedding"),
        ({"lora_targets": "q"}, "--lora-targets: needs --lora-rank"),
        ({"train": "norms"}, "--train: needs --lora-rank"),
        (
            {"lora_rank": 4, "lora_dora": True, "lora_dropout": 0.1},
            "--lora-dora: has no --lora-dropout",
        ),
        ({"lora_rank": 4, "lora_dropout": 1.0}, "--lora-dropout: must be less than 1"),
        ({"lora_rank": 4, "lora_plus": 0.0}, "--lora-plus: must be more than 0"),
        (
            {"lora_rank": 4, "model_dtype": "bf16", "matmul_dtype": "e4m3"},
            "--matmul-dtype: e4m3 needs --base-dtype e4m3 or nf4 beside adapters",
        ),
        (
            {"lora_rank": 4, "base_dtype": "bf16"},
            "--base-dtype: bf16 does not go with --model-dtype fp32, use fp32 or e4m3 or",
        ),
        ({"base_dtype": "nf4"}, "--base-dtype: needs --lora-rank"),
        (
            {"lora_rank": 4, "base_dtype": "e4m3", "matmul_dtype": "e4m3"},
            "--matmul-dtype: e4m3 does not go with --model-dtype fp32",
        ),
        (
            {"lora_rank": 4, "model_dtype": "bf16", "base_dtype": "e4m3"}
            | {"shard_weights": True, "persistent_quants": True},
            "--persistent-quants: beside adapters the model is kept as --base-dtype says",
        ),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ConfigError, match=message):
        trainer_for(exported("qwen3"), **options)


def test_targets_of_other_architectures():
    with pytest.raises(ConfigError, match="q, k, v are one matrix, qkv_proj, of Phi3ForCausalLM"):
        trainer_for(exported("phi3"), lora_rank=4, lora_targets="q,v")
    with pytest.raises(ConfigError, match="--lora-targets: GPT2LMHeadModel has no gate"):
        trainer_for(exported("gpt2"), lora_rank=4, lora_targets="gate,up")


def test_wrong_adapters(tmp_path):
    with trainer_for(exported("qwen3"), **LORA) as trainer:
        trainer.export(tmp_path)
    (tmp_path / "llmq.json").unlink()
    with pytest.raises(LlmqError, match=r"has shape \[4, 128\], but the model asks for \[4, 64\]"):
        trainer_for(exported("qwen2"), adapter=tmp_path)
    with pytest.raises(LlmqError, match="does not fit the model: it adapts model"):
        trainer_for(exported("gpt2"), adapter=tmp_path)
    with pytest.raises(ConfigError, match=r"--lora-rank=8: .* has --lora-rank=4: leave it out"):
        trainer_for(exported("qwen3"), adapter=tmp_path, lora_rank=8)
    content = json.loads((tmp_path / "adapter_config.json").read_text())
    for name, value in (("use_qalora", True), ("bias", "some"), ("peft_type", "IA3")):
        (tmp_path / "adapter_config.json").write_text(json.dumps(content | {name: value}))
        with pytest.raises(LlmqError, match=name):
            trainer_for(exported("qwen3"), adapter=tmp_path)
    with pytest.raises(LlmqError, match="holds no adapters: cannot read adapter_config"):
        trainer_for(exported("qwen3"), adapter=tmp_path / "nothing")


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Adapters after some steps, a checkpoint of them, and the loss of batch 0."""
    folder = tmp_path_factory.mktemp("trained")
    options = LORA | {"lora_targets": "q,v,up", "train": "norms", "learning_rate": 1e-2}
    with trainer_for(exported("qwen3"), **options) as trainer:
        for batch in batches()[1:5]:
            trainer.step([batch])
        trainer.save(folder / "ckpt")
        trainer.export(folder / "adapter")
        (folder / "loss").write_text(repr(trainer.step([batches()[0]]).loss))
    return folder


def test_merged_model(tmp_path, trained):
    """A merged model computes as the model with adapters does; `sample` and `eval` take either."""
    base, adapter, out = str(exported("qwen3")), trained / "adapter", tmp_path / "out"
    merge_adapter(base, adapter, out, "fp32")
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    loss = float((trained / "loss").read_text())
    assert torch_loss(model, [batches()[0]]).item() == pytest.approx(loss, abs=2e-6)  # F32
    theirs = peft.PeftModel.from_pretrained(hf_model("qwen3"), adapter).merge_and_unload()
    for name, value in theirs.state_dict().items():
        np.testing.assert_allclose(model.state_dict()[name], value, atol=1e-6, err_msg=name)
    with open_model(base, adapter) as (config, read, _), open_model(str(out)) as (_, merged, _):
        for param in (p for slab in weight_table(config) for p in slab.params):
            np.testing.assert_array_equal(read(param), merged(param), err_msg=param.name)
    with pytest.raises(LlmqError, match=r"--out: .* holds a model already"):
        merge_adapter(base, adapter, out, "fp32")
    with pytest.raises(LlmqError, match="has adapters of the model"):
        hf_model("qwen3", seed=1).save_pretrained(tmp_path / "other")
        merge_adapter(str(tmp_path / "other"), adapter, tmp_path / "new", "fp32")
    assert not (tmp_path / "new").exists()


def test_export_of_a_checkpoint(tmp_path, trained):
    files = export(trained / "ckpt", tmp_path / "out")
    assert "adapter_model.safetensors" in files and "model.safetensors" not in files
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (trained / "adapter" / name).read_bytes()
    with (
        pytest.raises(LlmqError, match=r"holds adapters of .* only: `llmq export` it"),
        open_model(str(trained / "ckpt")),
    ):
        pass


def test_plans():
    """Frozen blocks have no gradients and moments, and what no gradient needs is not kept."""
    model, options = preset("tiny"), {"model": "tiny", "from_scratch": True, "gpus": 1}
    config = TrainConfig(**options, lora_rank=8, lora_targets="q,v").normalized()
    plan = make_plan(config, model, HOST_SPEC)
    count = trained_count(config, model)
    assert count == 8 * model.num_layers * (
        2 * model.hidden_size + (model.num_heads + model.num_kv_heads) * model.head_dim
    )
    moments = plan.usage.categories["device"]
    assert moments["Adam M"] == 4 * count  # no padding in these sizes
    whole = make_plan(TrainConfig(**options).normalized(), model, HOST_SPEC)
    more = TrainConfig(**options, lora_rank=8).normalized()
    kept = make_plan(more, model, HOST_SPEC).usage.categories["device"]["Activations"]
    assert moments["Activations"] < kept
    assert plan.flops < whole.flops
    planner = Planner(model, HOST_SPEC, "native", card_of(HOST_SPEC))
    assert planner.estimate(config).device == planner.exact(config).device
    deep = replace(preset("tiny"), num_layers=9)
    planner = Planner(deep, HOST_SPEC, "native", card_of(HOST_SPEC))
    estimate, exact = planner.estimate(config).device, planner.exact(config).device
    assert estimate == pytest.approx(exact, abs=1 << 20)


def test_frozen_slabs_are_gathered_once(monkeypatch):
    """Several ranks bring each other what the update has changed, and nothing else."""
    gathered = []
    real = Weights._gather_resident

    def gather(weights, slab):
        gathered.append(slab)
        real(weights, slab)

    monkeypatch.setattr(Weights, "_gather_resident", gather)
    with trainer_for(exported("qwen3"), lora_rank=4, gpus=2) as trainer:
        assert "layers.0" in gathered
        gathered.clear()
        for i in range(3):
            trainer.step(batches()[2 * i : 2 * i + 2])
        assert set(gathered) == {"lora_a", "lora_b"}


def test_what_has_no_effect():
    config = TrainConfig(lora_rank=4, zero_level=2, offload_gradients=True).normalized()
    why = "has no effect with --lora-rank: blocks have no gradients but those of their adapters"
    assert RULES.idle(config, ranks=Ranks(2)) == [
        f"--offload-gradients {why}",
        f"--zero-level 2 {why}",
    ]
    assert any(
        "--zero-level 2 has no effect" in line for line in RULES.idle(config, ranks=Ranks(1))
    )
