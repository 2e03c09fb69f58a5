"""Formats of exports, one file each, of which EXPORTS is the table.

`source.py` opens what is exported, `format.py` says what a format is, and has model directories.
"""

from llmq.checkpoint.exports.format import ExportFormat, HuggingFace
from llmq.checkpoint.exports.fp8 import Fp8
from llmq.checkpoint.exports.gguf import Gguf

EXPORTS: dict[str, type[ExportFormat]] = {made.name: made for made in (HuggingFace, Gguf, Fp8)}
"""By --format."""
