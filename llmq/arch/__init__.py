"""Descriptions of model architectures, one file per family: fields of config.json, names of
weights, norms, biases, initial values.

`model_config.py` holds ModelConfig, which describes the sizes of any model. The weight table,
options, memory plans, decoding and export follow from these descriptions. The folder imports only
llmq/base. Start with `common.py`, then `llama.py`. A new architecture needs a file of its own and a
line in ARCHITECTURES.
"""

from collections.abc import Mapping
from typing import Any

from llmq.arch.common import Architecture
from llmq.arch.deepseek import DeepseekV2, DeepseekV3, Glm4MoeLite
from llmq.arch.ernie4_5 import Ernie45, Helium
from llmq.arch.exaone4 import Exaone4
from llmq.arch.gemma import Gemma
from llmq.arch.gemma2 import Gemma2
from llmq.arch.gemma3 import Gemma3
from llmq.arch.gemma4 import Gemma4, Gemma4Unified
from llmq.arch.glm4 import Glm, Glm4
from llmq.arch.glm4_moe import Glm4Moe
from llmq.arch.gpt2 import Gpt2
from llmq.arch.gpt_oss import GptOss
from llmq.arch.granite import Granite
from llmq.arch.granite_hybrid import GraniteHybrid
from llmq.arch.lfm2 import Lfm2
from llmq.arch.llama import Arcee, Cwm, Llama
from llmq.arch.minimax_m2 import MiniMaxM2
from llmq.arch.mistral import Ministral, Ministral3, Mistral, Mixtral
from llmq.arch.nemotron_h import NemotronH
from llmq.arch.olmo2 import Olmo2, Olmo3, Olmoe
from llmq.arch.phi3 import Phi3
from llmq.arch.qwen2 import Qwen2, Qwen2Moe
from llmq.arch.qwen3 import Qwen3, Qwen3Moe
from llmq.arch.qwen3_5 import Qwen35, Qwen35Moe
from llmq.arch.qwen3_next import Qwen3Next
from llmq.arch.seed_oss import SeedOss
from llmq.arch.smollm3 import SmolLm3
from llmq.arch.starcoder2 import Starcoder2
from llmq.base.errors import ConfigError

ARCHITECTURES: dict[str, Architecture] = {
    arch.name: arch
    for arch in (
        Qwen2(), Qwen3(), Llama(), Mistral(), Gpt2(), Phi3(), Olmo2(), Gemma3(), Qwen2Moe(),
        Qwen3Moe(), Olmoe(), Mixtral(), Qwen35(), Qwen35Moe(), Qwen3Next(), GptOss(),
        SmolLm3(), Olmo3(), SeedOss(), Exaone4(), Gemma(), Ministral(), Cwm(), Starcoder2(),
        Glm(), Glm4(), Ernie45(), Helium(), Granite(), Arcee(), Ministral3(),
        Gemma4(), Gemma4Unified(), Glm4Moe(), MiniMaxM2(), Lfm2(), DeepseekV2(),
        DeepseekV3(), Glm4MoeLite(), GraniteHybrid(), NemotronH(), Gemma2(),
    )
}  # fmt: skip
"""All supported architectures, by the class name that config.json gives in "architectures"."""


def architecture(name: Any) -> Architecture:
    """Return the architecture of this name; raise ConfigError for an unknown name."""
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ConfigError(
            f"config.json: architectures: {name!r} is not supported, only "
            + ", ".join(ARCHITECTURES)
        )
    return ARCHITECTURES[name]


def read_fields(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ModelConfig for a parsed config.json. Raise ConfigError as
    Architecture.read does."""
    names = hf.get("architectures")
    if not isinstance(names, list) or len(names) != 1:
        raise ConfigError(f"config.json: architectures must hold one name, got {names!r}")
    wrapped = [arch for arch in ARCHITECTURES.values() if names[0] == arch.wrapper]
    for arch in wrapped:
        if len(wrapped) == 1 or hf["text_config"]["model_type"] == arch.model_type:
            return arch.read_wrapped(hf)
    for arch in ARCHITECTURES.values():
        if names[0] == arch.classifier:
            return arch.read(hf)
    return architecture(names[0]).read(hf)
