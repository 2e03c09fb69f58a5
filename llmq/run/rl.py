"""`llmq rl`: trains the model on its own samples, by the rewards of a function or by a teacher."""

from contextlib import ExitStack
from pathlib import Path

from llmq.arch.model_config import ModelConfig
from llmq.base.errors import ConfigError
from llmq.base.signals import ending_children
from llmq.options.options import TrainConfig
from llmq.run.rewards import Rewards
from llmq.run.rollouts import Rollouts
from llmq.run.training import run_training
from llmq.text.tasks import read_records


def run_rl(
    config: TrainConfig, model: ModelConfig, model_dir: Path | None, argv: list[str]
) -> None:
    """Train on samples of the model. Arguments and errors: see `run_training`."""
    if config.prompts is None:
        raise ConfigError("--prompts: is missing: give a file of records with `prompt`")
    if config.reward is None and config.teacher is None:
        raise ConfigError("--reward: is missing: give FILE.py:FUNCTION, or a --teacher")
    found = [*read_records(config.prompts)]
    records, places = [record for record, _ in found], [where for _, where in found]
    how = {"seconds": config.reward_seconds, "workers": config.reward_workers}
    with ending_children(), ExitStack() as stack:
        reward = config.reward and stack.enter_context(Rewards(config.reward, **how))
        run_training(
            config,
            model,
            model_dir,
            argv,
            samples=lambda trainer: Rollouts(trainer, records, reward, places),
        )
