"""`llmq serve`: a model behind the HTTP interface of OpenAI's completions and chat completions.

  POST /v1/chat/completions   messages -> replies, with `stream` as server-sent events
  POST /v1/completions        prompts -> continuations, with `stream` as server-sent events
  GET  /v1/models, /health

One thread uses the device (`Engine`). Each text has a queue of new tokens, which a thread of the
server reads, so that a slow client delays only its own texts. Every field of a request has a bound.
A request with an unsupported field is refused, with the field's name.
"""

from __future__ import annotations

import json
import queue
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from llmq.base.errors import LlmqError
from llmq.model.generator import Generator, NewToken, Request
from llmq.run.sampling import Conversation, Sampler, check_prompt, prompt_ids, seed_of
from llmq.run.serve_fields import (
    CHAT,
    LONGEST_STOP,
    MOST_STOPS,
    MOST_TEXTS,
    NEUTRAL,
    TEXT,
    UNUSED,
    Asked,
    Refused,
    short,
)
from llmq.text.stop_strings import until
from llmq.text.tokenizer import Tokenizer, streamed

MOST_WAITING = 1024  # most texts of all requests together; further requests get status 429


# The thread that uses the device


class Text:
    """A text that the engine continues. tokens: the tokens read from the queue so far. queue:
    tokens that nobody has read yet."""

    def __init__(self, request: Request, engine: Engine):
        self.request, self._engine = request, engine
        self.queue: queue.SimpleQueue[NewToken | Exception] = queue.SimpleQueue()
        self.tokens: list[NewToken] = []
        self.finish: str | None = None

    def ids(self) -> Iterator[int]:
        """Yield the new ids as the engine generates ids, without the id that ends the text. Raises
        LlmqError if the engine fails."""
        while self.finish is None:
            token = self.queue.get()
            if isinstance(token, Exception):
                raise token
            self.tokens.append(token)
            self.finish = token.finish
            if token.finish != "stop":
                yield token.id

    def end(self) -> None:
        """Stop generating the text, after a stop string or when the client has left."""
        if self.finish is None:
            self.finish = "stop"
            self._engine.drop(self)


