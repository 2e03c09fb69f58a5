"""Errors that a user can cause and can fix. Everything else is a bug and keeps its traceback."""


class LlmqError(Exception):
    """What is wrong, where, and what to do about it, in one line. The CLI prints it and exits 2."""


class ConfigError(LlmqError):
    """An option, a preset name or a model's config.json that cannot be used as it is."""


class DataError(LlmqError):
    """A token file, a text input or a tokenizer that is missing, damaged or does not fit."""
