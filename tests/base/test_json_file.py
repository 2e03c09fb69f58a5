"""Reading JSON files: what they hold, and what is raised, or not, where they are none."""

from __future__ import annotations

import os

import pytest

from llmq.base.errors import ConfigError
from llmq.base.files import json_object, read_json


def test_what_a_file_holds_or_what_is_wrong(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('[1, "é"]', encoding="utf-8")
    assert read_json(path) == [1, "é"] and json_object(path) == {}
    path.write_text('{"a": 1}')
    assert read_json(path) == json_object(path) == {"a": 1}
    for content in (b"{", b'{"a": "\xff"}'):
        path.write_bytes(content)
        with pytest.raises(ValueError):
            read_json(path)
        assert json_object(path) == {}
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "b.json")
    os.mkfifo(tmp_path / "pipe")  # opening it would wait for a writer
    with pytest.raises(ConfigError, match="is a pipe or a device"):
        read_json(tmp_path / "pipe")
    assert json_object(tmp_path / "pipe") == {}
