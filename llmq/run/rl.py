"""`llmq rl`: a run whose data are samples of the model itself, by the rewards of a function."""

from pathlib import Path

from llmq.arch.model_config import ModelConfig
from llmq.base.signals import ending_children
from llmq.options.options import TrainConfig
from llmq.run.rewards import Rewards
from llmq.run.rollouts import RolloutOptions, Rollouts
from llmq.run.training import run_training
from llmq.text.tasks import read_records


def run_rl(
    config: TrainConfig,
    model: ModelConfig,
    model_dir: Path | None,
    argv: list[str],
    *,
    prompts: Path,
    reward: str,
    seconds: float,
    workers: int,
    options: RolloutOptions,
) -> None:
    """Train as `run_training` does, which has the errors. prompts: file of records. reward,
    seconds, workers: as of `Rewards`."""
    found = [*read_records(prompts)]
    records, places = [record for record, _ in found], [where for _, where in found]
    with ending_children(), Rewards(reward, seconds=seconds, workers=workers) as rewards:
        run_training(
            config,
            model,
            model_dir,
            argv,
            samples=lambda trainer: Rollouts(trainer, records, rewards, options, places),
        )
