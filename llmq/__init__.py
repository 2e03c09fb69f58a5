"""Train Qwen-, Llama- and GPT-2-class language models."""

from typing import Any

__version__ = "0.1.0"
__all__ = ["Callback", "Trainer", "__version__"]


def __getattr__(name: str) -> Any:
    """llmq.Trainer and llmq.Callback, loaded at first use: `llmq --help` does not wait."""
    if name == "Trainer":
        from llmq.run.script import Trainer

        return Trainer
    if name == "Callback":
        from llmq.base.callback import Callback

        return Callback
    raise AttributeError(f"module 'llmq' has no attribute {name!r}")
