"""The HTTP server: every endpoint reads a mix wherever a user may write it, or refuses it before anything runs."""

import asyncio
import json
import re
import runpy
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from openai import AsyncOpenAI

from sglang_lora_tree.composite import http_hooks, operation_hooks

from .conftest import apply_hooks

JSON = {"Content-Type": "application/json"}
BOTH = {"json": 0.25, "math": 0.5}
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"?": 0, "x": 1, "A": 2, "B": 3}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?", chat_template=TEMPLATE)


@pytest.fixture
def server(monkeypatch, tokenizer_manager, tokenizer):
    """Calls the real app, and says what came back, what reached the scheduler, and that nothing stays acquired."""
    from sglang.srt.entrypoints import http_server
    from sglang.srt.entrypoints.anthropic.serving import AnthropicServing
    from sglang.srt.entrypoints.ollama.serving import OllamaServing
    from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
    from sglang.srt.entrypoints.openai.serving_completions import OpenAIServingCompletion
    from sglang.srt.entrypoints.openai.serving_embedding import OpenAIServingEmbedding
    from sglang.srt.entrypoints.openai.serving_responses import OpenAIServingResponses
    from sglang.srt.parser.template_manager import TemplateManager

    apply_hooks(monkeypatch, [hook for hook in http_hooks.HOOKS if hook[1] is not http_hooks.prepare_app])
    http_hooks.prepare_app()
    templates = TemplateManager()
    tokenizer_manager.tokenizer = tokenizer
    state = SimpleNamespace(tokenizer_manager=tokenizer_manager, template_manager=templates)
    monkeypatch.setattr(http_server, "_global_state", state)
    app = http_server.app
    app.state.openai_serving_completion = OpenAIServingCompletion(tokenizer_manager, templates)
    app.state.openai_serving_chat = OpenAIServingChat(tokenizer_manager, templates)
    app.state.openai_serving_embedding = OpenAIServingEmbedding(tokenizer_manager, templates)
    app.state.openai_serving_responses = OpenAIServingResponses(tokenizer_manager, templates)
    app.state.anthropic_serving = AnthropicServing(app.state.openai_serving_chat)
    app.state.ollama_serving = OllamaServing(tokenizer_manager)

    def call(path, body=None, method="POST"):
        content = {"json": body} if not isinstance(body, str) else {"content": body, "headers": JSON}

        async def send():
            transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
                response = await client.request(method, path, **content)
            assert set((await tokenizer_manager.counts()).values()) == {0}
            return response

        tokenizer_manager.sent.clear()
        response = asyncio.run(send())
        return SimpleNamespace(
            status=response.status_code,
            text=response.text,
            json=response.json() if response.headers["content-type"] == "application/json" else None,
            mixes=tokenizer_manager.mixes,
        )

    return call


MESSAGES = [{"role": "user", "content": "x"}]
BODIES = {
    "/generate": {"text": "x"},
    "/v1/completions": {"model": "llama", "prompt": "x"},
    "/v1/chat/completions": {"model": "llama", "messages": MESSAGES},
    "/invocations": {"model": "llama", "messages": MESSAGES},
    "/v1/messages": {"model": "claude", "max_tokens": 4, "messages": MESSAGES},
    "/v1/responses": {"model": "llama", "input": "x"},
    "/api/chat": {"model": "llama", "messages": MESSAGES, "stream": False},
    "/api/generate": {"model": "llama", "prompt": "x", "stream": False},
}
FIELDS = [
    {"lora": [{"name": "math", "scale": 0.5}, {"id": "json", "weight": 0.25}]},
    {"lora": BOTH},
    {"merged_adapters": {"ids": ["math", "json"], "weights": [0.5, 0.25], "merge_strategy": "linear"}},
    {"lora_path": "math:0.5,json:0.25"},
    {"lora_path": json.dumps(BOTH)},
    {"lora_path": BOTH, "lora": BOTH},
]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("fields", FIELDS)
def test_every_endpoint_reads_every_field(server, path, fields):
    answer = server(path, {**BODIES[path], **fields})
    assert (answer.status, answer.mixes) == (200, [BOTH]), answer.text


@pytest.mark.parametrize("path", BODIES)
def test_without_a_mix_the_base_model_answers(server, path):
    assert server(path, BODIES[path]).mixes == [{}]


