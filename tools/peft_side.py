"""The side of peft, or of plain transformers, in tools/peft_speed.py: model and step in a process
of their own."""

from __future__ import annotations

import math
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from typing import Any

from llmq.bench.child import SETTLE, TIMED, end_with

WARM_UP = ("first step", "second step", "third step")  # the first one compiles
GRACE = 10  # seconds for a process to end
LEARNING_RATE, BETAS = 1e-4, (0.9, 0.95)


@dataclass(frozen=True, kw_only=True)
class PeftJob:
    """The job of peft's process. document: content of the model's config.json. rank: rank of
    adapters; 0: all weights are trained, without peft. modules: names of adapted modules.
    transposed: True if the weights of these modules are (in, out). masked: True if SDPA gets the
    mask that transformers makes. compiled: "layers", "model" or "none". mode: mode of
    torch.compile. clip: maximum gradient norm; 0: no clipping."""

    document: dict[str, Any]
    modules: list[str]
    transposed: bool
    masked: bool
    rank: int
    alpha: float
    adapter_dtype: str
    autocast: bool
    batch_size: int
    seq_len: int
    steps: int
    repeats: int
    compiled: str
    mode: str
    checkpointing: bool
    clip: float
    device: str
    parent: int = field(default_factory=os.getpid)


class PeftSide:
    """A transformers model with peft's adapters and its training step, in its own process.

    Three facts that a fast setup depends on:
    - transformers gives SDPA a mask of (T, T) while torch compiles, for which there are no flash
      kernels. So the attention is registered under another name without a mask, and is causal
      (not for layers with windows).
    - With gradient checkpointing, peft's hook that makes the embeddings require a gradient breaks
      the compiled graph; checkpoints that are not reentrant do not need this hook.
    - Without autocast adapters in fp32 would be multiplied in fp32 (TF32).

    started: time.time() when the process was asked for. tell: called with the name of each phase
    at its start.
    """

    def __init__(self, job: PeftJob, started: float, tell: Callable[[str], None]):
        tell("imports")
        import torch
        from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        if job.compiled != "none" and job.device == "cuda":
            import torch._inductor.async_compile  # starts its processes while the model is built

        self.torch, self.job, self.tell, self.started = torch, job, tell, started
        torch.manual_seed(0)
        torch.set_float32_matmul_precision("high")  # allows TF32
        AttentionInterface.register("sdpa_causal", sdpa_attention_forward)
        document = dict(job.document)
        config = AutoConfig.for_model(document.pop("model_type"), **document)
        config.use_cache = False
        attention = "sdpa" if job.masked else "sdpa_causal"
        tell("model")
        with torch.device(job.device):  # draw weights in place: 7B take minutes on the CPU
            model = AutoModelForCausalLM.from_config(
                config, dtype=torch.bfloat16, attn_implementation=attention
            )
        self._wait()
        self.model = self._with_adapters(model) if job.rank else model
        self.model.train()
        if job.checkpointing:
            model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
            model.disable_input_require_grads()
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.trained, lr=LEARNING_RATE, betas=BETAS, weight_decay=0.0, fused=True
        )
        size = (job.batch_size, job.seq_len)
        self.tokens = torch.randint(config.vocab_size, size, device=job.device)
        self.loss_of = self._loss_of
        given = {"dynamic": False, "mode": None if job.mode == "default" else job.mode}
        if job.compiled == "model":
            self.loss_of = torch.compile(self._loss_of, **given)
        elif job.compiled == "layers":
            # Keep the delta rule out of graphs: flash-linear-attention cannot be compiled, and
            # transformers' torch path would put every chunk, and every token of one, into the
            # graph.
            whole = not hasattr(config, "linear_conv_kernel_dim")
            if not whole:
                code = sys.modules[type(model).__module__]
                rule = "torch_chunk_gated_delta_rule"
                setattr(code, rule, torch.compiler.disable(getattr(code, rule)))
            compile_parts(torch, model, given | {"fullgraph": whole})
        self._wait()

    def _with_adapters(self, model: Any) -> Any:
        import peft

        job = self.job
        self.tell("adapters")
        lora = peft.LoraConfig(
            r=job.rank, lora_alpha=job.alpha, target_modules=job.modules, lora_dropout=0.0,
            fan_in_fan_out=job.transposed, task_type="CAUSAL_LM",
        )  # fmt: skip
        with self.torch.device(job.device):
            return peft.get_peft_model(
                model, lora, autocast_adapter_dtype=job.adapter_dtype == "fp32"
            )

    def _loss_of(self, tokens: Any) -> Any:
        """The loss alone, so that a compiled graph need not keep the logits."""
        return self.model(input_ids=tokens, labels=tokens).loss

    def step(self) -> Any:
        """Run a step; return the loss before the update, on the device."""
        torch, job = self.torch, self.job
        if job.compiled != "none" and job.mode != "default":  # other modes may replay CUDA graphs
            torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast(job.device, torch.bfloat16) if job.autocast else nullcontext():
            loss = self.loss_of(self.tokens)
        loss.backward()
        if job.clip:
            torch.nn.utils.clip_grad_norm_(self.trained, job.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def measure(self) -> dict[str, Any]:
        """Return the measurements: seconds per step of each repeat, and bytes of memory."""
        cuda, job = self.torch.cuda, self.job
        first_step_seconds = None
        for name in WARM_UP:
            self.tell(name)
            self.step()
            self._wait()
            if first_step_seconds is None:
                first_step_seconds = time.time() - self.started
        self.tell("settling")
        steps = self._settle() if job.device == "cuda" else job.steps
        self.tell("timed steps")
        if job.device == "cuda":
            cuda.reset_peak_memory_stats()
        seconds = []
        for _ in range(job.repeats):
            self._wait()
            start = time.perf_counter()
            for _ in range(steps):
                loss = self.step()
            self._wait()
            seconds.append((time.perf_counter() - start) / steps)
        if not bool(self.torch.isfinite(loss)):
            raise RuntimeError(f"the loss became {loss.item()}, so its speed means nothing")
        found = {"step_seconds": seconds, "first_step_seconds": first_step_seconds}
        found |= {"versions": self._versions(), "name": "CPU"}
        if job.device == "cuda":
            found |= {"name": cuda.get_device_name(), "allocated": cuda.max_memory_allocated()}
            found |= {"reserved": cuda.max_memory_reserved(), "used": _in_use(cuda)}
        if job.compiled != "none":
            found["graphs"], found["breaks"] = self._graphs()
        return found

    def _settle(self, duration: float = SETTLE, repeat: float = TIMED) -> int:
        """Run steps for `duration` seconds, until the clock settles; return the number of steps
        that last `repeat` seconds."""
        start, steps = time.monotonic(), 0
        while time.monotonic() - start < duration:
            self.step()
            self._wait()
            steps += 1
        return max(self.job.steps, math.ceil(repeat * steps / (time.monotonic() - start)))

    def _wait(self) -> None:
        if self.job.device == "cuda":
            self.torch.cuda.synchronize()

    def _graphs(self) -> tuple[int, int]:
        """Return the number of graphs that torch.compile has made, and of graph breaks."""
        from torch._dynamo.utils import counters

        return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())

    def _versions(self) -> dict[str, str]:
        """Versions as plain strings, because torch's own class would make the reader import torch;
        "none" for an optional library that is missing."""
        names = ["torch", "transformers", *["peft"] * (self.job.rank > 0)]
        if "linear_conv_kernel_dim" in self.job.document:
            names += ["flash-linear-attention", "causal-conv1d"]
        found = {}
        for name in names:
            try:
                found[name] = version(name)
            except PackageNotFoundError:
                found[name] = "none"
        return found


