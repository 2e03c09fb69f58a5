"""Which options of a run have no effect beside the others, one line each."""

from __future__ import annotations

from dataclasses import dataclass

from llmq.config.fields import Fields
from llmq.config.model import ModelConfig

_DEFAULTS = Fields()


@dataclass(frozen=True, slots=True, kw_only=True)
class Warnings(Fields):
    """Options that can say so. `warnings` is about normalized ones."""

    def warnings(self) -> list[str]:
        """One line for every option that has no effect beside the others."""
        lines = []
        if self.ckpt_major > 0 and self.ckpt_keep_n <= 0:
            lines.append("--ckpt-major has no effect without --ckpt-keep-n: nothing is deleted")
        if self.ckpt_keep_n > 0 >= self.ckpt_interval and not self.save_training_state:
            lines.append(
                f"--ckpt-keep-n {self.ckpt_keep_n} has no effect without --ckpt-interval and "
                "--save-training-state: no checkpoints are written"
            )
        if self.final_lr_fraction != 1 and self.lr_schedule == "wsd":
            lines.append("--final-lr-fraction has no effect with --lr-schedule wsd")
        if self.final_lr_fraction == 1 and self.lr_schedule == "linear":
            lines.append(
                "--lr-schedule linear has no effect: with --final-lr-fraction 1 the learning rate "
                "does not change"
            )
        rounded = {self.model_dtype, self.opt_m_dtype, self.opt_v_dtype} != {"fp32"}
        if self.seed != _DEFAULTS.seed and not self.from_scratch and not rounded:
            lines.append(
                f"--seed {self.seed} has no effect: in fp32 it decides about nothing but the "
                "weights of --from-scratch"
            )
        if 0 <= self.steps < self.warmup + self.cooldown:
            lines.append(
                f"--warmup {self.warmup} and --cooldown {self.cooldown} do not fit into "
                f"--steps {self.steps}"
            )
        lines += self._memory_warnings()
        if self.device != "cpu":
            return lines
        on_cpu = [f"{flag} has no effect with --device cpu" for flag in self._idle_on_cpu()]
        return on_cpu + self._but_on_cpu(lines)

    def _idle_on_cpu(self) -> list[str]:
        """Options that are about GPUs, with their values."""
        idle = {
            "--no-tune": not self.tune,
            "--no-use-cuda-graphs": not self.use_cuda_graphs,
            f"--attention {self.attention}": self.attention != "auto",
            f"--fp8-fast-accumulation {self.fp8_fast_accumulation}": (
                self.fp8_fast_accumulation != _DEFAULTS.fp8_fast_accumulation
            ),
            "--write-combined": self.write_combined,
            "--memcpy-all-gather": self.memcpy_all_gather,
            "--memcpy-send-recv": self.memcpy_send_recv,
            "--mirror-weights": self.mirror_weights,
            f"--p2p {self.p2p}": self.p2p != "auto",
            f"--log-gpu-util {self.log_gpu_util}": self.log_gpu_util
            not in (0, _DEFAULTS.log_gpu_util),
        }
        return [flag for flag, given in idle.items() if given]

    def _but_on_cpu(self, lines: list[str]) -> list[str]:
        """The lines about other options than those that have no effect on the CPU at all."""
        told = {flag.split()[0] for flag in self._idle_on_cpu()}
        return [line for line in lines if line.split()[0] not in told]

    def _memory_warnings(self) -> list[str]:
        optimizer = self.offload_master or self.offload_opt_m or self.offload_opt_v
        offload = optimizer or self.offload_gradients or self.offload_quants
        separate = (
            self.matmul_dtype == "e4m3"
            or self.shard_weights
            or self.master_dtype != self.model_dtype
        )
        recomputes = any(
            getattr(self, name)
            for name in self.__dataclass_fields__
            if name.startswith("recompute_") and name != "recompute_layers"
        )
        idle = (
            ("--zero-level 0", "is the same as 1", self.zero_level == 0),
            (
                "--offload-master",
                "has no effect: the optimizer updates the weights that the products read; it has "
                "one with --shard-weights or --matmul-dtype e4m3",
                self.offload_master and not separate,
            ),
            (
                "--use-zero-copy",
                "has no effect without --offload-master, -opt-m, -opt-v or -gradients",
                self.use_zero_copy and not (optimizer or self.offload_gradients),
            ),
            (
                "--write-combined",
                "has no effect without an --offload option beside --offload-residual",
                self.write_combined and not offload,
            ),
            (
                "--memcpy-send-recv",
                "has no effect without --all-to-all-reduce",
                self.memcpy_send_recv and not self.all_to_all_reduce,
            ),
            (
                "--mirror-weights",
                f"has no effect {self.why_no_mirrors()}",
                self.mirror_weights and self.why_no_mirrors() is not None,
            ),
            (
                "--recompute-layers",
                "has no effect without a --recompute option",
                self.recompute_layers != "all" and not recomputes,
            ),
        )
        lines = [f"{flag} {problem}" for flag, problem, applies in idle if applies]
        return lines + self._fp8_warnings()

    def _fp8_warnings(self) -> list[str]:
        if self.matmul_dtype == "e4m3":
            return []
        idle = {
            "--debug-log-abs-max": self.debug_log_abs_max > 0,
            "--no-keep-transposed": not self.keep_transposed,
            "--fp8-fast-accumulation": self.fp8_fast_accumulation
            != _DEFAULTS.fp8_fast_accumulation,
        }
        reason = "has no effect without --matmul-dtype e4m3"
        return [f"{flag} {reason}" for flag, given in idle.items() if given]

    @property
    def work_shards_offloaded(self) -> bool:
        """Whether the shards of weights that ranks gather are in host memory."""
        if self.matmul_dtype == "e4m3":
            return self.offload_quants
        return self.offload_master and self.master_dtype == self.model_dtype

    @property
    def has_mirrors(self) -> bool:
        """Whether ranks read each other's shards of weights in mirrors, if there are several."""
        return self.mirror_weights and self.why_no_mirrors() is None

    def why_no_mirrors(self) -> str | None:
        """Why --mirror-weights does nothing; None where it does something."""
        if not self.memcpy_all_gather:
            return "without --memcpy-all-gather"
        if not self.shard_weights:
            return "without --shard-weights"
        if self.p2p == "on":
            return "with --p2p on"
        if self.matmul_dtype == "e4m3" and not self.persistent_quants:
            return "without --persistent-quants"
        if self.work_shards_offloaded:
            return "with --offload-" + ("quants" if self.matmul_dtype == "e4m3" else "master")
        return None

    def rank_warnings(self, world_size: int, *, on_cpu: bool = False) -> list[str]:
        """One line for every option that has no effect with this number of ranks, or (on_cpu) on
        the CPU, which --device auto may have chosen."""
        lines = []
        if world_size == 1:
            idle = {
                "--memcpy-all-gather": self.memcpy_all_gather,
                "--memcpy-send-recv": self.memcpy_send_recv,
                "--mirror-weights": self.mirror_weights,
                "--all-to-all-reduce": self.all_to_all_reduce,
                "--measure-scaling": self.measure_scaling,
                f"--p2p {self.p2p}": self.p2p != "auto",
            }
            lines = [f"{flag} has no effect with one GPU" for flag, given in idle.items() if given]
            lines += self._one_rank_sharding_warnings()
        streams = self.shard_weights and (world_size > 1 or self._why_weights_stay() is None)
        if self.matmul_dtype == "e4m3" and streams and not self.keep_transposed:
            lines.append("--no-keep-transposed has no effect with --shard-weights: it is implied")
        if on_cpu or self.device == "cpu":
            lines = self._but_on_cpu(lines)
        if on_cpu and self.device != "cpu":
            lines += [f"{flag} has no effect on the CPU" for flag in self._idle_on_cpu()]
        return lines

    def model_warnings(self, model: ModelConfig) -> list[str]:
        """One line for every option that has no effect on this model, else it may have one."""
        if self.recompute_norm and not self.recompute_block and model.arch.post_norm:
            return ["--recompute-norm has no effect: this model keeps no norm's output"]
        return []

    def run_warnings(
        self, world_size: int, steps: int, steps_per_epoch: int, *, on_cpu: bool = False
    ) -> list[str]:
        """rank_warnings, and one line for every option that has no effect on a run so long."""
        lines = self.rank_warnings(world_size, on_cpu=on_cpu)
        if world_size == 1 and self.watchdog != _DEFAULTS.watchdog:
            lines.append(f"--watchdog {self.watchdog} has no effect with one GPU")
        validates = 0 < self.eval_every_n_steps < steps or steps > steps_per_epoch
        if not validates and self.eval_num_steps != _DEFAULTS.eval_num_steps:
            lines.append(
                f"--eval-num-steps {self.eval_num_steps} has no effect: the only validation is the "
                "final one, of all sequences"
            )
        return lines

    def _why_weights_stay(self) -> str | None:
        """Why --shard-weights does nothing with one rank; None where it does something."""
        if self.matmul_dtype == "e4m3":
            resident = self.persistent_quants and not self.offload_quants
            return "with --persistent-quants and without --offload-quants" if resident else None
        if self.master_dtype != self.model_dtype:
            return f"with --master-dtype {self.master_dtype}"
        return None if self.offload_master else "without --offload-master"

    def _one_rank_sharding_warnings(self) -> list[str]:
        """What --zero-level implies counts as one option, which may do something in part."""
        weights = self._why_weights_stay()
        gradients = None if self.offload_gradients else "without --offload-gradients"
        level, idle = self.zero_level, {}
        if self.shard_weights and level < 3:
            idle["--shard-weights"] = weights
        if self.shard_gradients and level < 2:
            idle["--shard-gradients"] = gradients
        if level == 2:
            idle["--zero-level 2"] = gradients
        if level == 3:
            idle["--zero-level 3"] = gradients and weights and f"{gradients} and {weights}"
        return [f"{flag} has no effect with one GPU {why}" for flag, why in idle.items() if why]
