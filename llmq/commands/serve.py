"""`llmq serve`: serves a model behind OpenAI's HTTP interface."""

from llmq.base.errors import ConfigError
from llmq.commands.common import Device, option
from llmq.commands.models import (
    Adapter,
    BaseDtype,
    Exact,
    KvDtype,
    Model,
    ModelDtype,
    adapter_folder,
)


def serve(
    model: Model,
    adapter: Adapter = None,
    host: option(str, "Address to listen at; 0.0.0.0: all of this machine.") = "127.0.0.1",
    port: option(int, "Port to listen at.", min=0, max=65535) = 8000,
    texts: option(int, "Texts that are continued at a time.", min=1, max=1024) = 16,
    max_tokens: option(int, "Tokens of the longest text, its prompt included.", min=2) = 4096,
    chat_template: option(str | None, "Template of chats, a file; the tokenizer's.") = None,
    api_key: option(
        str | None, "Key that clients must send as bearer token.", envvar="LLMQ_API_KEY"
    ) = None,
    allow_origin: option(
        list[str], "Origin of web pages that may call; may be repeated.", metavar="URL"
    ) = (),
    device: Device = "auto",
    model_dtype: ModelDtype = "bf16",
    base_dtype: BaseDtype = None,
    kv_dtype: KvDtype = None,
    exact: Exact = False,
) -> None:
    """Serve a model to clients of OpenAI's completions and chat completions.

    llmq serve talks --port 8000
    """
    how = locals()
    from llmq.run.run_paths import find_model

    try:
        from llmq.run.serve_http import run_serve
    except ImportError as error:
        raise ConfigError(f"llmq serve: {error}: pip install starlette uvicorn") from error
    run_serve(**how | {"model": find_model(model), "adapter": adapter_folder(adapter)})