@pytest.mark.parametrize("path", [path for path in BODIES if path != "/generate"])
@pytest.mark.parametrize(
    ("model", "mix"),
    [
        ("math", {"math": 1}),
        ("org:math", {"org:math": 1}),
        ("llama:math", {"math": 1}),
        ("llama:org:math:0.5", {"org:math": 0.5}),
        ("llama:math:0.5,json:0.25", BOTH),
        ("math:0.5,json:0.25", BOTH),
        ("llama", {}),
    ],
)
def test_model_names_an_adapter_or_a_mix(server, path, model, mix):
    answer = server(path, {**BODIES[path], "model": model})
    assert (answer.status, answer.mixes) == (200, [mix]), answer.text
    if path.startswith("/v1"):
        assert answer.json["model"] == model


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/invocations", "/v1/embeddings"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_model_that_is_not_served_is_404_as_openai_has_it(server, path, stream):
    answer = server(path, {**BODIES.get(path, {"input": "x"}), "model": "maht", "stream": stream})
    assert answer.status == 404 and answer.mixes == []
    assert answer.json["error"]["code"] == "model_not_found" and answer.json["error"]["param"] == "model"
    assert "'maht' does not exist" in answer.json["error"]["message"]


def test_clients_with_fixed_model_names_get_the_base_model(server):
    assert server("/v1/messages", {**BODIES["/v1/messages"], "model": "claude-x"}).mixes == [{}]
    assert server("/api/chat", {**BODIES["/api/chat"], "model": "gemma:7b"}).mixes == [{}]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"lora": {"maht": 1}}, "no adapter is called 'maht'; known are"),
        ({"lora_path": "math:abc"}, "weight 'abc' is not a number"),
        ({"lora": {"math": 1e39}}, "out of the range of float32"),
        ({"lora": {"math": 1}, "lora_path": "json"}, "two forms disagree"),
        ({"lora": ["math", "json"]}, "a list of 2 mixes for a single prompt"),
        (
            {"merged_adapters": {"ids": ["math"], "weights": [1], "merge_strategy": "ties"}},
            "'ties' is not served exactly",
        ),
        ({"lora": {f"a{i}": 1 for i in range(9)}}, "no adapter is called"),
        ({"lora": 5}, "a mix is a name"),
    ],
)
def test_a_bad_mix_is_400_before_a_stream_starts(server, path, stream, fields, says):
    answer = server(path, {**BODIES[path], "stream": stream, **fields})
    assert answer.status == 400 and answer.mixes == []
    error = answer.json.get("error", answer.json)
    assert says in (error if isinstance(error, str) else error["message"])


@pytest.mark.parametrize("path", BODIES)
def test_a_member_named_twice_in_a_body_adds_up_as_in_text(server, path):
    """JSON parsers take the last in silence."""
    twice = '"lora": {"math": 0.25, "json": 0.25, "math": 0.25}}'
    answer = server(path, json.dumps(BODIES[path])[:-1] + ", " + twice)
    assert (answer.status, answer.mixes) == (200, [BOTH]), answer.text
    nested = '{"instances": [{"text": "A"}], "parameters": {%s}' % twice  # noqa: UP031
    assert server("/vertex_generate", nested).mixes == [BOTH]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ('"lora": "math", "lora": "json"', "the body: 'lora' is given 2 times"),
        ('"model": "math", "model": "json"', "the body: 'model' is given"),
        ('"lora": [{"name": "math", "name": "json"}]', "element 1: 'name' is given 2 times"),
        ('"merged_adapters": {"ids": ["math"], "weights": [1], "weights": [2]}', "'weights' is given 2 times"),
        ('"lora": {"math": 1}, "text": ' + "[" * 1000 + "]" * 1000, "nested too deep"),
    ],
)
def test_a_field_given_twice_is_400(server, path, fields, says):
    answer = server(path, json.dumps(BODIES[path])[:-1] + f", {fields}}}")
    if path == "/generate" and "model" in fields:
        assert answer.mixes == [{}]  # not a field there
    else:
        assert answer.status == 400 and answer.mixes == [] and says in json.dumps(answer.json).replace('\\"', '"')


def test_the_shapes_of_errors(server):
    bad = {"lora": {"maht": 1}}
    assert server("/generate", {**BODIES["/generate"], **bad}).json["error"].keys() >= {"message"}
    openai = server("/v1/completions", {**BODIES["/v1/completions"], **bad}).json
    assert (openai["object"], openai["type"], openai["code"]) == ("error", "BadRequest", 400)
    assert server("/v1/messages", {**BODIES["/v1/messages"], **bad}).json["error"]["type"] == "invalid_request_error"
    assert server("/v1/responses", {**BODIES["/v1/responses"], **bad}).json["error"]["code"] == 400
    assert isinstance(server("/api/chat", {**BODIES["/api/chat"], **bad}).json["error"], str)


