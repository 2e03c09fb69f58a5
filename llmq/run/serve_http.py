"""The HTTP side of `llmq serve`: routes, checks of clients, and streams of text."""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from anyio.to_thread import current_default_thread_limiter
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from llmq.base.console import print_text
from llmq.base.dtypes import parse_dtype
from llmq.base.errors import LlmqError, warn
from llmq.base.records import mended
from llmq.plan.checks import check_sizes
from llmq.run.sampling import Sampler, conversation, open_model
from llmq.run.serve import MOST_WAITING, Service, Text, problem
from llmq.run.serve_fields import Refused
from llmq.runtime.machine import choose_machine
from llmq.text.guarded import guarded_tokenizer
from llmq.text.tokenizer import Tokenizer

LOCAL = ("127.0.0.1", "localhost", "::1")
MOST_BYTES = 8 << 20  # most bytes of a request's body
LOOK = 0.5  # seconds between two checks whether a waiting client is still connected


async def body_of(request: Any, key: str | None) -> Any:
    """Return the JSON value of a request's body. Raises Refused for a missing or wrong key, another
    content type, and a body that is too large or is not JSON."""
    given = request.headers.get("authorization", "")
    if key is not None and not hmac.compare_digest(given.encode(), f"Bearer {key}".encode()):
        raise Refused(401, "the API key is missing or wrong")
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # forms of foreign web pages send only other types
        raise Refused(415, "the content type must be application/json")
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MOST_BYTES:
            raise Refused(413, f"the body has more than {MOST_BYTES} bytes")
    try:
        value = json.loads(body)
        if b"\\ud" in body.lower():  # perhaps a lone surrogate, which UTF-8 cannot encode
            value = json.loads(mended(json.dumps(value, ensure_ascii=False)))
        return value
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is no JSON: {error}") from None


class Events(StreamingResponse):
    """A stream of events. The end of the stream stops its texts, even if the client leaves before
    the stream begins."""

    def __init__(self, events: Iterator[str], texts: list[Text]):
        super().__init__(events, media_type="text/event-stream")
        self.texts = texts

    async def __call__(self, *connection: Any) -> None:
        try:
            await super().__call__(*connection)
        finally:
            for text in self.texts:
                text.end()


@asynccontextmanager
async def lifespan(_: Starlette) -> AsyncIterator[None]:
    current_default_thread_limiter().total_tokens = MOST_WAITING  # each text has a thread
    yield


def application(
    service: Service, hosts: Sequence[str], key: str | None, origins: Sequence[str]
) -> Any:
    """Return the ASGI application. hosts: host names that clients may use for the server ("*":
    any), a protection against DNS rebinding. key: bearer token that clients must send, or None.
    origins: origins of web pages whose scripts may call the server."""

    async def answer(request: HttpRequest, *, chat: bool) -> Response:
        body = await body_of(request, key)
        asked = await run_in_threadpool(service.asked, body, chat=chat)
        texts = service.engine.submit(asked.requests)
        if asked.stream:
            return Events(service.events(texts, asked, chat=chat), texts)
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
        lifespan=lifespan,
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
    base_dtype: str | None = None,
    kv_dtype: str | None = None,
    exact: bool = False,
    ready: Callable[[Any], None] = lambda server: None,
) -> None:
    """Serve a model until a signal ends the program. texts: most texts that are continued at the
    same time. max_tokens: most tokens of a text, including the prompt. ready: function called with
    uvicorn's server before the server starts."""
    machine = choose_machine(device, 1)
    with open_model(model, adapter) as (config, read, source):
        check_sizes(config, machine)
        tokenizer: Tokenizer = guarded_tokenizer(source)
        chat = conversation(tokenizer, chat_template)
        positions = min(max_tokens, config.max_positions)
        sampler = Sampler(
            machine, config, lambda w: w.load(read), positions, parse_dtype(model_dtype), texts,
            base_dtype, kv_dtype, exact,
        )  # fmt: skip
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
