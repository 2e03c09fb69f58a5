"""Heads for multi-token prediction in torch, of layers of transformers."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.models.glm4_moe import modeling_glm4_moe as glm4_moe
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as qwen3_5_moe
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from tests.models import randomized

PARTS = {
    "qwen3_5": (qwen3_5.Qwen3_5DecoderLayer, qwen3_5.Qwen3_5RMSNorm),
    "qwen3_5_moe": (qwen3_5_moe.Qwen3_5MoeDecoderLayer, qwen3_5_moe.Qwen3_5MoeRMSNorm),
    "qwen3_next": (qwen3_next.Qwen3NextDecoderLayer, qwen3_next.Qwen3NextRMSNorm),
    "glm4_moe": (glm4_moe.Glm4MoeDecoderLayer, glm4_moe.Glm4MoeRMSNorm),
}
IN_GLM = {"pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "fc": "eh_proj"}
IN_GLM |= {"norm": "shared_head.norm"}


class MtpHead(nn.Module):
    """The head that Qwen3NextMultiTokenPredictor and DeepSeekMultiTokenPredictor of vLLM are."""

    def __init__(self, name: str, model: transformers.PreTrainedModel):
        super().__init__()
        config, (layer, norm) = model.config, PARTS[name]
        C, eps = config.hidden_size, config.rms_norm_eps
        alone = type(config)(**config.to_dict())
        if hasattr(config, "layer_types"):
            alone.layer_types = ["full_attention"]
        if hasattr(config, "first_k_dense_replace"):
            alone.first_k_dense_replace = 0
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = norm(C, eps), norm(C, eps)
        self.fc = nn.Linear(2 * C, C, bias=False)
        alone._attn_implementation = "eager"
        self.layers = nn.ModuleList([layer(alone, 0)])
        self.norm = norm(C, eps)

    def forward(self, model: transformers.PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
        """Logits (B, T - 1, V) of the token behind the next one. tokens: (B, T)."""
        with torch.no_grad():
            hidden = model.model(tokens[:, :-1]).last_hidden_state
            embedded = model.model.embed_tokens(tokens[:, 1:])
        both = (self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden))
        x = self.fc(torch.cat(both, dim=-1))
        length = x.shape[1]
        places = torch.arange(length)[None]
        mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
        around = model.model.rotary_emb(x, places)
        how = {"position_embeddings": around, "attention_mask": mask, "position_ids": places}
        out = self.layers[0](x, **how)
        out = out[0] if isinstance(out, tuple) else out
        return model.lm_head(self.norm(out))


def with_head(
    name: str, model: transformers.PreTrainedModel, folder: Path
) -> tuple[MtpHead, dict[str, nn.Parameter]]:
    """A head of a model in torch, and its parameters by published names; writes both to a
    folder."""
    torch.manual_seed(1)
    head = MtpHead(name, model).float()
    for parameter in (p for p in head.parameters() if p.ndim > 1):
        nn.init.normal_(parameter, std=0.1)  # experts have undefined numbers before
    head = randomized(head)
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    content = json.loads((folder / "config.json").read_text())
    behind = f"model.layers.{model.config.num_hidden_layers}."
    named = {}
    for key, value in (head.state_dict(keep_vars=True)).items():
        own = f"mtp.{key}"
        if name == "glm4_moe":
            content["num_nextn_predict_layers"] = 1
            module, _, end = key.rpartition(".")
            in_layer = key.removeprefix("layers.0.")
            own = behind + (in_layer if in_layer != key else f"{IN_GLM[module]}.{end}")
        named[own] = value
    tensors |= {key: value.detach().contiguous() for key, value in named.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(content))
    return head, named
