"""Seed-OSS: Llama with biases on queries, keys and values, and with heads whose size config.json
gives."""

from collections.abc import Mapping
from typing import Any

from llmq.arch.common import reject
from llmq.arch.rope_family import RopeFamily


class SeedOss(RopeFamily):
    """Seed-OSS: attention_bias defaults to true."""

    name = "SeedOssForCausalLM"
    model_type = "seed_oss"
    label = "Seed-OSS"
    qkv_bias = None
    head_dim = 128
    kv_heads_may_lack = True
    bos_token_id = 0
    eos_token_id = 2
    pad_token_id = 1

    def read_sizes(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """Read the sizes; biases of attention's output and of the MLP are rejected."""
        reject(hf, "attention_out_bias", False, None)
        reject(hf, "mlp_bias", False, None)
        return super().read_sizes({"attention_bias": True, **hf})

    def write_sizes(self, model: Any) -> dict[str, Any]:
        return super().write_sizes(model) | {"attention_out_bias": False, "residual_dropout": 0.0}
