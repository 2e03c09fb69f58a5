"""Count which of the 40 most trained families of decoders llmq trains as transformers does.

For each family transformers makes a tiny random model, and llmq loads the model in F32 on the CPU.
The tests of tests/arch/test_families.py then compare both: a step's loss (to 1e-5) and gradients
(to 1e-4), the loss and gradients of packed documents, which transformers computes one by one,
greedy text, and the exported model. The 40 families are named in commits and notebooks of six
trainers in 2026.

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

import torch
import transformers

from llmq import __version__
from llmq.arch.model_config import ModelConfig
from llmq.base.errors import LlmqError
from tests.arch import test_families as checks
from tests.models import CONFIGS, randomized

KNOWN: dict[str, Callable[[], Any]] = CONFIGS | checks.FAMILIES
NAMES = (
    "qwen2 qwen2_moe qwen3 qwen3_moe qwen3_5 qwen3_5_moe qwen3_next llama llama4 mistral ministral "
    "ministral3 mixtral gemma gemma2 gemma3 gemma3n gemma4 gpt_oss glm4 glm4_moe glm4_moe_lite "
    "deepseek_v3 minimax_m2 phi3 nemotron_h lfm2 kimi_linear falcon_h1 olmo2 olmo3 olmoe granite "
    "granitemoehybrid smollm3 seed_oss ernie4_5 exaone4 gpt2 starcoder2"
).split()
PARITY = "parity"
CHECKS: dict[str, Callable[[tuple[Any, Path], Path], None]] = {
    "loss and gradients": lambda model, _: (
        checks.test_loss_and_every_gradient_are_those_of_transformers(model)
    ),
    "packed documents": lambda model, _: checks.test_documents_of_a_sequence_do_not_see_each_other(
        model
    ),
    "text": lambda model, _: checks.test_text_goes_on_as_transformers_generates(model),
    "export": checks.test_its_export_is_the_model_for_transformers,
}


def result(name: str) -> str:
    """Return "parity", "refused: REASON" or "differs: WHERE" for a family."""
    if name not in KNOWN:
        return refusal(name)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(KNOWN[name]()).float().eval()
    differs = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        randomized(model).save_pretrained(path / "model")
        for what, check in CHECKS.items():
            try:
                check((model, path / "model"), path)
            except LlmqError as error:
                return f"refused: {error}"
            except AssertionError:
                differs.append(what)
    return f"differs: {', '.join(differs)}" if differs else PARITY


def refusal(name: str) -> str:
    """Return why llmq refuses the config.json of a family without a test, or that llmq accepts the
    file."""
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


def table(found: dict[str, str]) -> str:
    rows = "".join(f"| {name} | {each} |\n" for name, each in found.items())
    return f"| family | result |\n| --- | --- |\n{rows}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="Markdown to write")
    out = parser.parse_args().out
    found = {name: result(name) for name in NAMES}
    others = {name: result(name) for name in sorted(KNOWN.keys() - {*NAMES})}
    passed, more = (sum(each == PARITY for each in x.values()) for x in (found, others))
    made = f"{date.today()}, made by\n`python {shlex.join(sys.argv)}`"
    text = (
        f"# Families at parity\n\n{passed} of {len(found)} families do as in transformers "
        f"{transformers.__version__}\n(llmq {__version__}, {platform.machine()}, F32): "
        f"{', '.join(CHECKS)}.\n{made}.\n\n{table(found)}\n## Variants\n\n"
        f"{more} of {len(others)} other forms and relatives of these do so, too.\n\n{table(others)}"
    )
    print(text)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text)


if __name__ == "__main__":
    main()
