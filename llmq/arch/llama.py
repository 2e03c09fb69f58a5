"""Llama 1 to 3: biases by attention_bias and mlp_bias."""

from llmq.arch.common import GgufKind
from llmq.arch.rope_family import RopeFamily


class Llama(RopeFamily):
    """A family that RopeFamily describes, with more choices in its config."""

    name = "LlamaForCausalLM"
    model_type = "llama"
    label = "LLaMA"
    gguf = GgufKind("llama", pairs=True, heads=True)
    qkv_bias = None
    o_bias = None
    mlp_bias = None
    kv_heads_may_lack = True
    bos_token_id = 1
    eos_token_id = 2
