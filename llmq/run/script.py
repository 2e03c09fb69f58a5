"""llmq.Trainer, the Trainer for users' programs, which can also make the run of `llmq train`, as a
whole or step by step."""

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llmq.base.callback import Callback, StepDone
from llmq.base.errors import LlmqError
from llmq.base.files import check_writable
from llmq.model.losses import register
from llmq.options.option_file import command_line
from llmq.report.sinks import check_libraries
from llmq.run import trainer
from llmq.run.resume import Stage
from llmq.run.run_paths import locked_places, outputs_of_others
from llmq.run.sampling import Sampling, known_tokenizer, prompt_ids
from llmq.run.training import begun
from llmq.runtime.host_usage import available_host_memory
from llmq.text.tokenizer import continuation


class Trainer(trainer.Trainer):
    """One training run.

        with llmq.Trainer(model="tiny", from_scratch=True, train_file="data/train*.bin") as trainer:
            for step in trainer:
                print(step.step, step.result.loss)

    Keyword arguments are the options of `llmq train`, with underscores; loss may also be a subclass
    of `llmq.ArrayLoss`. Unsuitable options or files and too little memory raise LlmqError before
    any allocation. Each GPU (gpus=...) has a thread, driven by the calling thread; an error stops
    all threads.

    `train` and iteration make the run of `llmq train`, with validations, checkpoints, log, guard
    and export. Console lines or the live view appear as in `llmq train`, also in a notebook. `step`
    makes one optimizer step and nothing else, for a user's own loop. Attributes: see
    `llmq.run.trainer.Trainer`.
    """

    def __init__(self, *, callbacks: Sequence[Callback] = (), **options: Any):
        self._start, self._memory = time.monotonic(), available_host_memory()
        self._steps: Iterator[StepDone] | None = None
        if isinstance(options.get("loss"), type):
            options["loss"] = register(options["loss"])
        super().__init__(callbacks=callbacks, **options)

    def train(self) -> None:
        """Make the run, or finish a run that iteration began. Afterwards the model is in --out-dir.

        Raises LlmqError if --out-dir, --checkpoint-dir or --log-file cannot be written, or hold
        files of another run. A signal saves a checkpoint and raises
        `llmq.base.signals.Interrupted`; the end of --max-hours saves a checkpoint and raises
        OutOfTime.
        """
        self._steps = self._steps or self._run(ahead=True)
        for _ in self._steps:
            pass

    def sample(self, prompt: str = "", **how: Any) -> str:
        """Return the prompt and its continuation by the current weights, together at most --seq-len
        tokens. In fp32 `llmq sample` makes the same text from an export of the model. how: fields
        of `sampling.Sampling`. Raises LlmqError for too long a prompt, or an unknown tokenizer."""
        ((made,),) = self.generate([prompt], **asdict(Sampling(**how)))
        tokenizer, model = known_tokenizer(self.tokenizer), self._generating_model
        return prompt + continuation(
            tokenizer, prompt_ids(tokenizer, model, prompt) if prompt else [], made.shown
        )

    def __iter__(self) -> Iterator[StepDone]:
        """Yield each step of the run when its result is known, before a later step changes the
        weights.

        After a `break` the next `for` goes on with the run. After the last step the run ends as in
        `train`, and may raise the errors of `train`.
        """
        self._steps = self._steps or self._run(ahead=False)
        return self._steps

    def _run(self, *, ahead: bool) -> Iterator[StepDone]:
        """Yield the steps of the run. ahead: see `Loop`."""
        config, checkpoint = self.config, self.loaded
        try:
            with ExitStack() as stack:
                check_libraries(config)
                check_writable("--out-dir", config.out_dir)
                check_writable("--checkpoint-dir", config.checkpoint_dir)
                stack.enter_context(locked_places(config))
                strangers = outputs_of_others(config, self.run, self.model_dir, checkpoint)
                stage, argv = Stage(config, 0, None), command_line(config)
                loop = stack.enter_context(
                    begun(
                        self, argv, stage, checkpoint, strangers, self.callbacks, self._start,
                        self._memory, loads=False,
                    )
                )  # fmt: skip
                loop.ahead, steps = ahead, loop.steps()
                while True:
                    with loop.requests.noted():  # the caller's code gets signals
                        step = next(steps, None)
                    if step is None:
                        break
                    yield step
        except GeneratorExit:  # `close` ends this generator, and itself calls on_end
            raise
        except BaseException as error:
            self.tell_end(error)
            raise
        self.tell_end()

    def load(self, path: str | Path, *, new_data: bool = False) -> list[str]:
        """Call `llmq.run.trainer.Trainer.load`; raise LlmqError after the first step."""
        if self._steps is not None:
            raise LlmqError("load(): the run has begun: load before train() and iteration")
        return super().load(path, new_data=new_data)

    def close(self, error: BaseException | None = None) -> None:
        """End the run, stop the threads, and free the devices and all memory. error: why the run
        ends, or None."""
        try:
            with ExitStack() as stack:
                stack.callback(super().close, error)
                if self._steps is not None:
                    self._steps.close()
        finally:
            gc.collect()  # the run has reference cycles
