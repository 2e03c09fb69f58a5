"""From the options of a run to those of its step and of its collectives."""

from __future__ import annotations

from collections.abc import Collection

from llmq.base.dtypes import E4M3, parse_dtype
from llmq.comm.options import CommOptions
from llmq.config.model import ModelConfig
from llmq.config.options import TrainConfig
from llmq.model.activations import Recompute
from llmq.model.model import ModelOptions
from llmq.model.operands import Fp8Options
from llmq.model.step import StepOptions
from llmq.state.optimizer import AdamWConstants
from llmq.state.params import weight_table
from llmq.state.placement import Placement, place


def fp8_options(config: TrainConfig) -> Fp8Options | None:
    """None where the products run in the model's own format."""
    if config.matmul_dtype != "e4m3":
        return None
    return Fp8Options(
        value=E4M3,
        gradient=parse_dtype(config.gradient_dtype),
        delayed=config.fp8_recipe == "delayed",
        head=config.head_dtype == "e4m3",
        fast=config.fp8_fast_accumulation,
    )


def step_options(
    config: TrainConfig,
    model: ModelConfig,
    backend: str = "native",
    world_size: int = 1,
    frozen: Collection[str] = (),
) -> StepOptions:
    """The part of a run's options that shapes its step.

    backend: "native" or "cudnn" attention. frozen: slabs that are not trained.
    """
    return StepOptions(
        model=ModelOptions(
            micro_batch=config.batch_size,
            seq_len=config.seq_len,
            dtype=parse_dtype(config.model_dtype),
            fp8=fp8_options(config),
            z_loss=config.z_loss,
            recompute=Recompute(
                swiglu=config.recompute_swiglu,
                norm=config.recompute_norm,
                ffn=config.recompute_ffn,
                qkv=config.recompute_qkv,
                att=config.recompute_att,
                block=config.recompute_block,
                layers=config.recompute_layers,
            ),
            lmhead_chunks=config.lmhead_chunks,
            attention_backend=backend,
            attention_chunks=config.attn_bwd_chunks,
            offload_residual=config.offload_residual,
        ),
        placement=place(config, weight_table(model, world_size), world_size, frozen),
        all_to_all=config.all_to_all_reduce,
        adamw=AdamWConstants(
            beta1=config.beta_1,
            beta2=config.beta_2,
            epsilon=config.adam_epsilon,
            weight_decay=config.weight_decay,
        ),
        zero_copy=config.use_zero_copy,
        grad_accum_steps=config.grad_accumulation,
        seed=config.seed,
    )


def comm_options(config: TrainConfig, placement: Placement) -> CommOptions:
    """How the ranks of a run exchange data."""
    return CommOptions(
        gathers_from_host=placement.gathers_from_host,
        memcpy_all_gather=config.memcpy_all_gather,
        memcpy_send_recv=config.memcpy_send_recv,
        all_to_all_reduce=config.all_to_all_reduce,
        p2p=config.p2p,
    )
