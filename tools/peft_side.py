"""peft's side of tools/peft_speed.py: its model and step, in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from contextlib import nullcontext
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from llmq.bench.child import end_with

WARM_UP = 3  # steps, of which the first compiles
WARM_UP_AGAIN = 2
GRACE = 10  # seconds for a process to end
LEARNING_RATE, BETAS = 1e-4, (0.9, 0.95)


@dataclass(frozen=True, kw_only=True)
class PeftJob:
    """What peft's process is told. document: config.json of the model. modules: names of those with
    adapters. transposed: whether their weights are (in, out). windowed: whether some layers attend
    to a window. mode: of torch.compile; None: as it is. clip: gradient norm, 0: none."""

    document: dict[str, Any]
    modules: list[str]
    transposed: bool
    windowed: bool
    rank: int
    alpha: float
    adapter_dtype: str
    autocast: bool
    batch_size: int
    seq_len: int
    steps: int
    repeats: int
    mode: str | None
    checkpointing: bool
    clip: float
    device: str
    parent: int = field(default_factory=os.getpid)
    started: float = field(default_factory=time.time)


class PeftSide:
    """A model of transformers with peft's adapters, and its training step; in its own process.

    Three things a user has to know, without which it would be slower:
    - transformers gives SDPA a mask of (T, T) while torch compiles, for which there are no flash
      kernels. So the attention is registered under another name, which gets none and is causal.
    - With gradient checkpointing, peft's hook that makes the embeddings require a gradient breaks
      the compiled graph; where checkpoints are not reentrant it is not needed.
    - Without autocast adapters in fp32 would be multiplied in fp32 (TF32).
    """

    def __init__(self, job: PeftJob):
        import peft
        import torch
        from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        self.torch, self.job = torch, job
        AttentionInterface.register("sdpa_causal", sdpa_attention_forward)
        document = dict(job.document)
        config = AutoConfig.for_model(document.pop("model_type"), **document)
        config.use_cache = False
        attention = "sdpa" if job.windowed else "sdpa_causal"
        with torch.device(job.device):
            model = AutoModelForCausalLM.from_config(
                config, dtype=torch.bfloat16, attn_implementation=attention
            )
        lora = peft.LoraConfig(
            r=job.rank, lora_alpha=job.alpha, target_modules=job.modules, lora_dropout=0.0,
            fan_in_fan_out=job.transposed, task_type="CAUSAL_LM",
        )  # fmt: skip
        self.model = peft.get_peft_model(
            model, lora, autocast_adapter_dtype=job.adapter_dtype == "fp32"
        )
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
        if job.mode is not None:
            mode = None if job.mode == "default" else job.mode
            self.loss_of = torch.compile(self._loss_of, dynamic=False, mode=mode)
        self.first_step_seconds: float | None = None

    def _loss_of(self, tokens: Any) -> Any:
        """The logits are no result, so that a compiled graph need not keep them."""
        return self.model(input_ids=tokens, labels=tokens).loss

    def step(self) -> Any:
        """The loss before the update, on the device."""
        torch, job = self.torch, self.job
        if job.mode is not None:
            torch.compiler.cudagraph_mark_step_begin()  # does nothing in most modes
        with torch.autocast(job.device, torch.bfloat16) if job.autocast else nullcontext():
            loss = self.loss_of(self.tokens)
        loss.backward()
        if job.clip:
            torch.nn.utils.clip_grad_norm_(self.trained, job.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def measure(self) -> dict[str, Any]:
        """Seconds a step of each repeat, and bytes; what the card holds is given back first."""
        cuda, job = self.torch.cuda, self.job
        for _ in range(WARM_UP if self.first_step_seconds is None else WARM_UP_AGAIN):
            self.step()
            self._wait()
            if self.first_step_seconds is None:
                self.first_step_seconds = time.time() - job.started
        if job.device == "cuda":
            cuda.reset_peak_memory_stats()
        seconds = []
        for _ in range(job.repeats):
            self._wait()
            start = time.perf_counter()
            for _ in range(job.steps):
                loss = self.step()
            self._wait()
            seconds.append((time.perf_counter() - start) / job.steps)
        if not bool(self.torch.isfinite(loss)):
            raise RuntimeError(f"the loss became {loss.item()}, so its speed means nothing")
        found = {"step_seconds": seconds, "first_step_seconds": self.first_step_seconds}
        found |= {"versions": self._versions(), "name": "CPU"}
        if job.device == "cuda":
            found |= {"name": cuda.get_device_name(), "allocated": cuda.max_memory_allocated()}
            found |= {"reserved": cuda.max_memory_reserved(), "used": _in_use(cuda)}
            cuda.empty_cache()
            found["waiting"] = _in_use(cuda)
        if job.mode is not None:
            found["graphs"], found["breaks"] = self._graphs()
        return found

    def _wait(self) -> None:
        if self.job.device == "cuda":
            self.torch.cuda.synchronize()

    def _graphs(self) -> tuple[int, int]:
        """How many parts torch.compile has made of it, and how often it had to stop."""
        from torch._dynamo.utils import counters

        return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())

    def _versions(self) -> dict[str, str]:
        import peft
        import transformers

        modules = {"torch": self.torch, "transformers": transformers, "peft": peft}
        return {name: module.__version__ for name, module in modules.items()}


def _in_use(cuda: Any) -> int:
    free, total = cuda.mem_get_info()
    return total - free


def peft_process(connection: Connection, job: PeftJob) -> None:
    """Send what was measured, or {"error": why not}; and again for whatever is received."""
    end_with(job.parent)
    try:
        import torch

        torch.manual_seed(0)
        torch.set_float32_matmul_precision("high")  # allows TF32
        side = PeftSide(job)
        while True:
            connection.send(side.measure())
            connection.recv()
    except EOFError:  # nobody wants more
        return
    except Exception as error:
        traceback.print_exc()
        connection.send({"error": one_line(error)})


def one_line(error: Exception) -> str:
    """What it is and the first sentence of what it says."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}{'…' if len(text) > 200 else ''}"


class Peft:
    """The process of peft. turns: what it has sent; error: why there will be no more."""

    def __init__(self, job: PeftJob, limit: float):
        self.turns: list[dict[str, Any]] = []
        self.error: str | None = None
        self._limit = limit
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        self._process = context.Process(target=peft_process, args=(other, job))
        self._process.start()
        other.close()

    def receive(self) -> None:
        """Wait for a turn."""
        try:
            if not self._connection.poll(self._limit):
                self.error = f"no result after {self._limit:.0f} s (--limit)"
                return
            found = self._connection.recv()
        except (EOFError, OSError):
            self._process.join(GRACE)
            self.error = f"its process ended with status {self._process.exitcode}"
            return
        self.error = found.get("error")
        if self.error is None:
            self.turns.append(found)

    def again(self) -> None:
        """Another turn, unless one has failed."""
        if self.error is None:
            self._connection.send("again")
            self.receive()

    def end(self) -> None:
        """Free what it holds. Where it only waits, it is left to end as torch wants to end."""
        self._connection.close()
        self._process.join(GRACE if self.error is None else 0)
        self._process.kill()
        self._process.join()

    def row(self) -> dict[str, Any]:
        """Of all turns; only a form and an error where there is none."""
        found: dict[str, Any] = {"form": "", "error": self.error}
        if self.turns:
            found |= self.turns[0]
            found["step_seconds"] = [s for turn in self.turns for s in turn["step_seconds"]]
        return found