class Engine:
    """A thread that continues the texts of all requests together, token by token."""

    def __init__(self, generator: Generator):
        self.generator = generator
        self._changed = threading.Condition()
        self._new: list[Text] = []
        self._dropped: list[Text] = []
        self._running: dict[int, Text] = {}
        self._closed = False
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="generate", daemon=True)
        self._thread.start()

    def submit(self, requests: Sequence[Request]) -> list[Text]:
        """Queue requests. Returns the texts of the requests, which begin as soon as there is room.
        Raises Refused (429) if too many texts wait already."""
        texts = [Text(request, self) for request in requests]
        with self._changed:
            if self.error is not None or self._closed:
                raise Refused(503, str(self.error or "the server is about to end"))
            if len(self._new) + len(self._running) + len(texts) > MOST_WAITING:
                raise Refused(429, f"{MOST_WAITING} texts are waiting already: come again later")
            self._new += texts
            self._changed.notify()
        return texts

    def drop(self, text: Text) -> None:
        """Stop generating tokens of a text."""
        with self._changed:
            self._dropped.append(text)
            self._changed.notify()

    def close(self) -> None:
        """End the thread after the present token; unfinished texts end with an error."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._next():
                for token in self.generator.step():
                    text = self._running[token.index]
                    text.queue.put(token)
                    if token.finish is not None:
                        del self._running[token.index]
        except Exception as error:
            self.error = error
        ended = self.error or LlmqError("the server has ended")
        with self._changed:
            self._closed = True
            for text in (*self._running.values(), *self._new):
                text.queue.put(ended)

    def _next(self) -> bool:
        """Wait while there is no text; then add new texts to the generator, and remove dropped
        texts. Returns False once the engine is closed."""
        with self._changed:
            while not (self._closed or self._running or self._new):
                self._changed.wait()
            new, self._new = self._new, []
            dropped, self._dropped = self._dropped, []
            for text in new:
                self._running[self.generator.add(text.request)] = text
            for index, text in list(self._running.items()):
                if text in dropped:
                    self.generator.drop(index)
                    del self._running[index]
            return not self._closed


class Service:
    """Answers requests by means of a model.

    name: name of the model in answers. chat: a conversation without messages; None: the tokenizer
    has no chat template. positions: most tokens of a text, including the prompt.
    """

    def __init__(
        self, name: str, sampler: Sampler, tokenizer: Tokenizer, chat: Conversation | None
    ):
        self.name, self.tokenizer, self.chat = name, tokenizer, chat
        self.config, self.positions = sampler.config, sampler.generator.positions
        self.engine = Engine(sampler.generator)
        self._count = 0

    # -- requests --------------------------------------------------------------------------------

    def asked(self, body: Any, *, chat: bool) -> Asked:
        """Check and convert the body of a request. Raises Refused (400), which names the wrong
        field."""
        if not isinstance(body, dict):
            raise Refused(400, f"the body must be an object, is {short(body)}")
        fields = CHAT if chat else TEXT
        for name, value in body.items():
            neutral = (None, *NEUTRAL.get(name, ()))
            if name not in fields and name not in UNUSED and value not in neutral:
                raise Refused(400, f"{name}: {short(value)} is not supported")
        values = {name: field.read(name, body) for name, field in fields.items()}
        stops = [values["stop"]] if isinstance(values["stop"], str) else values["stop"]
        if len(stops) > MOST_STOPS or not all(
            isinstance(stop, str) and 0 < len(stop) <= LONGEST_STOP for stop in stops
        ):
            raise Refused(
                400, f"stop: at most {MOST_STOPS} strings of 1 to {LONGEST_STOP} characters"
            )
        if chat and self.chat is not None and self.chat.stop.text is not None:
            stops = [*stops, self.chat.stop.text]
        try:
            prompts = self._chat(values) if chat else self._prompts(values["prompt"])
        except LlmqError as error:
            raise Refused(400, str(error)) from None
        if len(prompts) * values["n"] > MOST_TEXTS:
            raise Refused(400, f"n: at most {MOST_TEXTS} texts, prompts times n")
        ends = frozenset(self._ends(chat=chat))
        wanted = values["max_tokens"] or values.get("max_completion_tokens")
        requests = []
        seed = values["seed"]
        if seed is None:
            self._count += 1
            seed = time.time_ns() + self._count
        for place, ids in enumerate(prompts):
            room = self.positions - len(ids)
            if room < 1:
                raise Refused(
                    400,
                    f"a prompt has {len(ids)} tokens, this server takes {self.positions - 1}: "
                    "--max-tokens of llmq serve",
                )
            count = min(wanted or (room if chat else 16), room)
            for sample in range(values["n"]):
                requests.append(
                    Request(
                        ids,
                        count,
                        temperature=float(values["temperature"]),
                        top_k=values["top_k"],
                        top_p=float(values["top_p"]),
                        min_p=float(values["min_p"]),
                        repetition=float(values["repetition_penalty"]),
                        seed=seed_of(seed & (1 << 64) - 1, place, sample),
                        stop=ends,
                    )
                )
        logprobs = values["logprobs"] is not (False if chat else None)
        counts = values["stream_options"].get("include_usage") is True
        return Asked(prompts, requests, values["n"], stops, values["stream"], logprobs, counts)

    def _ends(self, *, chat: bool) -> set[int]:
        ends = {*self.config.eos_token_ids, self.tokenizer.eos_id} - {None}
        return ends | {*self.chat.stop.ids} if chat else ends

    def _chat(self, values: Mapping[str, Any]) -> list[list[int]]:
        if self.chat is None:
            raise Refused(400, f"the tokenizer of '{self.name}' has no chat template")
        messages = values["messages"]
        if not messages or not all(isinstance(message, dict) for message in messages):
            raise Refused(400, "messages: must be objects, at least one")
        return [self.chat.prompt(messages, values["tools"])]

    def _prompts(self, prompt: Any) -> list[list[int]]:
        """Return the ids of each prompt. prompt: a text, a list of ids, or a list of such
        prompts."""
        if prompt is None:
            raise Refused(400, "prompt: is missing")
        if isinstance(prompt, str) or (prompt and type(prompt[0]) is int):
            prompt = [prompt]
        if not 0 < len(prompt) <= MOST_TEXTS:
            raise Refused(400, f"prompt: from 1 to {MOST_TEXTS} of them")
        found = []
        for each in prompt:
            if isinstance(each, str):
                each = prompt_ids(self.tokenizer, self.config, each, flag="prompt")
            ids = isinstance(each, list) and all(type(id_) is int and id_ >= 0 for id_ in each)
            if not (ids and each):
                raise Refused(400, f"prompt: {short(each)} is neither a text nor ids")
            check_prompt(each, self.config, "prompt")
            found.append(each)
        return found

    # -- replies ---------------------------------------------------------------------------------

    def pieces(self, text: Text, stops: Sequence[str]) -> Iterator[str]:
        """Yield the characters of a text as they are generated, up to a stop string. When the
        reader stops reading, the engine stops the text."""
        try:
            yield from until(streamed(self.tokenizer, text.request.prompt, text.ids()), stops)
        finally:
            text.end()

    def whole(self, texts: list[Text], asked: Asked, *, chat: bool) -> dict[str, Any]:
        """Return the body of an answer without `stream`."""
        choices = []
        for index, text in enumerate(texts):
            content = "".join(self.pieces(text, asked.stops))
            choice = self._choice(index, content, text.finish, chat=chat)
            if asked.logprobs:
                choice["logprobs"] = self._logprobs(text.tokens, chat=chat)
            choices.append(choice)
        kind = "chat.completion" if chat else "text_completion"
        return self._head(kind) | {"choices": choices, "usage": usage(texts, asked)}

    def events(self, texts: list[Text], asked: Asked, *, chat: bool) -> Iterator[str]:
        """Yield the server-sent events of an answer with `stream`, choice by choice."""
        head = self._head("chat.completion.chunk" if chat else "text_completion")

        def event(**fields: Any) -> str:
            return f"data: {json.dumps(head | fields)}\n\n"

        try:
            for index, text in enumerate(texts):
                sent = 0
                if chat:
                    delta = {"role": "assistant", "content": ""}
                    yield event(choices=[{"index": index, "delta": delta, "finish_reason": None}])
                for piece in self.pieces(text, asked.stops):
                    choice = self._choice(index, piece, None, chat=chat, part=True)
                    if asked.logprobs:
                        choice["logprobs"] = self._logprobs(text.tokens[sent:], chat=chat)
                        sent = len(text.tokens)
                    yield event(choices=[choice])
                yield event(choices=[self._choice(index, "", text.finish, chat=chat, part=True)])
            if asked.counts:
                yield event(choices=[], usage=usage(texts, asked))
        except LlmqError as error:
            yield f"data: {json.dumps(problem(500, str(error)))}\n\n"
        yield "data: [DONE]\n\n"

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": self.name,
        }

    @staticmethod
    def _choice(
        index: int, content: str, finish: str | None, *, chat: bool, part: bool = False
    ) -> dict[str, Any]:
        said: dict[str, Any] = {"text": content}
        if chat:
            said = {"delta" if part else "message": {"role": "assistant", "content": content}}
        return {"index": index, **said, "logprobs": None, "finish_reason": finish}

    def _logprobs(self, tokens: Sequence[NewToken], *, chat: bool) -> dict[str, Any]:
        """Return the log-probabilities of generated tokens, in the form of chat completions or of
        completions."""
        texts = [self.tokenizer.decode([token.id]) for token in tokens]
        values = [token.logprob for token in tokens]
        if not chat:
            return {"tokens": texts, "token_logprobs": values, "top_logprobs": None}
        content = [
            {"token": text, "logprob": value, "bytes": [*text.encode()], "top_logprobs": []}
            for text, value in zip(texts, values, strict=True)
        ]
        return {"content": content}


def usage(texts: list[Text], asked: Asked) -> dict[str, int]:
    """Return the field `usage` of an answer: numbers of tokens of prompts and of texts."""
    prompt, new = sum(map(len, asked.prompts)), sum(len(text.tokens) for text in texts)
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


def problem(status: int, message: str) -> dict[str, Any]:
    """Return the body of an answer that reports an error."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}
