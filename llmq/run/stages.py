"""A run whose sequences become longer (or shorter): stages of one length each, as --seq-len says.

Each stage is a run of its own that goes on from the checkpoint of the one before: it has its own
plan, its own graphs, and its own order of the data, from their beginning. A micro-step has the same
tokens in all of them, so that --batch-size is of the longest sequences, and shorter ones are more.
Steps, learning rate and moments are those of one run.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from llmq.arch.model_config import ModelConfig
from llmq.checkpoint.manifest import MANIFEST, read_manifest
from llmq.options.option_types import NEWEST, lengths_of
from llmq.options.options import TrainConfig
from llmq.plan.run_plan import plan_run
from llmq.runtime.machine import choose_machine


class Stage(NamedTuple):
    """The options of a stage, and its steps [first, stop) of the run; stop: None of the last."""

    config: TrainConfig
    first: int
    stop: int | None

    def after(self, step: int) -> Stage:
        """The stage as it goes on from the newest checkpoint, of so many steps: if that is where it
        begins, its data begin too."""
        begins = step == self.first > 0
        config = replace(
            self.config,
            continue_from=self.config.continue_from or NEWEST,
            new_data=begins or self.config.new_data,
        )
        return self._replace(config=config)


def stages_of(config: TrainConfig) -> list[Stage]:
    """The stages of a run, one where there is one length. config: normalized, of any stage."""
    if config.seq_stages is None:
        return [Stage(config, 0, None)]
    stages, first, share = [], 0, 0.0
    for length, part in lengths_of(config.seq_stages):
        share += part
        stop = round(share * config.steps)
        own = replace(config, seq_len=length, batch_size=config.micro_tokens // length)
        if first < stop:
            stages.append(Stage(own, first, stop))
        first = stop
    stages[-1] = stages[-1]._replace(stop=None)
    return stages


def of_longest(config: TrainConfig) -> TrainConfig:
    """The options of a stage as those of its run, which are of the longest sequences."""
    if config.seq_stages is None:
        return config
    longest = max(lengths_of(config.seq_stages))[0]
    return replace(config, seq_len=longest, batch_size=config.micro_tokens // longest)


def left_stages(config: TrainConfig, model: ModelConfig, checkpoint: Path | None) -> list[Stage]:
    """The stages that are not over at a checkpoint. LlmqError where one of them cannot be run, so
    that no run finds that out at its end."""
    if config.seq_stages is None:
        return stages_of(config)
    step = None if checkpoint is None else read_manifest(checkpoint / MANIFEST)["run"]["step"]
    left = [s for s in stages_of(config) if s.stop is None or (step or 0) < s.stop]
    machine = choose_machine(config.device, config.gpus)
    for stage in left:
        plan_run(stage.config.validate_with(model), model, machine)
    return left if step is None else [left[0].after(step), *left[1:]]
