"""`llmq serve` beside plain HTTP clients."""

from __future__ import annotations

import http.client
import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from llmq.commands.cli import _run
from llmq.model.generator import Generator
from llmq.run.serve_http import run_serve
from llmq.run.trainer import Trainer
from llmq.text.stop_strings import until
from tests.runs import make_workplace, options

MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    ("pieces", "stops", "text"),
    [
        (["ab", "c"], [], "abc"),
        (["ab<", "en", "d>x"], ["<end>"], "ab"),
        (["ab<", "en", "x"], ["<end>"], "ab<enx"),
        (["a#b", "<end>"], ["<end>", "#"], "a"),
        (["<end", ">"], ["<end>"], ""),
        (["<e"], ["<end>"], "<e"),
    ],
)
def test_a_text_ends_in_front_of_its_stop_string(pieces, stops, text):
    assert "".join(until(iter(pieces), stops)) == text


class Client:
    def __init__(self, port: int) -> None:
        self.port = port

    def ask(self, path, body=None, kind="application/json", method="POST", **headers):
        """Status and body of an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection.request(method, path, data, {"Content-Type": kind} | headers)
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        return answer.status, content

    def text(self, **body):
        status, content = self.ask("/v1/completions", body)
        assert status == 200, content
        return json.loads(content)

    def chat(self, **body):
        status, content = self.ask("/v1/chat/completions", {"messages": MESSAGES} | body)
        assert status == 200, content
        return json.loads(content)

    def events(self, path, **body):
        """The objects of a stream."""
        status, content = self.ask(path, body | {"stream": True})
        assert status == 200, content
        *events, end = [line[6:] for line in content.decode().split("\n\n") if line]
        assert end == "[DONE]"
        return [json.loads(event) for event in events]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A client of a tiny model of bytes."""
    folder = make_workplace(tmp_path_factory.mktemp("serve"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        with Trainer(**{name.replace("-", "_"): x for name, x in options().items()}) as trainer:
            trainer.export("model")
        started, found = threading.Event(), []

        def ready(server):
            found.append(server)
            server.install_signal_handlers = lambda: None
            started.set()

        settings = {
            "adapter": None, "host": "127.0.0.1", "port": 0, "texts": 4, "max_tokens": 60,
            "chat_template": "chatml", "api_key": None, "allow_origin": [], "device": "cpu",
            "model_dtype": "fp32",
        }  # fmt: skip
        thread = threading.Thread(
            target=lambda: run_serve("model", **settings, ready=ready), daemon=True
        )
        thread.start()
        assert started.wait(60)
        while not found[0].started:
            thread.join(0.05)
            assert thread.is_alive()
        yield Client(found[0].servers[0].sockets[0].getsockname()[1])
        found[0].should_exit = True
        thread.join(30)
        assert not thread.is_alive()


def test_texts_are_those_of_sample(served, capsys):
    greedy = {"temperature": 0, "max_tokens": 12, "prompt": "abc"}
    one = served.text(**greedy)
    (choice,) = one["choices"]
    words = "--max-new-tokens 12 --temperature 0 --device cpu --model-dtype fp32".split()
    assert _run(["sample", "model", "--prompt", "abc", *words]) == 0
    assert capsys.readouterr().out.rstrip("\n") == "abc" + choice["text"]
    assert one["usage"]["prompt_tokens"] == 3 and choice["finish_reason"] == "length"
    ids = served.text(**greedy | {"prompt": [97, 98, 99]})
    assert ids["choices"][0]["text"] == choice["text"]


def test_many_at_a_time_say_the_same(served):
    asked = [{"prompt": "ab" * n, "max_tokens": 9, "seed": n, "n": 2} for n in range(1, 9)]
    alone = [[c["text"] for c in served.text(**body)["choices"]] for body in asked]
    with ThreadPoolExecutor(8) as pool:
        together = [*pool.map(lambda body: served.text(**body)["choices"], asked)]
    assert alone == [[c["text"] for c in choices] for choices in together]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_is_the_text_in_pieces(served, path):
    chat = "chat" in path
    body = {"max_tokens": 10, "seed": 5, "n": 2, "logprobs": True if chat else 0}
    body |= {"messages": MESSAGES} if chat else {"prompt": "x"}
    status, content = served.ask(path, body)
    whole = json.loads(content)
    events = served.events(path, **body, stream_options={"include_usage": True})
    assert status == 200 and events[-1]["usage"] == whole["usage"]
    count = 0
    for choice in whole["choices"]:
        own = [e["choices"][0] for e in events[:-1] if e["choices"][0]["index"] == choice["index"]]
        if chat:
            assert choice["message"]["role"] == own[0]["delta"]["role"] == "assistant"
            said = "".join(part["delta"]["content"] for part in own)
            assert said == choice["message"]["content"]
            count += len(choice["logprobs"]["content"])
        else:
            assert "".join(part["text"] for part in own) == choice["text"]
            values = choice["logprobs"]["token_logprobs"]
            assert all(value <= 0 for value in values)
            count += len(values)
        assert own[-1]["finish_reason"] == choice["finish_reason"] in ("length", "stop")
    assert count == whole["usage"]["completion_tokens"]


def test_stop_strings(served):
    text = served.text(prompt="abc", temperature=0, max_tokens=20)["choices"][0]["text"]
    stop = text[3:5]
    cut = served.text(prompt="abc", temperature=0, max_tokens=20, stop=[stop])["choices"][0]
    assert cut["text"] == text[: text.index(stop)] and cut["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"{", 400, "no JSON"),
        (b"[" * 100_000, 400, "no JSON"),
        ([1], 400, "must be an object"),
        ({}, 400, "prompt: is missing"),
        ({"prompt": ""}, 200, ""),
        ({"prompt": "x" * 60}, 400, "a prompt has 60 tokens, this server takes 59"),
        ({"prompt": [10**9]}, 400, "outside the model's vocabulary"),
        ({"prompt": [-1]}, 400, "neither a text nor ids"),
        ({"prompt": [[1], 2]}, 400, "neither a text nor ids"),
        ({"prompt": "x", "n": 10**6}, 400, "n: must be from 1 to"),
        ({"prompt": ["x"] * 100, "n": 2}, 400, "at most 128 texts"),
        ({"prompt": "x", "temperature": "hot"}, 400, "temperature: must be int or float"),
        ({"prompt": "x", "temperature": float("nan")}, 400, "temperature: must be from"),
        ({"prompt": "x", "stop": [""]}, 400, "stop: at most"),
        ({"prompt": "x", "echo": True}, 400, "echo: true is not supported"),
        ({"prompt": "x", "logprobs": 5}, 400, "logprobs: must be from 0 to 0"),
        ({"prompt": "x", "frequency_penalty": 0, "user": "me", "max_tokens": 1}, 200, ""),
        ({"prompt": "x", "best": 1}, 400, "best: 1 is not supported"),
        (b'{"prompt": "\\ud800", "max_tokens": 1}', 200, ""),
        (b'{"prompt": "x", "\\ud800": 1}', 400, "is not supported"),
        (b" " * (9 << 20), 413, "bytes"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_wrong_is_said(served, body, status, said):
    got, content = served.ask("/v1/completions", body)
    assert got == status
    if said:
        assert said in json.loads(content)["error"]["message"]


def test_other_pages_and_keys(served):
    body = {"prompt": "x", "max_tokens": 1}
    assert served.ask("/v1/completions", body, kind="text/plain")[0] == 415
    assert served.ask("/v1/completions", body, Host="evil.example")[0] == 400
    assert json.loads(served.ask("/v1/models", method="GET")[1])["data"][0]["id"] == "model"
    assert served.ask("/health", method="GET")[0] == 200
    assert served.ask("/v1/chat/completions", {"messages": []})[0] == 400
    half = b'{"messages": [{"role": "user", "content": "\\ud800"}], "max_tokens": 1}'
    assert served.ask("/v1/chat/completions", half)[0] == 200


def test_texts_whose_reader_goes_end(served, monkeypatch):
    """Texts end with their reader: all tokens asked for would take 400 steps of four texts."""
    steps, step = [], Generator.step
    monkeypatch.setattr(Generator, "step", lambda self: steps.append(1) or step(self))
    for _ in range(8):
        connection = http.client.HTTPConnection("127.0.0.1", served.port)
        body = {"prompt": "x", "max_tokens": 50, "n": 4, "stream": True}
        connection.request(
            "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        connection.close()
    assert served.text(prompt="x", max_tokens=1)["usage"]["completion_tokens"] == 1
    assert len(steps) < 200


def test_serve_needs_its_packages(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "llmq.run.serve_http")
    assert _run(["serve", str(Path("nowhere"))]) == 2
    assert "pip install starlette uvicorn" in capsys.readouterr().err
