"""Text that may go to a terminal."""


def printable(text: str) -> str:
    """The text with U+FFFD for what would steer a terminal: control characters but \\n and \\t."""
    return "".join(
        c if c in "\n\t" or not (ord(c) < 32 or 127 <= ord(c) < 160) else "\ufffd" for c in text
    )
