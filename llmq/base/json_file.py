"""Small JSON files that may be missing or damaged, which then say nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmq.base.errors import ConfigError
from llmq.base.files import check_readable


def json_object(path: Path) -> dict[str, Any]:
    """The object in a file; {} where there is none that can be read."""
    try:
        check_readable(path)
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError, ConfigError):
        return {}
    return content if isinstance(content, dict) else {}


def values_of(content: dict[str, Any], **kinds: Callable[[Any], Any]) -> tuple[Any, ...] | None:
    """Of an object's fields, each as the type of its name makes it; None where one is missing or
    is no such value."""
    try:
        return tuple(kind(content[name]) for name, kind in kinds.items())
    except (ValueError, LookupError, TypeError, OverflowError):  # int() of infinity
        return None
