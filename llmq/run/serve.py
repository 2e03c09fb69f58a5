"""`llmq serve`: a model behind the HTTP interface of OpenAI's completions and chat completions.

    POST /v1/chat/completions     messages -> replies, with `stream` as server-sent events
    POST /v1/completions          prompts -> continuations, the same
    GET  /v1/models, /health

One thread uses the device (`Engine`). Each text has a queue of new tokens, which a thread of the
server reads: a slow reader keeps at most the tokens of its own texts waiting. Every field of a
request has a bound, and fields without support are refused by name.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from llmq.base.console import print_text
from llmq.base.dtypes import parse_dtype
from llmq.base.errors import ConfigError, LlmqError, warn
from llmq.model.generator import Generator, NewToken, Request
from llmq.plan.checks import check_sizes
from llmq.run.sampling import (
    Conversation,
    Sampler,
    check_prompt,
    conversation,
    open_model,
    prompt_ids,
    seed_of,
)
from llmq.runtime.machine import choose_machine
from llmq.text.guarded import guarded_tokenizer
from llmq.text.stop_strings import until
from llmq.text.tokenizer import Tokenizer, streamed

MOST_BYTES = 8 << 20  # of a request's body
MOST_TEXTS = 128  # of one request: prompts times n
MOST_WAITING = 1024  # texts of all requests; further requests are told to come again
MOST_STOPS, LONGEST_STOP = 16, 1000  # stop strings of a request, characters of one
LOOK = 0.5  # seconds between two looks whether a client that waits is still there
LOCAL = ("127.0.0.1", "localhost", "::1")


class Refused(Exception):
    """A request that is answered with an HTTP status other than 200."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


# ------------------------------------------------------------------------------------------------
# The thread of the device


class Text:
    """A text that the engine continues: its tokens so far, and those that wait to be read."""

    def __init__(self, request: Request, engine: Engine):
        self.request, self._engine = request, engine
        self.queue: queue.SimpleQueue[NewToken | Exception] = queue.SimpleQueue()
        self.tokens: list[NewToken] = []
        self.finish: str | None = None

    def ids(self) -> Iterator[int]:
        """The new ids as they come, without an id that ends the text. LlmqError if the engine
        fails."""
        while self.finish is None:
            token = self.queue.get()
            if isinstance(token, Exception):
                raise token
            self.tokens.append(token)
            self.finish = token.finish
            if token.finish != "stop":
                yield token.id

    def end(self) -> None:
        """Continue the text no further, because a stop string came or nobody reads any more."""
        if self.finish is None:
            self.finish = "stop"
            self._engine.drop(self)


class Engine:
    """Thread that continues the texts of all requests, a token of each at a time."""

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
        """Texts that begin as soon as there is room. Refused (429) if too many wait already."""
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
        """Give up a text."""
        with self._changed:
            self._dropped.append(text)
            self._changed.notify()

    def close(self) -> None:
        """End the thread after the token that is being made; texts end with an error."""
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
        """Take what requests have changed, and wait while there is no text. False at the end."""
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


# ------------------------------------------------------------------------------------------------
# Fields of requests


class Field(NamedTuple):
    """A field of a request's body. types: of its JSON value. least, most: of a number."""

    types: tuple[type, ...]
    default: Any = None
    least: float | None = None
    most: float | None = None

    def read(self, name: str, body: Mapping[str, Any]) -> Any:
        """Return the value, or the default for null and a missing field. Refused (400) for
        another."""
        value = body.get(name)
        if value is None:
            return self.default
        if type(value) not in self.types:
            kinds = " or ".join(kind.__name__ for kind in self.types)
            raise Refused(400, f"{name}: must be {kinds}, is {_short(value)}")
        number = type(value) in (int, float)
        if number and not (self.least is None or self.least <= value <= self.most):
            raise Refused(400, f"{name}: must be from {self.least} to {self.most}, is {value}")
        return value


def _short(value: Any) -> str:
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
"""Fields that change nothing about a text."""
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
"""Fields without support, and their values that ask for nothing."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request after its check. prompts: ids of each. stops: stop strings. counts: True if a
    stream ends with the number of tokens."""

    prompts: list[list[int]]
    requests: list[Request]
    n: int
    stops: list[str]
    stream: bool
    logprobs: bool
    counts: bool


class Service:
    """The model that is served, and the answers to requests.

    name: of the model. chat: a conversation without messages; None: the tokenizer has no chat
    template. positions: tokens of the longest text.
    """

    def __init__(
        self, name: str, sampler: Sampler, tokenizer: Tokenizer, chat: Conversation | None
    ):
        self.name, self.tokenizer, self.chat = name, tokenizer, chat
        self.config, self.positions = sampler.config, sampler.generator.positions
        self.engine = Engine(sampler.generator)
        self._count = 0

    # -- what is asked ---------------------------------------------------------------------------

    def asked(self, body: Any, *, chat: bool) -> Asked:
        """Check the body of a request. Refused (400) with the field that is wrong."""
        if not isinstance(body, dict):
            raise Refused(400, f"the body must be an object, is {_short(body)}")
        fields = CHAT if chat else TEXT
        for name, value in body.items():
            neutral = (None, *NEUTRAL.get(name, ()))
            if name not in fields and name not in UNUSED and value not in neutral:
                raise Refused(400, f"{name}: {_short(value)} is not supported")
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
        """The ids of a text, of ids, or of a list of either."""
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
                raise Refused(400, f"prompt: {_short(each)} is neither a text nor ids")
            check_prompt(each, self.config, "prompt")
            found.append(each)
        return found

    # -- what is answered ------------------------------------------------------------------------

    def pieces(self, text: Text, stops: Sequence[str]) -> Iterator[str]:
        """The characters of a text as they come, up to a stop string. The engine continues the text
        no longer than somebody reads."""
        try:
            yield from until(streamed(self.tokenizer, text.request.prompt, text.ids()), stops)
        finally:
            text.end()

    def whole(self, texts: list[Text], asked: Asked, *, chat: bool) -> dict[str, Any]:
        """The body of an answer without `stream`."""
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
        """The server-sent events of an answer with `stream`: one choice behind the other."""
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
        finally:
            for text in texts:
                text.end()
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
        """The log-probabilities of chosen tokens, in the form of either interface."""
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
    """The number of tokens of prompts and texts."""
    prompt, new = sum(map(len, asked.prompts)), sum(len(text.tokens) for text in texts)
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


