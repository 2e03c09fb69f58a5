"""Train Qwen-, Llama- and GPT-2-class language models."""

from typing import Any

__version__ = "0.1.0"
__all__ = ["Trainer", "__version__"]


def __getattr__(name: str) -> Any:
    """llmq.Trainer, loaded when it is first used: `llmq --help` does not wait for it."""
    if name == "Trainer":
        from llmq.run.trainer import Trainer

        return Trainer
    raise AttributeError(f"module 'llmq' has no attribute {name!r}")
