"""Small JSON files that may be missing or damaged, which then say nothing."""

from __future__ import annotations

import json
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
