"""Fields of requests to `llmq serve`: types and bounds of supported fields, names of other
fields."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from llmq.model.generator import Request

MOST_TEXTS = 128  # most texts of one request: number of prompts times n
MOST_STOPS, LONGEST_STOP = 16, 1000  # most stop strings of a request; most characters of a string


class Refused(Exception):
    """Raised for a request whose answer has an HTTP status other than 200."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class Field(NamedTuple):
    """A field of a request's body. types: allowed types of the JSON value. least, most: bounds of a
    number; None: no bounds."""

    types: tuple[type, ...]
    default: Any = None
    least: float | None = None
    most: float | None = None

    def read(self, name: str, body: Mapping[str, Any]) -> Any:
        """Return the field's value; null and a missing field give the default. Raises Refused (400)
        for a value of another type or outside the bounds."""
        value = body.get(name)
        if value is None:
            return self.default
        if type(value) not in self.types:
            kinds = " or ".join(kind.__name__ for kind in self.types)
            raise Refused(400, f"{name}: must be {kinds}, is {short(value)}")
        number = type(value) in (int, float)
        if number and not (self.least is None or self.least <= value <= self.most):
            raise Refused(400, f"{name}: must be from {self.least} to {self.most}, is {value}")
        return value


def short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


NUMBER = (int, float)
SHARED = {
    "temperature": Field(NUMBER, 1.0, 0.0, 100.0),
    "top_p": Field(NUMBER, 1.0, 0.0, 1.0),
    "top_k": Field((int,), 0, 0, 1 << 30),
    "min_p": Field(NUMBER, 0.0, 0.0, 1.0),
    "repetition_penalty": Field(NUMBER, 1.0, 0.01, 100.0),
    "seed": Field((int,), None, -(1 << 63), (1 << 63) - 1),
    "n": Field((int,), 1, 1, MOST_TEXTS),
    "stream": Field((bool,), False),
    "stop": Field((str, list), []),
    "max_tokens": Field((int,), None, 1, 1 << 30),
}
CHAT = SHARED | {
    "messages": Field((list,)),
    "tools": Field((list,)),
    "max_completion_tokens": Field((int,), None, 1, 1 << 30),
    "logprobs": Field((bool,), False),
    "stream_options": Field((dict,), {}),
}
TEXT = SHARED | {
    "prompt": Field((str, list)),
    "logprobs": Field((int,), None, 0, 0),
    "stream_options": Field((dict,), {}),
}
UNUSED = {"model", "user", "metadata", "store", "parallel_tool_calls", "service_tier"}
"""Accepted fields that have no effect."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "tool_choice": ("auto", "none"),
    "response_format": ({"type": "text"},),
}
"""Unsupported fields with the values that have no effect and are accepted."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request whose fields were checked. prompts: ids of each prompt. n: texts for each prompt.
    stops: strings that end a text. counts: True if a stream ends with the numbers of tokens."""

    prompts: list[list[int]]
    requests: list[Request]
    n: int
    stops: list[str]
    stream: bool
    logprobs: bool
    counts: bool
