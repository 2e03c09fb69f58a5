"""JSON files: read as they are, or as small ones that may be missing or damaged, and then say
nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmq.base.errors import ConfigError
from llmq.base.files import check_readable


def read_json(path: Path) -> Any:
    """The content of a JSON file in UTF-8. ConfigError where it is a pipe or a device, else what
    reading and parsing raise: OSError, ValueError, RecursionError."""
    check_readable(path)
    return json.loads(path.read_text("utf-8"))


def json_object(path: Path) -> dict[str, Any]:
    """The object in a file; {} where there is none that can be read."""
    try:
        content = read_json(path)
    except (OSError, ValueError, RecursionError, ConfigError):
        return {}
    return content if isinstance(content, dict) else {}


def values_of(content: dict[str, Any], **kinds: Callable[[Any], Any]) -> tuple[Any, ...] | None:
    """Take an object's fields, each as the type of its name makes it; None where one is missing or
    is no such value."""
    try:
        return tuple(kind(content[name]) for name, kind in kinds.items())
    except (ValueError, LookupError, TypeError, OverflowError):  # int() of infinity
        return None