def _in_use(cuda: Any) -> int:
    free, total = cuda.mem_get_info()
    return total - free


def compile_parts(torch: Any, model: Any, given: dict[str, Any]) -> None:
    """Compile each layer, the last norm and the loss separately, with the options `given`.

    All layers share one graph, which is compiled once. For this the first layer's input needs a
    gradient like the other layers' (peft itself asks for that with checkpoints): less than 0.1 % of
    a step's work.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    model.enable_input_require_grads()
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.compile(**given)
    inner = model.base_model
    last_norm = next(name for name in ("norm", "norm_f", "ln_f") if hasattr(inner, name))
    getattr(inner, last_norm).compile(**given)
    model.loss_function = torch.compile(model.loss_function, **given)


def peft_process(connection: Connection, job: PeftJob, started: float) -> None:
    """Send {"phase": name} at the start of each phase; then the measurements, or {"error":
    reason}."""
    end_with(job.parent)
    try:
        side = PeftSide(job, started, lambda name: connection.send({"phase": name}))
        connection.send(side.measure())
    except Exception as error:
        traceback.print_exc()
        connection.send({"error": one_line(error)})


def one_line(error: Exception) -> str:
    """The error's class and the start of its message."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}{'…' if len(text) > 200 else ''}"


class Peft:
    """The process of peft. phases: names, and start times in seconds from the start. found: the
    measurements; error: the reason if there are none."""

    def __init__(self, job: PeftJob):
        self.phases: list[tuple[str, float]] = [("start", 0.0)]
        self.found: dict[str, Any] | None = None
        self.error: str | None = None
        self._start = time.monotonic()
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        self._process = context.Process(target=peft_process, args=(other, job, time.time()))
        self._process.start()
        other.close()

    def receive(self, limit: float, began: Callable[[str], None]) -> None:
        """Wait until the process has measured, failed, or used `limit` seconds; call began(name) at
        each phase."""
        try:
            while self._connection.poll(max(0, self._start + limit - time.monotonic())):
                found = self._connection.recv()
                if "phase" in found:
                    self.phases.append((found["phase"], time.monotonic() - self._start))
                    began(found["phase"])
                    continue
                self.error = found.get("error")
                if self.error is None:
                    self.phases.append(("end", time.monotonic() - self._start))
                    self.found = found
                return
            self.error = f"ended after {limit:.0f} s, in the phase: {self.phases[-1][0]} (--limit)"
        except (EOFError, OSError):
            self._process.join(GRACE)
            status, phase = self._process.exitcode, self.phases[-1][0]
            self.error = f"its process ended with status {status}, in the phase: {phase}"

    def end(self) -> None:
        """End the process and free its memory. A process that has measured gets time to end by
        itself."""
        self._connection.close()
        self._process.join(0 if self.found is None else GRACE)
        self._process.kill()
        self._process.join()

    def row(self) -> dict[str, Any]:
        """The measured row; only a form and an error if there is none."""
        return {"form": "", "error": self.error} | (self.found or {})

    def seconds(self) -> str:
        """Text `start 2.0, imports 9.1, ...` of the finished phases."""
        spans = zip(self.phases, self.phases[1:], strict=False)
        return ", ".join(f"{name} {end - begin:.1f}" for (name, begin), (_, end) in spans)
