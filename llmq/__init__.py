"""Train Qwen-, Llama- and GPT-2-class language models."""

from typing import Any

__version__ = "0.1.0"
__all__ = ["ArrayLoss", "Callback", "Trainer", "__version__"]


def __getattr__(name: str) -> Any:
    """Return a class of `__all__`, loaded at its first use, so that `llmq --help` does not wait."""
    if name == "Trainer":
        from llmq.run.script import Trainer

        return Trainer
    if name == "Callback":
        from llmq.base.callback import Callback

        return Callback
    if name == "ArrayLoss":
        from llmq.model.losses.arrays import ArrayLoss

        return ArrayLoss
    raise AttributeError(f"module 'llmq' has no attribute {name!r}")