@pytest.mark.parametrize(
    ("path", "prompts"),
    [
        ("/generate", {"text": ["A", "B"]}),
        ("/generate", {"input_ids": [[1], [2]]}),
        ("/v1/completions", {"prompt": ["A", "B"]}),
    ],
)
def test_a_batch_with_a_mix_per_prompt(server, path, prompts):
    answer = server(path, {**prompts, "lora": ["math:0.5,json:0.25", None]})
    assert (answer.status, answer.mixes) == (200, [BOTH, {}]), answer.text
    answer = server(path, {**prompts, "lora": BOTH})
    assert answer.mixes == [BOTH, BOTH]
    assert server(path, {**prompts, "lora": ["math"]}).status == 400


def test_samples_and_streams(server):
    assert server("/generate", {"text": "x", "lora": BOTH, "sampling_params": {"n": 2}}).mixes == [BOTH] * 2
    assert server("/v1/chat/completions", {**BODIES["/v1/chat/completions"], "n": 2, "lora": BOTH}).mixes == [BOTH] * 2
    streamed = server("/generate", {"text": ["A", "B"], "stream": True, "lora": [BOTH, "math"]})
    assert streamed.mixes == [BOTH, {"math": 1}] and "data: [DONE]" in streamed.text
    for path in ("/v1/completions", "/v1/chat/completions"):
        streamed = server(path, {**BODIES[path], "stream": True, "model": "llama:math:0.5,json:0.25"})
        assert streamed.mixes == [BOTH] and "data: [DONE]" in streamed.text


@pytest.mark.parametrize(
    ("path", "serving", "body"),
    [
        ("/v1/score", "openai_serving_score", {"query": "x", "items": ["A"]}),
        ("/v1/classify", "openai_serving_classify", {"input": "x"}),
        ("/v1/rerank", "openai_serving_rerank", {"query": "x", "documents": ["A"]}),
    ],
)
def test_endpoints_without_a_field_for_adapters_run_their_inner_prompts_under_the_mix(
    server, tokenizer_manager, monkeypatch, path, serving, body
):
    from sglang.srt.entrypoints.http_server import app
    from sglang.srt.managers.io_struct import GenerateReqInput

    async def handle_request(request, raw_request):
        inner = GenerateReqInput(text=["A", "B"], sampling_params={})
        return await tokenizer_manager.generate_request(inner, raw_request).__anext__()

    monkeypatch.setattr(app.state, serving, SimpleNamespace(handle_request=handle_request), raising=False)
    assert server(path, {**body, "lora": BOTH}).mixes == [BOTH, BOTH]
    assert server(path, {**body, "model": "llama:math"}).mixes == [{"math": 1}] * 2
    assert server(path, body).mixes == [{}, {}]
    assert server(path, {**body, "lora": {"maht": 1}}).status == 400


def test_embeddings_and_encode(server):
    assert server("/v1/embeddings", {"model": "llama", "input": ["A", "B"], "lora": [BOTH, None]}).mixes == [BOTH, {}]
    assert server("/encode", {"text": "A", "lora": BOTH}).mixes == [BOTH]
    assert server("/classify", {"text": "A", "lora_path": "maht"}).status == 400


def test_vertex_reads_its_parameters(server):
    body = {"instances": [{"text": "A"}, {"text": "B"}], "parameters": {"lora": [BOTH, "math"]}}
    answer = server("/vertex_generate", body)
    assert (answer.status, answer.mixes) == (200, [BOTH, {"math": 1}]), answer.text
    assert server("/vertex_generate", {**body, "parameters": {"lora": {"maht": 1}}}).status == 400


def test_an_evicted_adapter_can_be_asked_for_by_model(server):
    assert server("/v1/completions", {**BODIES["/v1/completions"], "model": "llama:old:0.5,json:0.25"}).mixes == [
        {"json": 0.25, "old": 0.5}
    ]


def test_an_adapter_called_default_is_not_the_model_of_requests_without_one(server, tokenizer_manager):
    refs = tokenizer_manager.lora_ref_cache
    refs["default"] = tokenizer_manager.lora_registry._registry["default"] = refs["math"]
    assert server("/v1/completions", {"prompt": "x"}).mixes == [{}]
    assert server("/v1/completions", {"prompt": "x", "model": "default"}).mixes != [{}]


def test_models_are_listed_and_answered_for(server):
    listed = [card["id"] for card in server("/v1/models", method="GET").json["data"]]
    assert listed == ["llama", "math", "json", "org:math"]
    for name in listed:
        card = server(f"/v1/models/{name}", method="GET")
        assert (card.status, card.json["id"]) == (200, name)
        assert card.json["parent"] == (None if name == "llama" else "llama")
    assert server("/v1/models/llama:math:0.5,json:0.25", method="GET").json["root"] == '{"json":0.25,"math":0.5}'
    missing = server("/v1/models/maht", method="GET")
    assert (missing.status, missing.json["error"]["code"]) == (404, "model_not_found")


