"""The endpoints beside /generate, chat and completions: the same mixes, or a refusal; never the base model in silence."""

from __future__ import annotations

import json
from typing import Any

import pytest

from .conftest import Live, on
from .test_api import MIX, NUM_NEW, QUESTION, Client, chat_text, prompt_of, read_stream

pytestmark = on("float32")


@pytest.fixture
def client(live: Live) -> Client:
    return Client(live)


def forms(base: str) -> list[tuple[str, dict[str, Any], Any]]:
    """``model``, other fields of the body, and the mix that they ask for."""
    merged = {"ids": ["math", "json"], "weights": [0.7, 0.3]}
    return [
        (base, {}, None),
        ("math", {}, "math"),
        (f"{base}:math", {}, "math"),
        (f"{base}:math:0.7,json:0.3", {}, MIX),
        (base, {"lora": MIX}, MIX),
        (base, {"merged_adapters": merged}, MIX),
    ]


def test_responses(client: Client) -> None:
    """/v1/responses says what /generate says, streams included."""
    body = {"input": QUESTION, "temperature": 0, "max_output_tokens": NUM_NEW + 2}  # SGLang keeps two back
    for model, fields, mix in forms(client.base):
        response = client.server.post("/v1/responses", {**body, "model": model, **fields})
        assert response.status_code == 200, response.text
        answer = response.json()
        assert answer["output"][0]["content"][0]["text"] == client.native(lora=mix), (model, fields)
        assert answer["model"] == model
    stream = client.server.post("/v1/responses", {**body, "model": client.base, "lora": MIX, "stream": True}, stream=True)
    deltas = [chunk["delta"] for chunk in read_stream(stream) if chunk["type"] == "response.output_text.delta"]
    assert "".join(deltas) == client.native(lora=MIX)
    for model, fields, status in (("nobody", {}, 404), (client.base, {"lora": "nobody"}, 400)):
        response = client.server.post("/v1/responses", {**body, "model": model, **fields})
        assert response.status_code == status and "nobody" in response.text


def test_score(client: Client) -> None:
    """/v1/score: every item's probabilities are those of the mix's own logprobs, and differ between mixes."""
    items, labels = ["4", "The"], [52, 50, 65]
    body = {"query": prompt_of(QUESTION), "items": items, "label_token_ids": labels, "apply_softmax": True}
    by_mix: dict[str, Any] = {}
    for model, fields, mix in forms(client.base):
        response = client.server.post("/v1/score", {**body, "model": model, **fields})
        assert response.status_code == 200, response.text
        scores = response.json()["scores"]
        known = by_mix.setdefault(json.dumps(mix), scores)
        assert all(row == pytest.approx(other, abs=1e-5) for row, other in zip(scores, known, strict=True)), (model, fields)
    base, single, mixed = by_mix.values()
    for left, right in ((base, single), (base, mixed), (single, mixed)):
        assert any(abs(x - y) > 1e-3 for one, two in zip(left, right, strict=True) for x, y in zip(one, two, strict=True))
    for model, fields, status in (("nobody", {}, 404), (client.base, {"lora": {"math": 1, "nobody": 1}}, 400)):
        response = client.server.post("/v1/score", {**body, "model": model, **fields})
        assert response.status_code == status and "nobody" in response.text


@pytest.mark.parametrize("path", ["/v1/rerank", "/v1/embeddings", "/v1/classify", "/encode"])
def test_what_a_language_model_does_not_serve_is_refused(client: Client, path: str) -> None:
    """Not answered, with an adapter or without; a wrong mix is named before."""
    body = {"model": client.base, "query": "x", "documents": ["a", "b"], "input": "x", "text": "x"}
    for fields, says in (({}, "embedding"), ({"lora": "math"}, "embedding"), ({"lora": "nobody"}, "nobody")):
        response = client.server.post(path, {**body, **fields})
        assert response.status_code == 400 and says in response.text, (fields, response.text)


def test_other_chat_apis(client: Client) -> None:
    """Anthropic's and Ollama's: unknown models are the base model (clients send fixed names), adapters are adapters."""
    messages = [{"role": "user", "content": QUESTION}]

    def anthropic(model: str, **fields: Any) -> str:
        body = {"model": model, "messages": messages, "max_tokens": NUM_NEW, "temperature": 0, **fields}
        return str(client.server.post("/v1/messages", body).json()["content"][0]["text"])

    def ollama(model: str, **fields: Any) -> str:
        options = {"num_predict": NUM_NEW, "temperature": 0}
        body = {"model": model, "messages": messages, "stream": False, "options": options, **fields}
        return str(client.server.post("/api/chat", body).json()["message"]["content"])

    for ask in anthropic, ollama:
        expected = {mix: ask("some-model", lora=mix) for mix in ("math", "upper")}
        assert ask("math") == expected["math"] != ask("some-model") != expected["upper"]
    assert anthropic("some-model", lora=MIX) == chat_text(client.chat(client.base, lora=MIX))
    for path in "/v1/messages", "/api/chat":
        body = {"model": "x", "messages": messages, "max_tokens": 4, "stream": False, "lora": "nobody"}
        response = client.server.post(path, body)
        assert response.status_code == 400 and "nobody" in response.text