def problem(status: int, message: str) -> dict[str, Any]:
    """The body of an answer that refuses."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


# ------------------------------------------------------------------------------------------------
# HTTP


async def body_of(request: Any, key: str | None) -> Any:
    """The JSON value of a request's body. Refused without the key, for another content type, and
    for a body that is too large or no JSON."""
    given = request.headers.get("authorization", "")
    if key is not None and not hmac.compare_digest(given.encode(), f"Bearer {key}".encode()):
        raise Refused(401, "the API key is missing or wrong")
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # a form of any web page could send others
        raise Refused(415, "the content type must be application/json")
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MOST_BYTES:
            raise Refused(413, f"the body has more than {MOST_BYTES} bytes")
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is no JSON: {error}") from None


def application(
    service: Service, hosts: Sequence[str], key: str | None, origins: Sequence[str]
) -> Any:
    """The ASGI application. hosts: names under which clients reach the server, so that no page of
    another name does ("*": any). key: what clients must send as bearer token. origins: of pages
    whose scripts may call."""
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.middleware import Middleware
    from starlette.middleware.cors import CORSMiddleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.requests import Request as HttpRequest
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route

    async def answer(request: HttpRequest, *, chat: bool) -> Response:
        body = await body_of(request, key)
        asked = await run_in_threadpool(service.asked, body, chat=chat)
        texts = service.engine.submit(asked.requests)
        if asked.stream:
            events = service.events(texts, asked, chat=chat)
            return StreamingResponse(events, media_type="text/event-stream")
        made = asyncio.ensure_future(run_in_threadpool(service.whole, texts, asked, chat=chat))
        while not (await asyncio.wait({made}, timeout=LOOK))[0]:
            if await request.is_disconnected():
                for text in texts:
                    text.end()
                    text.queue.put(LlmqError("the client has gone"))
        return JSONResponse(await made)

    async def refused(_: HttpRequest, error: Exception) -> Response:
        status = error.status if isinstance(error, Refused) else 500
        return JSONResponse(problem(status, str(error)), status)

    async def models(_: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": service.name, "object": "model"}]})

    async def health(_: HttpRequest) -> Response:
        failed = service.engine.error
        return JSONResponse({"status": str(failed or "ok")}, 200 if failed is None else 503)

    middleware = [Middleware(TrustedHostMiddleware, allowed_hosts=[*hosts])]
    if origins:
        cors = {"allow_origins": [*origins], "allow_methods": ["*"], "allow_headers": ["*"]}
        middleware.append(Middleware(CORSMiddleware, **cors))
    return Starlette(
        routes=[
            Route("/v1/chat/completions", partial(answer, chat=True), methods=["POST"]),
            Route("/v1/completions", partial(answer, chat=False), methods=["POST"]),
            Route("/v1/models", models),
            Route("/health", health),
        ],
        middleware=middleware,
        exception_handlers={Refused: refused, LlmqError: refused},
    )


def run_serve(
    model: str,
    *,
    adapter: Path | None,
    host: str,
    port: int,
    texts: int,
    max_tokens: int,
    chat_template: str | None,
    api_key: str | None,
    allow_origin: Sequence[str],
    device: str,
    model_dtype: str,
    ready: Callable[[Any], None] = lambda server: None,
) -> None:
    """Serve a model until a signal ends the program. texts: that are continued at a time.
    max_tokens: of the longest text, prompt included. ready: is called with uvicorn's server before
    it begins. ConfigError without the packages of the extra `serve`."""
    try:
        import uvicorn
    except ImportError as error:
        raise ConfigError(f"llmq serve: {error}: pip install starlette uvicorn") from error
    machine = choose_machine(device, 1)
    with open_model(model, adapter) as (config, read, source):
        check_sizes(config, machine)
        tokenizer: Tokenizer = guarded_tokenizer(source)
        chat = conversation(tokenizer, chat_template)
        positions = min(max_tokens, config.max_positions)
        sampler = Sampler(
            machine, config, lambda w: w.load(read), positions, parse_dtype(model_dtype), texts
        )
    if host not in LOCAL and api_key is None:
        warn(f"--host {host}: whoever reaches this machine can use the model: give --api-key")
    hosts = [*LOCAL, host] if host in LOCAL else ["*"]
    with sampler:
        service = Service(Path(model).name, sampler, tokenizer, chat)
        try:
            app = application(service, hosts, api_key, allow_origin)
            settings = uvicorn.Config(
                app, host=host, port=port, log_level="warning", access_log=False,
                limit_concurrency=MOST_WAITING, timeout_keep_alive=30,
            )  # fmt: skip
            server = uvicorn.Server(settings)
            ready(server)
            print_text(f"Serving {service.name} at http://{host}:{port}/v1, Ctrl-C ends it\n")
            server.run()
        finally:
            service.engine.close()