def test_requests_at_the_same_time_keep_their_own_mixes(server, tokenizer_manager):
    from sglang.srt.entrypoints.http_server import app

    async def ask(client, path, weight):
        stream = weight % 2 == 1 and not path.startswith(
            "/api"
        )  # Ollama's last chunk, our stub's only one, has no text
        body = {**BODIES[path], "stream": stream, "lora": {"math": weight} if weight else None}
        text = (await client.post(path, json=body)).text
        said = f"math={weight}" if weight else "base"
        return None if re.search(rf"\b{said}\b", text) else (path, weight, text)

    async def ask_all():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://server") as client:
            return await asyncio.gather(*(ask(client, path, weight) for path in BODIES for weight in range(20)))

    assert list(filter(None, asyncio.run(ask_all()))) == []


def test_openais_client(server, monkeypatch, capsys):
    """The example, with its client connected to the app."""
    from sglang.srt.entrypoints.http_server import app

    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "async_client.py"))
    client = httpx.AsyncClient(transport=httpx.ASGITransport(app=app))
    connect = partial(AsyncOpenAI, base_url="http://server/v1", api_key="none", http_client=client)
    monkeypatch.setitem(example["main"].__globals__, "AsyncOpenAI", lambda **_: connect())
    monkeypatch.setattr("sys.argv", ["async_client.py"])
    asyncio.run(example["main"]())
    answers = capsys.readouterr().out
    assert answers.count("math=0.7/json=0.3") + answers.count("json=0.3/math=0.7") == 2
    assert "404" in answers and "400" in answers and "math-typo" in answers


def test_without_the_flag_sglang_is_as_it_was(server, monkeypatch):
    monkeypatch.delenv("SGLANG_LORA_TREE")
    assert server("/v1/completions", {"prompt": "x", "model": "maht", "lora": BOTH}).mixes == [{}]
    assert server("/v1/completions", {"prompt": "x", "model": "llama:math"}).mixes == [{"math": 1}]
    assert server("/v1/responses", {**BODIES["/v1/responses"], "model": "maht"}).status == 404
    assert server("/generate", {"text": "x", "lora_path": "json"}).mixes == [{"json": 1}]


def test_one_request_does_not_leak_its_mix_into_the_next(server):
    assert server("/generate", {"text": "x", "lora": BOTH}).mixes == [BOTH]
    assert server("/generate", {"text": "x"}).mixes == [{}]


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/release_memory_occupation", {}),
        ("POST", "/resume_memory_occupation", {}),
        ("POST", "/update_weights_from_disk", {"model_path": "x"}),
        ("POST", "/update_weights_from_tensor", {"serialized_named_tensors": ["AA=="]}),
        ("POST", "/update_weights_from_distributed", {"names": [], "dtypes": [], "shapes": []}),
        ("POST", "/begin_weight_update", {}),
        ("POST", "/send_weights_to_remote_instance", {"master_address": "x", "ports": "1"}),
        ("POST", "/weights_checker", {"action": "reset_tensors"}),
        ("GET", "/start_expert_distribution_record", None),
        ("POST", "/dump_expert_distribution_record", None),
    ],
)
def test_an_operation_that_cannot_be_right_is_a_400_with_the_reason(server, monkeypatch, method, path, body):
    apply_hooks(monkeypatch, operation_hooks.HOOKS)
    answer = server(path, body, method=method)
    assert answer.status == 400, answer.text
    assert "refused with --lora-tree: " in answer.json["error"]["message"]


NOT_GENERATING = {
    *("openai_v1_tokenize", "openai_v1_detokenize", "anthropic_v1_count_tokens", "ollama_show", "v1_cancel_responses"),
    *(
        "openai_v1_audio_transcriptions",
        "open_session",
        "close_session",
        "abort_request",
        "parse_function_call_request",
    ),
    *("separate_reasoning_request", "pause_generation", "continue_generation"),
}


def test_no_generating_endpoint_is_missing_from_the_table():
    """A new SGLang may bring endpoints: each POST is in the table, an administrator's, or one without generation."""
    from sglang.srt.entrypoints.http_server import app

    posts = [route.endpoint for route in app.router.routes if "POST" in (getattr(route, "methods", None) or ())]
    public = {endpoint.__name__ for endpoint in posts if not hasattr(endpoint, "_auth_level")}
    assert public - NOT_GENERATING == set(http_hooks.ENDPOINTS)
