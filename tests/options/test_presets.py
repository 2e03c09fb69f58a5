"""Models by name: the presets, directories, and the Hugging Face cache."""

import json
import os

import pytest

from llmq.arch import ARCHITECTURES
from llmq.base.errors import ConfigError
from llmq.options.presets import PRESETS, model_warnings, preset, released, resolve_model
from llmq.state.params import parameter_count

QWEN25, QWEN3 = preset("qwen2.5-0.5b").to_hf(), preset("qwen3-0.6b").to_hf()
GPT2 = {**preset("gpt2").to_hf(), "resid_pdrop": 0.1, "attn_pdrop": 0.1, "embd_pdrop": 0.1}


# Parameters of the released models of these names, of Gemma-3 4b to 27b and Gemma 4 of their
# text part.
PARAMETERS = {
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-1.5B": 1_543_714_304,
    "Qwen2.5-3B": 3_085_938_688,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-14B": 14_770_033_664,
    "Qwen2.5-32B": 32_763_876_352,
    "Qwen2.5-72B": 72_706_203_648,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-1.7B": 1_720_574_976,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen1.5-MoE-A2.7B": 14_315_784_192,
    "OLMoE-1B-7B": 6_919_161_856,
    "Mixtral-8x7B": 46_702_792_704,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "GLM-4.7-Flash": 29_943_393_920,
    "GLM-4.5-Air": 106_852_251_264,
    "DeepSeek-V2-Lite": 15_706_484_224,
    "MiniMax-M2": 228_689_764_864,
    "LFM2-1.2B": 1_170_340_608,
    "Nemotron-3-Nano-30B-A3B": 31_577_940_288,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.1-8b": 8_030_261_248,
    "Phi-3-mini": 3_821_079_552,
    "OLMo-2-1B": 1_484_916_736,
    "OLMo-2-7B": 7_298_617_344,
    "OLMo-2-13B": 13_716_198_400,
    "OLMo-2-32B": 32_234_279_936,
    "OLMo-3-7B": 7_298_011_136,
    "SmolLM3-3B": 3_075_098_624,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "gemma-3-270m": 268_098_176,
    "gemma-3-1b": 999_885_952,
    "gemma-3-4b": 3_880_263_168,
    "gemma-3-12b": 11_766_034_176,
    "gemma-3-27b": 27_009_346_304,
    "gemma-4-E2B": 4_628_569_379,
    "gemma-4-E4B": 7_463_013_418,
    "gemma-4-12B": 11_907_350_320,
    "gemma-4-31B": 30_697_345_340,
    "gemma-4-26B-A4B": 25_233_141_790,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
}


@pytest.mark.parametrize(("name", "parameters"), PARAMETERS.items())
def test_presets_have_the_size_of_the_released_models(name, parameters):
    model = preset(name)
    if name.startswith("Qwen2.5") and not model.tied_embeddings:
        # Released with 152064 ids; the preset has 151936, as llm.q's has.
        parameters -= 2 * (152064 - 151936) * model.hidden_size
    assert parameter_count(model) == parameters


def test_released_models_have_their_own_size():
    """Released sizes by preset and by repository, also where a preset has llm.q's vocabulary."""
    for name, parameters in PARAMETERS.items():
        repository, model = released(name)
        assert parameter_count(model) == parameters, name
        assert released(repository) == (repository, model)
    assert released("Qwen2.5-7B")[0] == "Qwen/Qwen2.5-7B"
    assert released("tiny") is None and released("someone/else") is None


def test_tiny_presets_are_tiny():
    sizes = {name: parameter_count(m) for name, m in PRESETS.items() if name.startswith("tiny")}
    assert len(sizes) == 21
    assert all(1e6 < size < 3e6 for size in sizes.values())


def test_presets():
    families = {config.architecture for config in PRESETS.values()}
    assert len(families) == 29 and families <= set(ARCHITECTURES)
    assert preset("QWEN2.5-7b").tied_embeddings is False
    assert preset("Llama-3.1-8B") is preset("llama-3-8b")
    assert preset("llama-3-8b").max_positions == 4096
    assert preset("gpt2-xl").num_heads == 25
    assert preset("tiny").vocab_size == 257
    with pytest.raises(ConfigError, match=r"did you mean qwen2.5-0.5b"):
        preset("qwen2.5-05b")


def _write_model(directory, hf):
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(hf))
    return directory


def test_resolve_directory(tmp_path):
    directory = _write_model(tmp_path / "model", QWEN25)
    assert resolve_model(str(directory), from_scratch=False) == (preset("qwen2.5-0.5b"), directory)
    # From scratch too: the configuration of the directory, not a preset.
    assert resolve_model(str(directory), from_scratch=True) == (preset("qwen2.5-0.5b"), directory)
    assert model_warnings(directory) == []
    assert len(model_warnings(_write_model(tmp_path / "gpt2", GPT2))) == 3
    assert model_warnings(None) == []


def test_resolve_preset():
    assert resolve_model("Tiny", from_scratch=True) == (preset("tiny"), None)
    with pytest.raises(ConfigError, match="--from-scratch"):
        resolve_model("tiny", from_scratch=False)


@pytest.mark.parametrize("variable", ["HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME", "HOME"])
def test_resolve_hub_cache(variable, tmp_path, monkeypatch):
    for name in ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "nobody"))
    monkeypatch.setenv(variable, str(tmp_path))
    below = {
        "HF_HUB_CACHE": "",
        "HF_HOME": "hub",
        "XDG_CACHE_HOME": "huggingface/hub",
        "HOME": ".cache/huggingface/hub",
    }
    repo = tmp_path / below[variable] / "models--Qwen--Qwen2.5-0.5B"
    old = _write_model(repo / "snapshots" / "aaaa", QWEN3)
    main = _write_model(repo / "snapshots" / "bbbb", QWEN25)
    other = _write_model(repo / "snapshots" / "cccc", GPT2)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("bbbb\n")
    model, directory = resolve_model("Qwen/Qwen2.5-0.5B", from_scratch=False)
    assert (model, directory) == (preset("qwen2.5-0.5b"), main)

    (repo / "refs" / "main").unlink()
    for age, snapshot in ((30, old), (20, main), (10, other)):
        os.utime(snapshot, (1e9 - age, 1e9 - age))
    assert resolve_model("Qwen/Qwen2.5-0.5B", from_scratch=False)[1] == other


def test_resolve_errors(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match=r"--model: 'nothing/here' .* add --download to fetch it"):
        resolve_model("nothing/here", from_scratch=False)
    for path in (tmp_path / "none", "./none", "~/none", "~nosuchuser/none"):
        with pytest.raises(ConfigError, match="is not a directory") as error:
            resolve_model(str(path), from_scratch=False)
        assert "--download" not in str(error.value)
    with pytest.raises(ConfigError, match=r"presets need --from-scratch, did you mean gpt2"):
        resolve_model("gpt3", from_scratch=False)
    with pytest.raises(ConfigError, match=r"there is no .*config\.json; .* --from-scratch"):
        resolve_model(str(tmp_path), from_scratch=False)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json.*JSON"):
        resolve_model(str(tmp_path), from_scratch=False)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"config\.json must hold one JSON object"):
        resolve_model(str(tmp_path), from_scratch=False)
    (tmp_path / "config.json").write_text(json.dumps({**GPT2, "n_embd": None}))
    with pytest.raises(ConfigError, match=f"{tmp_path}: config.json: n_embd: expected int"):
        resolve_model(str(tmp_path), from_scratch=False)
