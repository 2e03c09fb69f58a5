"""The runs of tools/fingerprint.py: models, trainers, command lines and plans."""

from __future__ import annotations

from typing import Any

T, B, VOCAB = 32, 2, 257

_ROPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 256,
    "tie_word_embeddings": True,
}
_WIDE = {"head_dim": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_hidden_layers": 2}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_GPT2 = {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2ForCausalLM", _ROPE),
    "qwen2-untied": ("Qwen2ForCausalLM", _ROPE | {"tie_word_embeddings": False}),
    "qwen2-odd": ("Qwen2ForCausalLM", _ROPE | {"num_hidden_layers": 5, "hidden_size": 48}),
    "qwen3": ("Qwen3ForCausalLM", _ROPE),
    "qwen3-biases": ("Qwen3ForCausalLM", _ROPE | {"attention_bias": True, "head_dim": 32}),
    "llama": ("LlamaForCausalLM", _ROPE | {"rope_scaling": _LLAMA3, "tie_word_embeddings": False}),
    "llama-biases": ("LlamaForCausalLM", _ROPE | {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("MistralForCausalLM", _ROPE | {"sliding_window": None, "num_key_value_heads": 1}),
    "gemma3": (
        "Gemma3ForCausalLM",
        _ROPE
        | {
            "num_key_value_heads": 1,
            "sliding_window": 8,
            "query_pre_attn_scalar": 8,
            "layer_types": 2 * ["sliding_attention"] + ["full_attention"],
        },
    ),
    "gpt2": ("GPT2LMHeadModel", _GPT2 | {"eos_token_id": 256, "bos_token_id": 256}),
    "phi3": ("Phi3ForCausalLM", _ROPE | {"sliding_window": 7, "pad_token_id": None}),
    "olmo2": ("Olmo2ForCausalLM", _ROPE | {"tie_word_embeddings": False, "pad_token_id": None}),
    "qwen2-window": (
        "Qwen2ForCausalLM",
        _ROPE | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "mistral-window": ("MistralForCausalLM", _ROPE | {"sliding_window": 11}),
    # Sizes for which all fused products are possible.
    "wide": ("Qwen2ForCausalLM", _ROPE | _WIDE | {"tie_word_embeddings": False}),
    "wide-qwen3": ("Qwen3ForCausalLM", _ROPE | _WIDE),
    "wide-llama": ("LlamaForCausalLM", _ROPE | _WIDE | {"attention_bias": True, "mlp_bias": True}),
    "wide-gemma3": (
        "Gemma3ForCausalLM",
        _ROPE
        | _WIDE
        | {
            "sliding_window": 8,
            "query_pre_attn_scalar": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
}

# Sizes for which Hopper uses all fused products, and the small model that replaces each on the CPU.
_REAL = {
    "vocab_size": 16384,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 2,
    "num_attention_heads": 14,
    "head_dim": 64,
    "max_position_embeddings": 1024,
}
_REAL_128 = _REAL | {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "head_dim": 128,
}
MODELS |= {
    "real-qwen2": ("Qwen2ForCausalLM", _ROPE | _REAL | {"tie_word_embeddings": False}),
    "real-llama": ("LlamaForCausalLM", _ROPE | _REAL_128 | {"tie_word_embeddings": False}),
    "real-qwen3": ("Qwen3ForCausalLM", _ROPE | _REAL_128),
    "real-gemma3": (
        "Gemma3ForCausalLM",
        _ROPE
        | _REAL_128
        | {
            "sliding_window": 512,
            "query_pre_attn_scalar": 128,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
}
GPU_MODELS = {
    "qwen2": ("real-qwen2", "wide"),
    "llama": ("real-llama", "wide-llama"),
    "qwen3": ("real-qwen3", "wide-qwen3"),
    "gemma3": ("real-gemma3", "wide-gemma3"),
}

WORDS: dict[str, dict[str, Any]] = {
    "fp32": {"model_dtype": "fp32"},
    "bf16": {},
    "fp8": {"matmul_dtype": "e4m3"},
    "delayed": {"matmul_dtype": "e4m3", "fp8_recipe": "delayed"},
    "e5m2": {"gradient_dtype": "e5m2"},
    "fp8-head": {"head_dtype": "e4m3"},
    "accum32": {"grad_accum_dtype": "fp32"},
    "master32": {"master_dtype": "fp32"},
    "m8": {"opt_m_dtype": "e4m3"},
    "v8": {"opt_v_dtype": "e4m3"},
    "muon": {"optimizer": "muon"},
    "m16": {"opt_m_dtype": "bf16"},
    "v16": {"opt_v_dtype": "bf16"},
    "zero0": {"zero_level": 0},
    "zero2": {"zero_level": 2},
    "zero3": {"zero_level": 3},
    "offload": dict.fromkeys(
        "offload_residual offload_master offload_opt_m offload_opt_v".split(), True
    ),
    "copies": dict.fromkeys(
        "memcpy_all_gather memcpy_send_recv all_to_all_reduce".split(), True
    ),
    "lora": {"lora_rank": 4},
    "int8": {"matmul_dtype": "int8"},
    "codes": {"matmul_dtype": "e4m3", "fp8_recipe": "delayed", "mlp_dtype": "e4m3"},
    "stream": {"shard_weights": True, "offload_master": True},
    "short": {"train_file": "../short/train*.bin", "eval_file": "../short/eval*.bin"},
    "chat": {"train_file": "../chat/train*.bin", "eval_file": "../chat/eval*.bin"},
}  # fmt: skip

# Each line: a model, then options with values and options that are switched on. Behind -> stand the
# changed options of a second trainer, which continues from the checkpoint of the first.
RUNS = """
qwen2 fp32
qwen2 bf16
qwen2-untied fp32
qwen2-untied bf16 accum32 master32
qwen2-odd bf16 accum32
qwen3 fp32
qwen3 bf16 master32
qwen3-biases bf16
llama fp32
llama bf16
llama-biases fp32
llama-biases bf16 accum32
mistral fp32
mistral bf16
gpt2 fp32
gpt2 bf16
gpt2 bf16 accum32 master32 z_loss=1e-4
gemma3 bf16 gpus=2 zero3 recompute_block
qwen2 fp8
qwen2 delayed
qwen2 fp8 e5m2
qwen2 fp8 fp8-head
qwen2-untied delayed fp8-head accum32 master32
qwen3 delayed e5m2 fp8-head
qwen3-biases fp8 fp8-head
llama fp8
llama delayed fp8-head
llama-biases fp8
mistral fp8
mistral delayed e5m2
gpt2 fp8
gpt2 delayed fp8-head
qwen2 bf16 m8 v8
qwen2 fp32 m16 v16
gpt2 fp8 m8 v8 master32
llama bf16 m8 v16 gpus=3
qwen2 bf16 recompute_swiglu
qwen2 bf16 recompute_norm
qwen2 bf16 recompute_ffn
qwen2 bf16 recompute_qkv
qwen2 bf16 recompute_att
qwen2 bf16 recompute_block
qwen2 bf16 recompute_block recompute_layers=1
gpt2 bf16 recompute_block
gpt2 fp8 recompute_ffn recompute_norm
qwen3 bf16 recompute_att recompute_norm
qwen3 fp8 recompute_block
qwen3 delayed recompute_swiglu recompute_qkv
llama fp8 recompute_ffn recompute_att
llama delayed recompute_block recompute_layers=0,2
mistral bf16 recompute_qkv recompute_norm recompute_swiglu
qwen2 bf16 offload_residual
qwen2 bf16 offload_opt_m
qwen2 bf16 offload_opt_v
qwen2 bf16 offload_master
qwen2 bf16 offload_master master32
qwen2 bf16 shard_gradients offload_gradients
qwen2 bf16 offload use_zero_copy
qwen2 bf16 offload write_combined
qwen2 bf16 offload m8 v8
qwen2 bf16 muon
gpt2 fp32 muon
qwen3 delayed offload muon m8
gpt2 fp8 offload master32 recompute_block
llama delayed offload shard_weights persistent_quants offload_quants
qwen3 bf16 offload use_zero_copy shard_gradients offload_gradients accum32 recompute_block
qwen2 bf16 shard_weights
qwen2 fp8 shard_weights
qwen2 fp8 shard_weights persistent_quants
qwen2 fp8 keep_transposed=false
qwen2 fp8 shard_weights persistent_quants keep_transposed=false
qwen2 fp8 shard_weights persistent_quants offload_quants write_combined
gpt2 delayed shard_weights shard_gradients persistent_quants fp8-head offload_master
qwen2 fp32 gpus=2
qwen2 bf16 gpus=2
qwen2 bf16 gpus=2 zero0
qwen2 bf16 gpus=2 zero2
qwen2 bf16 gpus=2 zero3
qwen2-untied bf16 gpus=4
qwen2-odd bf16 gpus=3 zero3 master32
qwen2 bf16 gpus=2 shard_weights
qwen2 bf16 gpus=2 all_to_all_reduce
qwen2 bf16 gpus=2 all_to_all_reduce memcpy_send_recv
qwen2 bf16 gpus=2 zero2 all_to_all_reduce memcpy_send_recv
qwen2 bf16 gpus=2 zero3 memcpy_all_gather
qwen2 bf16 gpus=2 zero3 memcpy_all_gather mirror_weights
qwen2 bf16 gpus=3 zero3 copies mirror_weights master32 grad_accumulation=3
qwen2 bf16 gpus=2 zero3 offload
qwen2 bf16 gpus=2 zero3 offload copies offload_gradients use_zero_copy
qwen2 bf16 gpus=4 zero2 offload_gradients accum32
qwen3 fp8 gpus=2 zero3 persistent_quants
qwen3 fp8 gpus=4 zero3 persistent_quants offload_quants copies mirror_weights
qwen3 fp8 gpus=2 zero3 persistent_quants mirror_weights memcpy_all_gather keep_transposed=false
llama delayed gpus=2
llama delayed gpus=3 zero3 persistent_quants fp8-head
llama delayed gpus=2 zero2 offload copies grad_accumulation=1
mistral fp32 gpus=3 zero3 copies
mistral fp8 gpus=4 zero2 offload_gradients m8 v8
gpt2 bf16 gpus=2 zero3 recompute_block offload
gpt2 fp8 gpus=3 zero3 keep_transposed=false copies
qwen2 bf16 grad_accumulation=1
qwen2 bf16 grad_accumulation=4 accum32
qwen2 bf16 shard_gradients grad_accumulation=3
qwen2 bf16 lmhead_chunks=4
gpt2 fp8 fp8-head lmhead_chunks=2 recompute_block
qwen2 bf16 batch_size=4 attn_bwd_chunks=4 lmhead_chunks=2
qwen2 fp32 init_proj_to_zero grad_clip=0 weight_decay=0
qwen2 bf16 -> gpus=2
qwen2 bf16 gpus=2 zero3 -> gpus=2
qwen2 fp32 gpus=2 -> gpus=1
qwen3 delayed -> gpus=3 zero2
qwen3 delayed gpus=2 zero3 persistent_quants -> gpus=1
llama fp8 gpus=3 m8 v8 -> gpus=2 offload
gpt2 bf16 gpus=4 zero3 master32 -> recompute_block
mistral bf16 offload use_zero_copy -> gpus=3 zero3 copies
phi3 fp32
phi3 bf16 recompute_block
phi3 delayed fp8-head
olmo2 fp32
olmo2 bf16 recompute_norm
olmo2 fp8 e5m2
gemma3 fp32
gemma3 fp8 fp8-head
gemma3 delayed recompute_ffn
gemma3 codes e5m2
gemma3 fp8 gpus=2 zero2
qwen2-window fp32
qwen2-window bf16 recompute_att attn_bwd_chunks=2
qwen2-window fp8
mistral-window fp32
mistral-window bf16
mistral-window delayed recompute_block
qwen2 codes
qwen3 codes recompute_swiglu
llama codes gpus=2 zero3
qwen2 int8
qwen3 int8 recompute_block accum32
gpt2 int8
llama int8 gpus=2 zero2 offload
qwen2 fp8 fp8_fast_accumulation=none
llama delayed fp8-head fp8_fast_accumulation=all
gpt2 bf16 head_dtype=bf16 matmul_dtype=bf16 gradient_dtype=bf16
qwen2 bf16 seed=7 beta_1=0.8 beta_2=0.99 adam_epsilon=1e-4 weight_decay=0.3
qwen2 bf16 z_loss=1e-2 lmhead_chunks=2
qwen2 bf16 lr_schedule=wsd warmup=1 cooldown=8 final_lr_fraction=0.1
qwen2 bf16 lr_schedule=linear warmup=2 final_lr_fraction=0.2
qwen2 bf16 train_seed=5 eval_seed=6 eval_file=split:0.1
qwen2 bf16 train_file=../data/train*.bin:0.7,../short/train*.bin:0.3 steps=5
qwen2 bf16 vocab_size=300 hidden_size=32 num_layers=2 num_heads=2 num_kv_heads=1 head_dim=8
llama bf16 intermediate_size=64 max_positions=128 rope_theta=5000 tie_embeddings
qwen2 bf16 short document_mask
qwen3 fp32 short document_mask recompute_att attn_bwd_chunks=2
qwen2-window bf16 short document_mask
gemma3 bf16 short document_mask
gpt2 bf16 short document_mask
qwen2 bf16 short packing=best-fit
llama fp8 short packing=best-fit gpus=2
mistral-window bf16 short packing=none
phi3 bf16 short packing=best-fit document_mask=false
olmo2 bf16 short document_separator=101 document_mask
qwen2 bf16 chat
qwen3 delayed chat packing=best-fit
qwen2 base bf16 lora
qwen2 base fp32 lora lora_alpha=16
qwen2 base bf16 lora master_dtype=bf16 grad_accum_dtype=bf16
qwen2 base bf16 lora lora_dropout=0.2 lora_targets=q,v
qwen2 base bf16 lora lora_plus=16
qwen2 base bf16 lora_rank=8 lora_scaling=rs lora_alpha=4
qwen2 base bf16 lora m8 v8
qwen2 base fp8 lora base_dtype=nf4
qwen2 base delayed lora fp8-head base_dtype=nf4
qwen2 base int8 lora
qwen2-untied codes fp8-head accum32
qwen2 base bf16 lora base_dtype=nf4
qwen2 base bf16 lora base_dtype=int8
qwen2 base int8 lora base_dtype=int8 lora_dropout=0.1
qwen2 base fp8 lora base_dtype=e4m3
qwen2 base delayed lora base_dtype=e4m3 recompute_block
qwen2 base fp8 lora base_dtype=nf4 recompute_ffn
qwen2 base bf16 lora stream
qwen2 base bf16 lora stream base_dtype=nf4 offload_residual
qwen2 base int8 lora stream base_dtype=int8
qwen2 base fp8 lora stream base_dtype=e4m3 write_combined
qwen2 base fp8 lora base_dtype=e4m3 stream recompute_ffn
qwen2 base bf16 lora offload shard_weights recompute_block
qwen2 base bf16 lora gpus=2
qwen2 base bf16 lora gpus=2 zero3 base_dtype=nf4
qwen2 base fp8 lora gpus=3 zero3 offload_master base_dtype=e4m3
qwen2 base bf16 lora gpus=2 zero2 copies
qwen2 base bf16 lora short document_mask
qwen2 base bf16 lora train=norms
qwen2-untied base bf16 lora train=norms,embeddings,head
qwen2-untied base fp8 fp8-head lora train=head base_dtype=nf4
qwen3 base bf16 lora
llama base bf16 lora lora_targets=o,gate,up,down
mistral-window base bf16 lora base_dtype=nf4
phi3 base bf16 lora
phi3 base bf16 lora base_dtype=int8
olmo2 base bf16 lora train=norms
gemma3 base bf16 lora
gemma3 base fp8 lora base_dtype=e4m3
gpt2 base bf16 lora base_dtype=nf4
qwen2 base bf16 lora -> gpus=2 zero3
qwen2 base bf16 lora base_dtype=nf4 gpus=2 -> stream
qwen2 base bf16 -> offload
wide bf16 fused=all
wide bf16 fused=all short document_mask
wide bf16 fused=matmul_swiglu,matmul_swiglu_backward recompute_swiglu
wide bf16 lmhead_chunks=2 z_loss=1e-3
wide fp8 fused=all
wide fp8 fused=matmul_gradient gradient_dtype=e5m2 fp8_fast_accumulation=all
wide delayed fused=all fp8-head recompute_block
wide delayed fused=all fp8-head lmhead_chunks=2
wide codes fused=all
wide-qwen3 bf16 fused=all recompute_ffn
wide-qwen3 delayed fused=all e5m2 shard_gradients offload_gradients
wide-llama bf16 fused=all recompute_att
wide-llama fp8 fused=all fp8-head accum32
wide-gemma3 bf16 fused=all
wide-gemma3 codes fused=all fp8-head
wide base bf16 lora fused=all
wide base bf16 lora lora_dropout=0.1 fused=all
wide base delayed lora base_dtype=e4m3 fused=all recompute_block
wide base fp8 lora base_dtype=nf4 fused=matmul_adapted
wide base fp8 fp8-head lora train=head base_dtype=e4m3 fused=all
wide-qwen3 base bf16 lora base_dtype=nf4 fused=all short document_mask
wide-qwen3 base int8 lora base_dtype=int8 fused=all
wide bf16 fused=all gpus=2
""".strip().splitlines()

# Command lines of an entry run one after the other in a folder of their own: `train` with
# checkpoints and a log, then commands that read these.
_TRAIN = f"""train --model=../models/{{}} --from-scratch --device=cpu --batch-size={B} --seq-len={T}
    --train-file=../data/train*.bin --eval-file=../data/eval*.bin --steps=4 --eval-every-n-steps=2
    --ckpt-interval=2 --learning-rate=1e-2 --log-gpu-util=0 --log-file=log.json
    --out-dir=out --checkpoint-dir=ckpt --gpus={{}}""".replace("\n    ", " ")
_BASE = _TRAIN.replace("models/{}", "bases/{}").replace("--from-scratch ", "")
_BASE = _BASE.replace("--gpus={}", "--gpus=1")
TOKENIZE = "tokenize ../text.jsonl --tokenizer=bytes --eval-fraction=0.1 --shard-tokens=12000"
WORKPLACE = [
    *(
        f"tokenize {name}.jsonl --tokenizer=bytes --eval-fraction=0.1 --out={out} {more}".strip()
        for name, out, more in (
            ("text", "data", "--shard-tokens=12000"),
            ("short", "short", ""),
            ("chat", "chat", "--chat-template=chatml.jinja"),
        )
    ),
    "train-tokenizer text.jsonl --vocab-size=300 --out=tokenizer --chat-template=chatml",
]
"""Commands that write what other runs read."""
CHATML = """\
{% for m in messages %}
{{ '<' ~ m.role ~ '>' ~ m.content ~ '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"""
COMMANDS: dict[str, list[str]] = {
    f"train {model} {gpus} {words}".strip(): [
        f"{_TRAIN.format(model, gpus)} {words}",
        f"{_TRAIN.format(model, gpus)} {words} --continue --steps=6",
        "export --checkpoint-dir=ckpt --out-dir=exported --model-dtype=fp32",
        "sample out --prompt=the --max-new-tokens=12 --device=cpu --num-samples=2",
    ]
    for model, gpus, words in (
        ("qwen2", 1, ""),
        ("qwen2", 2, "--zero-level=3 --recompute-block --offload-residual"),
        ("qwen3", 1, "--matmul-dtype=e4m3 --fp8-recipe=delayed --debug-log-abs-max"),
        ("llama", 1, "--opt-m-dtype=e4m3 --lr-schedule=linear --final-lr-fraction=0.1 --warmup=1"),
        ("mistral", 3, "--matmul-dtype=e4m3 --all-to-all-reduce --memcpy-send-recv"),
        ("gpt2", 1, "--model-dtype=fp32 --offload-opt-m --ckpt-keep-n=1 --cooldown=1"),
    )
} | {
    f"help {name}".strip(): [f"{name} --help"]
    for name in (
        " train plan verify tokenize train-tokenizer show check demo sample eval export merge plot "
        "watch top bench rig"
    ).split(" ")
} | {
    "tokenize": [f"{TOKENIZE} --out=tokens"],
    "tokenize with BPE": [
        "tokenize ../text.jsonl --tokenizer=../tokenizer --out=tokens --eval-fraction=0.05",
        "tokenize ../short.jsonl --tokenizer=../tokenizer --out=bare --special-tokens=none",
        "tokenize ../piqa.jsonl --tokenizer=bytes --out=fields --template={goal}:{sol1}",
        "show tokens --limit=2",
        "check tokens bare",
    ],
    "tokenize conversations": [
        "tokenize ../chat.jsonl --tokenizer=../tokenizer --out=chat --seq-len=32",
        "tokenize ../chat.jsonl --tokenizer=../tokenizer --out=all --train-on=all",
        "tokenize ../chat.jsonl --tokenizer=../tokenizer --out=last --train-on=last",
        "show chat --document=2 --ids",
        "show ../chat --limit=1 --seq-len=16",
    ],
    "train-tokenizer": ["train-tokenizer ../text.jsonl --vocab-size=280 --out=bpe"],
    "check": [
        f"{_TRAIN.format('qwen2', 1)} --steps=2",
        "check ckpt out ../data",
        "check ../text.jsonl",
    ],
    "eval": [
        f"eval ../bases/{model} --task=piqa=../piqa.jsonl --task=text=../short.jsonl --limit=8 "
        f"--device=cpu --out={model}.json"
        for model in ("qwen2", "gemma3", "phi3", "olmo2", "gpt2", "mistral-window")
    ],
    "sample": [
        f"sample ../bases/{model} --prompt=the --max-new-tokens=24 --device=cpu {how}".strip()
        for model, how in (
            ("qwen2-window", ""),
            ("qwen3", "--temperature=0"),
            ("llama", "--top-k=5 --num-samples=3"),
            ("mistral-window", "--top-p=0.5 --seed=1"),
            ("gemma3", "--model-dtype=fp32"),
            ("phi3", "--temperature=0 --num-samples=2"),
            ("olmo2", ""),
            ("gpt2", ""),
            ("qwen2", "--chat --chat-template=../chatml.jinja --system=no"),
        )
    ],
    **{
        f"adapters {name}": [
            f"{_BASE.format(model)} {words}",
            f"{_BASE.format(model)} {words} --continue --steps=6",
            "export --checkpoint-dir=ckpt --out-dir=exported",
            f"merge ../bases/{model} out --out=merged",
            f"merge ../bases/{model} out --out=plain --base-dtype=bf16 --model-dtype=fp32",
            f"sample ../bases/{model} --adapter=out --prompt=a --max-new-tokens=8 --device=cpu",
            f"eval ../bases/{model} --adapter=out --task=piqa=../piqa.jsonl --device=cpu",
            "check ckpt out merged",
        ]
        for name, model, words in (
            ("plain", "qwen2", "--lora-rank=4 --lora-targets=q,v --lora-dropout=0.1"),
            ("nf4", "llama", "--lora-rank=4 --base-dtype=nf4"),
            ("int8", "phi3", "--lora-rank=4 --base-dtype=int8 --matmul-dtype=int8"),
            ("e4m3", "qwen3", "--lora-rank=4 --base-dtype=e4m3 --matmul-dtype=e4m3"),
            ("rs", "olmo2", "--lora-rank=4 --lora-scaling=rs"),
            ("saved", "qwen2-untied", "--lora-rank=4 --train=norms,embeddings,head"),
        )
    },
    **{
        f"guard {guard}": [
            f"{_TRAIN.format('qwen2', 1)} --guard={guard} --steps=40 --warmup=40 --ckpt-interval=5 "
            "--grad-accumulation=1 "
            "--learning-rate=8 --eval-every-n-steps=0 --force"
        ]
        for guard in ("off", "warn", "skip", "rollback")
    },
    "keep best": [
        f"{_TRAIN.format('qwen2', 1)} --keep-best=loss --ckpt-keep-n=1 --steps=6 "
        "--learning-rate=0.5"
    ],
    "evaluations in the run": [
        f"{_TRAIN.format('qwen2', 1)} --eval-task=piqa=../piqa.jsonl --task-every=2 "
        "--seq-len=64 --sample-prompt=the --keep-best=piqa/acc"
    ],
    "several validations": [
        f"{_TRAIN.format('qwen2', 1)} --eval-file=short=../short/eval*.bin "
        "--eval-file=long=../data/eval*.bin --keep-best=short/loss --eval-num-steps=2"
    ],
    "epochs": [
        f"{_TRAIN.format('qwen2', 1).replace('--steps=4', '--epochs=1').replace('data', 'short')} "
        "--num-layers=1 --batch-size=8 --grad-accumulation=8 --ckpt-background --eval-num-steps=2"
    ],
    "two processes": [
        f"mpirun {_TRAIN.format('qwen2', 1)} --zero-level=2",
        f"mpirun {_TRAIN.format('qwen2', 1)} --zero-level=2 --continue --steps=6",
        f"{_TRAIN.format('qwen2', 2)} --continue --steps=8",
    ],
    "two processes over the world": [
        f"mpirun {_TRAIN.format('llama', 1)} --zero-level=3 --shard-over=world "
        "--matmul-dtype=e4m3 --all-to-all-reduce"
    ],
    "two processes with adapters": [
        f"mpirun {_BASE.format('qwen2').replace('--gpus=1', '--gpus=2')} --lora-rank=4 "
        "--base-dtype=nf4"
    ],
    "plot": [
        _TRAIN.format("qwen2", 1),
        "plot log.json --out=loss.svg",
        "plot log.json --html --x=tokens",
    ],
    "bench": [
        "bench --model=../models/qwen2 --from-scratch --device=cpu --gpus=1 --batch-size=2 "
        "--seq-len=32 --grad-accumulation=2 --timed-steps=1 --repeats=2 --out=timed/bench",
    ],
    "configuration files": [
        f"{_TRAIN.format('qwen2', 1)} --save-config=run.yaml --dry-run",
        "train --config=run.yaml --steps=2",
    ],
    **{
        f"verify {name}": [
            f"verify {_TRAIN.format(model, 1)[6:]} --synthetic --verify-steps=2 --json {words}"
        ]
        for name, model, words in (
            ("fp8", "llama", "--matmul-dtype=e4m3 --head-dtype=e4m3 --recompute-ffn"),
            ("sharded", "gemma3", "--gpus=2 --zero-level=3 --offload-opt-m --recompute-att"),
        )
    },
    "refusals": [
        "train --model=../models/qwen2 --from-scratch --matmul-dtype=fp16",
        "train --model=nowhere --device=cpu",
        "plan --model=Qwen2.5-7B --from-scratch --card=3090 --matmul-dtype=e4m3",
        "plan --model=Qwen2.5-7B --from-scratch --card=4090 --device=cuda",
        "sample nowhere",
    ],
    "plan to read": [
        "plan --model=Qwen2.5-1.5B --from-scratch --card=h100 --device=cuda --placement",
        "plan --model=Qwen2.5-0.5B --from-scratch --card=4090 --device=cuda --fit",
    ],
    "dry run": [f"{_TRAIN.format('qwen2', 1)} --dry-run --memory-limit=1GiB"],
    "verify": [
        f"verify {_TRAIN.format('qwen2', 1)[6:]} --synthetic --verify-steps=2 --json "
        "--recompute-block --offload-residual --offload-master"
    ],
}  # fmt: skip

_FP8 = "--matmul-dtype=e4m3"
_SMALL = "--recompute-block --offload-residual"
_HOST = "--offload-master --offload-opt-m --offload-opt-v"
PLANS = f"""
Qwen2.5-0.5B --gpus=1
Qwen2.5-0.5B --gpus=4
Qwen2.5-0.5B --gpus=8 --zero-level=3
Qwen2.5-0.5B --gpus=1 {_FP8} --batch-size=16 --lmhead-chunks=8 --attn-bwd-chunks=4
Qwen2.5-0.5B --gpus=1 --attention=native --model-dtype=fp32
Qwen2.5-1.5B --gpus=1 {_FP8} --fp8-recipe=delayed --head-dtype=e4m3 --recompute-swiglu
Qwen2.5-1.5B --gpus=4 --recompute-ffn --recompute-att --opt-m-dtype=e4m3 --opt-v-dtype=e4m3
Qwen2.5-1.5B --gpus=8 --zero-level=2 --all-to-all-reduce --memcpy-send-recv --master-dtype=fp32
Qwen2.5-7B --gpus=1 {_SMALL} {_HOST} --lmhead-chunks=8
Qwen2.5-7B --gpus=1 {_SMALL} {_HOST} {_FP8} --shard-weights --persistent-quants --offload-quants
Qwen2.5-7B --gpus=4 --zero-level=3 {_SMALL} --memcpy-all-gather --mirror-weights
Qwen2.5-7B --gpus=4 --zero-level=2 --offload-gradients {_HOST} --use-zero-copy
Qwen2.5-7B --gpus=8 {_FP8} --zero-level=3 --persistent-quants --no-keep-transposed {_SMALL}
Qwen2.5-14B --gpus=1 {_SMALL} {_HOST} --shard-weights --shard-gradients --offload-gradients
Qwen2.5-14B --gpus=4 --zero-level=3 {_SMALL} {_HOST} --write-combined {_FP8}
Qwen2.5-14B --gpus=8 --zero-level=3 --recompute-block --recompute-layers=0-23
Qwen2.5-32B --gpus=1 {_FP8}
Qwen2.5-32B --gpus=4 --zero-level=3 {_SMALL} {_HOST} {_FP8} --fp8-recipe=delayed
Qwen2.5-32B --gpus=8 --zero-level=3 {_SMALL} --offload-opt-m --offload-gradients --grad-clip=0
Qwen3-4B --gpus=2 --recompute-norm --recompute-qkv --shard-weights {_FP8} --gradient-dtype=e5m2
Qwen3-8B --gpus=8 --zero-level=3 --grad-accum-dtype=fp32 --grad-accumulation=1 --p2p=off
llama-3-8b --gpus=4 --zero-level=2 {_SMALL} {_FP8}
llama-2-7b --gpus=1 {_SMALL} {_HOST} --use-zero-copy
gpt2-1558m --gpus=1 {_FP8} --recompute-ffn
gpt2-124m --gpus=8 --batch-size=32 --z-loss=1e-4
Qwen2.5-0.5B --gpus=1 --fit
""".strip().splitlines()

CARDS = ("3090", "4090", "5090", "h100", "5060 ti")
"""Cards of the golden plans: each of these lines is planned for every one, with 4 layers."""
GOLDEN = f"""
Qwen2.5-0.5B
Qwen2.5-0.5B --batch-size=16 --lmhead-chunks=8 --attn-bwd-chunks=4
Qwen2.5-0.5B --model-dtype=fp32 --attention=native
Qwen2.5-0.5B {_FP8}
Qwen2.5-0.5B {_FP8} --batch-size=32 --lmhead-chunks=8
Qwen2.5-0.5B {_FP8} --head-dtype=e4m3 --gradient-dtype=e5m2
Qwen2.5-0.5B {_FP8} --fp8-fast-accumulation=none
Qwen2.5-1.5B --batch-size=8 --recompute-swiglu
Qwen2.5-1.5B --document-mask --seq-len=4096 --batch-size=1
Qwen2.5-1.5B {_FP8} --fp8-recipe=delayed --head-dtype=e4m3 --lmhead-chunks=4
Qwen2.5-1.5B {_FP8} --fp8-recipe=delayed --mlp-dtype=e4m3 --batch-size=8
Qwen2.5-1.5B --gpus=2
Qwen2.5-1.5B --gpus=4 --zero-level=2 --all-to-all-reduce --memcpy-send-recv
Qwen2.5-1.5B {_FP8} --gpus=4 --zero-level=3 --persistent-quants
Qwen2.5-3B --matmul-dtype=int8
Qwen2.5-7B {_SMALL} {_HOST} --lmhead-chunks=8
Qwen2.5-7B {_SMALL} {_HOST} {_FP8} --shard-weights --lmhead-chunks=8
Qwen2.5-7B --lora-rank=16 --base-dtype=nf4 --lmhead-chunks=8
Qwen2.5-7B --lora-rank=16 --base-dtype=nf4 {_FP8} --recompute-block --lmhead-chunks=8
Qwen2.5-7B --lora-rank=32 --base-dtype=e4m3 {_FP8} --fp8-recipe=delayed --lmhead-chunks=8
Qwen2.5-7B --lora-rank=16 --base-dtype=int8 --matmul-dtype=int8 --lmhead-chunks=8
Qwen2.5-7B --lora-rank=8 --lora-targets=q,v --lora-dropout=0.1 --lmhead-chunks=8
Qwen2.5-14B --lora-rank=16 --shard-weights --offload-master --recompute-block --lmhead-chunks=8
Qwen2.5-14B --gpus=8 --zero-level=3 {_SMALL} {_HOST} --lmhead-chunks=8
Qwen2.5-14B --gpus=4 --zero-level=3 --memcpy-all-gather --mirror-weights --lmhead-chunks=8
Qwen3-0.6B --grad-accum-dtype=fp32 --master-dtype=fp32
Qwen3-4B {_FP8} --recompute-norm --recompute-qkv --lmhead-chunks=8
Qwen3-8B --gpus=8 --machines=2 --network=25GB/s --zero-level=3 --lmhead-chunks=8
Qwen3-8B --gpus=4 --machines=4 --network=50GB/s --shard-over=world --zero-level=2 --lmhead-chunks=8
llama-3-8b {_FP8} --recompute-ffn --lmhead-chunks=8
llama-3-8b --gpus=4 --zero-level=2 --offload-gradients {_HOST} --use-zero-copy --lmhead-chunks=8
llama-2-7b --opt-m-dtype=e4m3 --opt-v-dtype=e4m3
llama-3-3b --seq-len=4096 --batch-size=1 --lmhead-chunks=8
gemma-3-1b --batch-size=2 --lmhead-chunks=8
gemma-3-1b {_FP8} --fp8-recipe=delayed --lmhead-chunks=8
Phi-3-mini {_FP8} --recompute-att
Phi-3-mini --lora-rank=16 --base-dtype=nf4
OLMo-2-1B --recompute-block
gpt2-1558m --recompute-ffn --z-loss=1e-4
gpt2-124m {_FP8} --batch-size=32
""".strip().splitlines()

CARD = "h100"
"""The card for which the kinds of launches of GPU_RUNS are planned."""
GPU_RUNS = """
qwen2 bf16
qwen2 bf16 recompute_block
qwen2 bf16 batch_size=8 lmhead_chunks=2 z_loss=1e-4
qwen2 fp8
qwen2 fp8 fp8-head
qwen2 delayed fp8-head
qwen2 delayed e5m2 recompute_swiglu
qwen2 codes
qwen2 lora
qwen2 lora base_dtype=nf4 lora_dropout=0.1
llama bf16
llama fp8 fp8-head shard_gradients offload_gradients
llama delayed recompute_ffn
llama fp8 lora base_dtype=e4m3
llama delayed lora base_dtype=nf4 recompute_block
qwen3 bf16 document_mask
qwen3 fp8 recompute_att
qwen3 fp8 gradient_dtype=e5m2 fp8_fast_accumulation=all
gemma3 bf16
gemma3 codes fp8-head
""".strip().splitlines()
"""A model of GPU_MODELS, and words as those of RUNS."""
