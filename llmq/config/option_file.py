"""Files of options. Imported when one is given or to be written: --help does not wait for YAML."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from llmq.base.errors import ConfigError


class _Loader(yaml.SafeLoader):
    """Refuses a key that a mapping has twice, of which YAML would silently take the last."""

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                line = key.start_mark.line + 1
                if key.value in lines:
                    first = lines[key.value]
                    raise yaml.YAMLError(f"line {line}: {key.value} is given in line {first} too")
                lines[key.value] = line
        return node


def _json_object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    for key in keys:
        if keys.count(key) > 1:
            raise ValueError(f"{key} is given twice")
    return dict(pairs)


def read_option_file(file: Path) -> dict[str, Any]:
    """The one mapping in a file: JSON or TOML by its suffix, else YAML; {} if it is empty.

    Raises ConfigError, also where a mapping has a key twice.
    """
    try:
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".json":
            content = json.loads(text, object_pairs_hook=_json_object)
        elif file.suffix == ".toml":
            content = tomllib.loads(text)
        else:
            content = yaml.load(text, _Loader)
    except OSError as error:
        raise ConfigError(f"--config: cannot read {file}: {error.strerror}") from None
    except (ValueError, yaml.YAMLError) as error:
        message = " ".join(str(error).split())
        raise ConfigError(f"--config: {file} is not valid: {message}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"--config: {file} must hold one mapping of options")
    return content
