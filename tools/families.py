"""The share of the 40 most trained families of decoders that llmq trains as transformers does.

For each family a tiny random model of transformers goes the whole way in F32 on the CPU: its
config.json is read, a step has transformers' loss (1e-5) and gradients (1e-4), the export loads
again. The families are those of commits and notebooks of six trainers in 2026.

    python tools/families.py --out benchmarks/cpu/2026-11-30/families.md
"""

import argparse
import platform
import shlex
import sys
import tempfile
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from llmq import __version__
from llmq.arch.model_config import ModelConfig
from llmq.base.errors import LlmqError
from tests.arch.test_families import FAMILIES
from tests.models import CONFIGS, random_batch, randomized, step_as_torch, trainer_for

KNOWN: dict[str, Callable[[], Any]] = CONFIGS | FAMILIES
NAMES = (
    "qwen2 qwen2_moe qwen3 qwen3_moe qwen3_5 qwen3_5_moe qwen3_next llama llama4 mistral ministral "
    "ministral3 mixtral gemma gemma2 gemma3 gemma3n gemma4 gpt_oss glm4 glm4_moe glm4_moe_lite "
    "deepseek_v3 minimax_m2 phi3 nemotron_h lfm2 kimi_linear falcon_h1 olmo2 olmo3 olmoe granite "
    "granitemoehybrid smollm3 seed_oss ernie4_5 exaone4 gpt2 starcoder2"
).split()


def result(name: str) -> str:
    """Return "parity", "refused: REASON" or "differs: WHERE" for a family."""
    if name not in KNOWN:
        return refusal(name)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(KNOWN[name]()).float().eval()
    with tempfile.TemporaryDirectory() as folder:
        randomized(model).save_pretrained(folder)
        path = Path(folder)
        try:
            with trainer_for(path) as trainer:
                step_as_torch(trainer, [random_batch(np.random.default_rng(0))], model)
                trainer.export(path / "out")
            transformers.AutoModelForCausalLM.from_pretrained(path / "out")
        except LlmqError as error:
            return f"refused: {error}"
        except AssertionError as error:
            return f"differs: {str(error).strip().splitlines()[0]}"
    return "parity"


def refusal(name: str) -> str:
    """Return the reason for which the config.json of a family without a test is refused."""
    kinds = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    names = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    architecture = names.get(name) or name
    fields = {"architectures": [architecture if isinstance(architecture, str) else name]}
    if name in kinds:
        fields = kinds[name]().to_dict() | fields
    try:
        ModelConfig.from_hf(fields)
    except LlmqError as error:
        return f"refused: {str(error).split(', only')[0]}"
    return "accepted, and not tested"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="Markdown to write")
    out = parser.parse_args().out
    found = {name: result(name) for name in NAMES}
    passed = sum(each == "parity" for each in found.values())
    version = f"{transformers.__version__}\n(llmq {__version__}, {platform.machine()}, F32)"
    head = (
        f"# Families at parity\n\n{passed} of {len(found)} families have the loss and gradients "
        f"of transformers {version},\nwhich loads their exports. {date.today()}, made by\n"
        f"`python {shlex.join(sys.argv)}`.\n\n| family | result |\n| --- | --- |\n"
    )
    text = head + "".join(f"| {name} | {each} |\n" for name, each in found.items())
    print(text)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text)


if __name__ == "__main__":
    main()
