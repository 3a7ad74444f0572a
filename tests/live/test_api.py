"""Every way a user may name adapters gives the same answer over the real server, and what is wrong is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest
import requests

from .conftest import Live, on

QUESTION = "Ivan has 12 pears and gets 30 pears. How many pears does Ivan have?"
MIX = {"math": 0.7, "json": 0.3}
ODD = 'odd: name, "quoted" {and} more/less'
NUM_NEW = 24


def prompt_of(question: str) -> str:
    return f"<|user|>{question}<|assistant|>"


class Client:
    """Texts by every endpoint; ``native`` is what the others must say."""

    def __init__(self, live: Live) -> None:
        self.live = live
        self.server = live.server
        self.base = str(next(card["id"] for card in self.models() if card["parent"] is None))

    def models(self) -> list[dict[str, Any]]:
        return self.server.get("/v1/models").json()["data"]

    def native(self, question: str = QUESTION, **fields: Any) -> Any:
        sampling = {"temperature": 0, "max_new_tokens": NUM_NEW}
        response = self.server.post("/generate", {"text": prompt_of(question), "sampling_params": sampling, **fields})
        assert response.status_code == 200, response.text
        answer = response.json()
        return answer["text"] if isinstance(answer, dict) else [item["text"] for item in answer]

    def chat(self, model: str, question: str = QUESTION, **fields: Any) -> requests.Response:
        messages = [{"role": "user", "content": question}]
        body = {"model": model, "messages": messages, "temperature": 0, "max_tokens": NUM_NEW, **fields}
        return self.server.post("/v1/chat/completions", body, stream=bool(fields.get("stream")))

    def complete(self, model: str, prompt: Any, **fields: Any) -> requests.Response:
        body = {"model": model, "prompt": prompt, "temperature": 0, "max_tokens": NUM_NEW, **fields}
        return self.server.post("/v1/completions", body, stream=bool(fields.get("stream")))


@pytest.fixture
def client(live: Live) -> Client:
    return Client(live)


@pytest.fixture
def odd_name(live: Live) -> Iterator[str]:
    """An adapter under a name with every character that the text form gives a meaning to."""
    assert live.server.load(ODD, live.adapters["math"]).status_code == 200
    yield ODD
    assert live.server.unload(ODD).status_code == 200


def chat_text(response: requests.Response) -> str:
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


def read_stream(response: requests.Response) -> Iterator[dict[str, Any]]:
    assert response.status_code == 200, response.text
    for line in response.iter_lines():
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])


@on("float32")
def test_generate_forms(client: Client) -> None:
    """/generate: one mix, eight ways to write it; and all of them find the KV of the first."""
    expected = client.native(lora=MIX)
    assert expected != client.native()
    forms: list[dict[str, Any]] = [
        {"lora_path": "math:0.7,json:0.3"},
        {"lora_path": " json:0.3 , math:0.7 "},
        {"lora_path": json.dumps(MIX)},
        {"lora_path": '[{"name": "math", "scale": 0.7}, {"name": "json", "scale": 0.3}]'},
        {"lora": [{"name": "math", "scale": 0.7}, {"name": "json", "scale": 0.3}]},
        {"lora": [{"id": "json", "weight": 0.3}, {"id": "math", "weight": 0.7}]},
        {"lora": [{"name": "math", "scale": 0.5}, {"name": "json", "scale": 0.3}, {"name": "math", "scale": 0.2}]},
        {"merged_adapters": {"ids": ["math", "json"], "weights": [0.7, 0.3], "merge_strategy": "linear"}},
        {"lora": MIX, "lora_path": "math:0.7,json:0.3"},
    ]
    sampling = {"temperature": 0, "max_new_tokens": NUM_NEW}
    for form in forms:
        body = {"text": prompt_of(QUESTION), "sampling_params": sampling, **form}
        answer = client.server.post("/generate", body).json()
        assert answer["text"] == expected, form
        meta = answer["meta_info"]
        assert meta["cached_tokens"] == meta["prompt_tokens"] - 1, f"{form} has KV of its own"


@on("float32")
def test_generate_batches(client: Client) -> None:
    """A mix per item, in every form, streams and n > 1 among them."""
    mixes: list[Any] = [None, "math", MIX, "json:-0.5", [{"name": "upper", "scale": 1.5}]]
    expected = [client.native(lora=mix) for mix in mixes]
    assert len(set(expected)) >= 4
    prompts = [prompt_of(QUESTION)] * len(mixes)
    assert client.native(text=prompts, lora=mixes) == expected
    paths = [None, "math", "math:0.7,json:0.3", "json:-0.5", '{"upper": 1.5}']
    assert client.native(text=prompts, lora_path=paths) == expected
    assert client.native(text=prompts, lora=MIX) == [expected[2]] * len(mixes)
    sampling = {"temperature": 0, "max_new_tokens": NUM_NEW, "n": 2}
    doubled = client.native(text=prompts, lora=mixes, sampling_params=sampling)
    assert doubled == [text for text in expected for _ in range(2)]
    body = {"text": prompts, "lora": mixes, "stream": True, "sampling_params": {**sampling, "n": 1}}
    texts: dict[int, str] = {}
    for chunk in read_stream(client.server.post("/generate", body, stream=True)):
        texts[chunk["index"]] = chunk["text"]
    assert [texts[index] for index in range(len(mixes))] == expected


@on("float32")
def test_openai_forms(client: Client) -> None:
    """Chat and completions: ``model`` and ``extra_body`` in all forms say what /generate says."""
    base = client.base
    single, mixed, plain = client.native(lora="math"), client.native(lora=MIX), client.native()
    merged = {"ids": ["math", "json"], "weights": [0.7, 0.3]}
    forms: list[tuple[str, dict[str, Any], str]] = [
        (base, {}, plain),
        ("math", {}, single),
        (f"{base}:math", {}, single),
        (f"{base}:math:0.7,json:0.3", {}, mixed),
        ("math:0.7,json:0.3", {}, mixed),
        (base, {"lora": MIX}, mixed),
        (base, {"lora": [{"name": "math", "scale": 0.7}, {"name": "json", "scale": 0.3}]}, mixed),
        (base, {"merged_adapters": merged}, mixed),
        (base, {"lora_path": "math"}, single),
        ("math", {"lora": "math"}, single),
    ]
    for model, fields, expected in forms:
        assert chat_text(client.chat(model, **fields)) == expected, (model, fields)
        response = client.complete(model, prompt_of(QUESTION), **fields)
        assert response.status_code == 200, response.text
        assert response.json()["choices"][0]["text"] == expected, (model, fields)


@on("float32")
def test_openai_streams_batches_and_choices(client: Client) -> None:
    """Streaming, n > 1, and a batch with a mix per prompt."""
    mixed, single, plain = client.native(lora=MIX), client.native(lora="math"), client.native()
    chunks = read_stream(client.chat(f"{client.base}:math:0.7,json:0.3", stream=True))
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"]) == mixed
    chunks = read_stream(client.complete(client.base, prompt_of(QUESTION), lora=MIX, stream=True))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"]) == mixed
    choices = client.chat("math", n=2).json()["choices"]
    assert [choice["message"]["content"] for choice in choices] == [single] * 2
    response = client.complete(client.base, [prompt_of(QUESTION)] * 3, lora=["math", MIX, None])
    assert [choice["text"] for choice in response.json()["choices"]] == [single, mixed, plain]


@on("float32")
def test_models(client: Client, odd_name: str) -> None:
    """/v1/models lists the adapters; each name, and a mix, has a page of its own; unknown names are 404."""
    cards = {card["id"]: card for card in client.models()}
    assert set(cards) == {client.base, odd_name, *client.live.adapters}
    assert all(card["parent"] == client.base for name, card in cards.items() if name != client.base)
    for name in (client.base, "math", odd_name, "math:0.7,json:0.3", f"{client.base}:math"):
        response = client.server.get("/v1/models/" + quote(name, safe="/"))
        assert response.status_code == 200 and response.json()["id"] == name, (name, response.text)
    for name in ("nobody", "math:0.7,nobody"):
        assert client.server.get(f"/v1/models/{name}").status_code == 404


@on("float32")
def test_names_with_any_character(client: Client, odd_name: str) -> None:
    """A name with ':' and ',' and braces is that name, wherever it stands alone, and in mixes through JSON."""
    single = client.native(lora="math")
    for form in (
        {"lora": odd_name},
        {"lora_path": odd_name},
        {"lora": {odd_name: 1.0}},
        {"lora": [{"name": odd_name}]},
    ):
        assert client.native(**form) == single, form
    assert chat_text(client.chat(odd_name)) == single
    assert client.native(lora={odd_name: 0.7, "json": 0.3}) == client.native(lora=MIX)
    # The same bytes twice are one adapter: weights add up.
    assert client.native(lora={odd_name: 0.5, "math": 0.5}) == single


@on("float32")
def test_refusals(client: Client, odd_name: str) -> None:
    """400 that says what is wrong and where; nothing stays acquired, so every adapter can still be unloaded."""
    nine = dict.fromkeys([odd_name, *client.live.adapters], 0.5)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"lora": "nobody"}, "nobody"),
        ({"lora": {"math": 0.5, "nobody": 0.5}}, "nobody"),
        ({"lora_path": "math:0.7,nobody:0.3"}, "nobody"),
        ({"lora_path": "math:nan"}, "NaN"),
        ({"lora": {"math": "much"}}, "number"),
        ({"lora": {"math": 1e39}}, "finite"),
        ({"lora_path": "math:0.7:json"}, "0.7"),
        ({"lora_path": "math:"}, "math"),
        ({"lora_path": '{"math": 0.7'}, "JSON"),
        ({"lora": nine}, "at most 8"),
        ({"lora": "math", "lora_path": "json"}, "disagree"),
        ({"lora": MIX, "merged_adapters": {"ids": ["math"], "weights": [0.7]}}, "disagree"),
        ({"merged_adapters": {"ids": ["math"], "weights": [0.7, 0.3]}}, "weights"),
        ({"merged_adapters": {"ids": ["math"], "weights": [1], "merge_strategy": "ties"}}, "ties"),
        ({"lora": [{"name": "math", "scales": 0.7}]}, "scales"),
        ({"lora": ["math", "json"]}, "2 mixes"),
        ({"lora": 7}, "mix"),
    ]
    for form, says in cases:
        body = {"text": prompt_of(QUESTION), "sampling_params": {"max_new_tokens": 2}, **form}
        for response in (client.server.post("/generate", body), client.chat(client.base, **form)):
            assert response.status_code == 400 and says in response.text, (form, response.status_code, response.text)
    for model in ("nobody", f"{client.base}-typo", "math:0.7,nobody:0.3"):
        assert client.chat(model).status_code == 404, model
        assert client.complete(model, "x", stream=True).status_code == 404, model
    assert client.chat(f"{client.base}:nobody").status_code == 400
    assert client.chat("math", lora="json").status_code == 400
    # NaN as Python's json writes it is not JSON.
    assert client.server.post("/generate", {"text": "x", "lora": {"math": float("nan")}}).status_code in (400, 422)
    for name, folder in client.live.adapters.items():
        assert client.server.unload(name).status_code == 200
        assert client.server.load(name, folder).status_code == 200
