#!/usr/bin/env python3
"""Write the tables of other trainers' options, with llmq's answers, into docs/coming-from.md.

    PYTHONPATH=. tools/coming_from.py

llmq/options/foreign.py holds the tables, one for each trainer; the page shows the tables between
two comments.
"""

from __future__ import annotations

import re
from pathlib import Path

from llmq.options.foreign import FOREIGN, OUT, PEERS, Answers

PAGE = Path(__file__).parents[1] / "docs" / "coming-from.md"
BEGIN, END = "<!-- written by tools/coming_from.py -->\n", "<!-- until here -->\n"


def cell(answers: Answers) -> str:
    """Markdown of llmq's answer to an option, or of its answers by the option's value, the default
    last. A switch that is off needs no answer."""
    if isinstance(answers, str):
        return _marked(answers)
    by_text: dict[str, list[str]] = {}
    for value, text in answers.items():
        if value and (value, text) != ("false", OUT):
            by_text.setdefault(text, []).append(f"`{value}`")
    rows = [f"{', '.join(values)}: {_marked(text)}" for text, values in by_text.items()]
    rows += [f"{'else ' * bool(rows)}{_marked(answers[''])}"] if "" in answers else []
    return "; ".join(rows)


def _marked(text: str) -> str:
    """Text with options and commands in code style, and capitals for names in braces."""
    text = re.sub(r"\{(\w+)\}", lambda word: word[1].upper(), text)
    code = re.match(r"(?:--|llmq )[^,:;]*(?::(?=\S)[^,:;]*)*", text)
    return text if code is None else f"`{code[0].strip('`')}`{text[code.end() :]}"


def tables() -> str:
    """A heading and a table for each trainer."""
    blocks = []
    for peer in PEERS:
        rows = [
            f"| `{name}` | {cell(found.answers)} |"
            for name, found in FOREIGN.items()
            if peer in found.peers.split(", ")
        ]
        blocks.append("\n".join([f"## {peer}\n", "| there | here |", "| --- | --- |", *rows, ""]))
    return "\n".join(blocks)


def main() -> None:
    head, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, tail = rest.partition(END)
    PAGE.write_text(f"{head}{BEGIN}\n{tables()}\n{END}{tail}", encoding="utf-8")


if __name__ == "__main__":
    main()
