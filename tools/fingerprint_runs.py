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
}  # fmt: skip

# A model, then words, options with values and options that are switched on; after -> what is other
# in a second trainer, which goes on from the checkpoint of the first.
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
""".strip().splitlines()

# Command lines that run in one folder after the other, in a folder of their own: `train` with
# checkpoints and a log, and what reads them.
_TRAIN = f"""train --model=../models/{{}} --from-scratch --device=cpu --batch-size={B} --seq-len={T}
    --train-file=../data/train*.bin --eval-file=../data/eval*.bin --steps=4 --eval-every-n-steps=2
    --ckpt-interval=2 --learning-rate=1e-2 --log-file=log.json --out-dir=out --checkpoint-dir=ckpt
    --gpus={{}}""".replace("\n", " ")
TOKENIZE = "tokenize ../text.jsonl --tokenizer=bytes --eval-fraction=0.1 --shard-tokens=12000"
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
    for name in " train plan verify tokenize sample export plot watch bench demo".split(" ")
} | {
    "tokenize": [f"{TOKENIZE} --out=tokens"],
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
