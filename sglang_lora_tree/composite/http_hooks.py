"""The hooks in SGLang's HTTP server: mixes are read from the JSON body, at one place, for every endpoint.

SGLang's endpoints drop unknown body fields (``lora``, ``merged_adapters``) in silence and answer an unknown ``model``
with the base model. So the body is read where all of them get it, in ``ORJSONRequest.json``, before it is validated
and before a stream starts. What it asks for is left in the request's scope for ``request_hooks``. A refusal is a 400
(an unknown ``model``: 404) in the shape of the endpoint.

=======================  =================  =====================================================
endpoint                 mix fields         ``model``
=======================  =================  =====================================================
/generate                one per prompt     not a field
/encode, /classify       one per prompt     not a field
/vertex_generate         one per instance,  not a field
                         in parameters
/v1/completions          one per prompt     adapter, base:mix, mix; unknown: 404
/v1/embeddings           one per prompt     the same
/v1/chat/completions,    one                the same
/invocations
/v1/responses,           one                the same
/v1/score, /v1/classify
/v1/messages,            one                adapter, base:mix, mix; unknown: the base model, because
/api/chat,                                  clients of these APIs send fixed names of other models
/api/generate
/v1/rerank,              one                as above
/v1/decisions,
/v1/systemone
/tokenize, /detokenize,  not read           not read: tokens are the same for every adapter
count_tokens
/v1/audio, /v1/realtime  not JSON           a language model does not serve them
/v1/models[/{model}]     lists (answers for) registered adapters; answers for mixes of them too
=======================  =================  =====================================================

"One" is one mix for the whole request; "one per prompt" also allows a list, as long as the batch.
Of a score, rank or decision request, every inner prompt runs under the request's mix. A response's ``model`` is what
the request said.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from sglang.srt.entrypoints.api_contract import generate_contract_error
from sglang.srt.plugins.hook_registry import HookType

from sglang_lora_tree.composite.mix import MixError
from sglang_lora_tree.composite.request_body import Naming, UnknownModelError, restore_repeats, take_mixes
from sglang_lora_tree.composite.request_hooks import PROMPT_FIELDS, SCOPE_KEY, naming_of
from sglang_lora_tree.config import current_settings
from sglang_lora_tree.refusals import OperationError


@dataclass(frozen=True)
class Endpoint:
    """How an endpoint's body is read."""

    shape: str
    """Of its errors: native, openai, ollama, or sglang (SGLang's handler knows it)."""
    model: str = "strict"
    """See :func:`take_mixes`."""
    prompt_fields: tuple[str, ...] = ()
    """The fields that may hold a batch."""


ENDPOINTS = {
    "generate_request": Endpoint("native", "ignored", PROMPT_FIELDS),
    "encode_request": Endpoint("native", "ignored", PROMPT_FIELDS),
    "classify_request": Endpoint("native", "ignored", PROMPT_FIELDS),
    "vertex_generate": Endpoint("native", "ignored", ("instances",)),
    "openai_v1_completions": Endpoint("openai", prompt_fields=("prompt",)),
    "openai_v1_chat_completions": Endpoint("openai"),
    "sagemaker_chat_completions": Endpoint("openai"),
    "openai_v1_embeddings": Endpoint("openai", prompt_fields=("input",)),
    "openai_v1_classify": Endpoint("openai"),
    "v1_score_request": Endpoint("openai"),
    "v1_responses_request": Endpoint("sglang"),
    "v1_rerank_request": Endpoint("openai", "lenient"),
    "v1_decisions_request": Endpoint("openai", "lenient"),
    "systemone_decisions": Endpoint("openai", "lenient"),
    "anthropic_v1_messages": Endpoint("sglang", "lenient"),
    "ollama_chat": Endpoint("ollama", "lenient"),
    "ollama_generate": Endpoint("ollama", "lenient"),
}
"""By the name of the endpoint's function, because the paths of some can be changed by environment variables."""


class Refusal(HTTPException):
    """A request that is refused with a body of its own shape."""

    def __init__(self, status_code: int, message: str, content: dict[str, Any]) -> None:
        super().__init__(status_code, message)
        self.content = content


async def read_mixes(original: Callable[..., Awaitable[Any]], request: Any) -> Any:
    """AROUND ``ORJSONRequest.json``: take the mix fields out of the body, leave what they ask for in the scope.

    Raises:
        HTTPException: 400 or 404, see the module's head.
    """
    body = await original(request)
    endpoint = ENDPOINTS.get(getattr(request.scope.get("endpoint"), "__name__", ""))
    if current_settings() is None or endpoint is None or not isinstance(body, dict) or SCOPE_KEY in request.scope:
        return body  # json() hands out the same body again, by then without the fields
    from sglang.srt.entrypoints.http_server import get_global_state

    try:
        nested = endpoint is ENDPOINTS["vertex_generate"] and isinstance(body.get("parameters"), dict)
        restore_repeats(body, await request.body(), model=endpoint.model, inside="parameters" if nested else None)
        request.scope[SCOPE_KEY] = _take_mixes(body, naming_of(get_global_state().tokenizer_manager), endpoint)
    except MixError as error:
        raise _refuse(error, endpoint.shape) from None
    return body


def _take_mixes(body: MutableMapping[str, Any], naming: Naming, endpoint: Endpoint) -> str | list[str | None] | None:
    parameters = body.get("parameters")
    if endpoint is ENDPOINTS["vertex_generate"] and isinstance(parameters, dict):
        # Vertex nests SGLang's fields; the prompts stand outside.
        nested = {**parameters, "instances": body.get("instances")}
        mixes = take_mixes(nested, naming, prompt_fields=endpoint.prompt_fields)
        body["parameters"] = {name: value for name, value in nested.items() if name != "instances"}
        error = generate_contract_error({"text": "", **body["parameters"]})  # SGLang asks it of /generate alone
        if error is not None:
            raise MixError(f"parameters: {error}")
        return mixes
    return take_mixes(body, naming, prompt_fields=endpoint.prompt_fields, model=endpoint.model)


def _refuse(error: MixError, shape: str) -> HTTPException:
    message = str(error)
    unknown_model = isinstance(error, UnknownModelError)
    status = 404 if unknown_model else 400
    if shape == "sglang":
        return HTTPException(status, message)
    content: dict[str, Any]
    if shape == "ollama":
        content = {"error": message}
    elif shape == "openai" and not unknown_model:  # as OpenAIServingBase.create_error_response
        content = {"object": "error", "message": message, "type": "BadRequest", "param": None, "code": 400}
    else:
        content = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": status}}
        if unknown_model:  # as OpenAI, and GET /v1/models/{model}
            content["error"] |= {"param": "model", "code": "model_not_found"}
    return Refusal(status, message, content)


def prepare_app(*_: Any, **__: Any) -> None:
    """BEFORE ``http_server._setup_and_run_http_server``: teach the app our errors and GET /v1/models/{model}."""
    if current_settings() is None:
        return
    from sglang.srt.entrypoints import http_server

    app: FastAPI = http_server.app
    app.add_exception_handler(Refusal, _answer_refusal)
    app.add_exception_handler(OperationError, _answer_operation_error)
    names = [getattr(getattr(route, "endpoint", None), "__name__", None) for route in app.router.routes]
    if retrieve_model_or_adapter.__name__ in names:
        return
    app.add_api_route(
        "/v1/models/{model:path}", retrieve_model_or_adapter, methods=["GET"], response_class=JSONResponse
    )
    # The first route that matches answers.
    app.router.routes.insert(names.index("retrieve_model"), app.router.routes.pop())


async def _answer_refusal(request: Request, refusal: Exception) -> JSONResponse:
    assert isinstance(refusal, Refusal)
    return JSONResponse(refusal.content, refusal.status_code)


async def _answer_operation_error(request: Request, error: Exception) -> JSONResponse:
    """With the fields that SGLang's endpoints of this kind have, and the one that its others have."""
    return JSONResponse({"success": False, "message": str(error), "error": {"message": str(error)}}, 400)


async def retrieve_model_or_adapter(model: str) -> Any:
    """GET /v1/models/{model} for the base model, registered adapters and mixes of them (SGLang's: the base only)."""
    from sglang.srt.entrypoints import http_server
    from sglang.srt.entrypoints.openai.protocol import ModelCard

    tokenizer_manager = http_server.get_global_state().tokenizer_manager
    served, loaded = tokenizer_manager.served_model_name, tokenizer_manager.lora_registry.get_all_adapters()
    if model == served:
        return await http_server.retrieve_model(model)
    naming = naming_of(tokenizer_manager)
    try:
        mix = Naming(loaded, naming.base, naming.max_members).parse_model(model)
    except MixError:
        mix = None
    if mix is None:
        return await http_server.retrieve_model(model)
    root = loaded[model].lora_path if model in loaded else mix.text
    return ModelCard(id=model, root=root, parent=served, max_model_len=None)


def accept_model(original: Callable[..., Any], serving: Any, model: str | None) -> Any:
    """AROUND ``OpenAIServingResponses._validate_model``, which knows neither evicted adapters nor mixes alone."""
    if current_settings() is None:
        return original(serving, model)
    try:
        if model is not None:
            naming_of(serving.tokenizer_manager).parse_model(model)
        return None
    except MixError:
        return original(serving, model)


HOOKS: list[tuple[str, Callable[..., Any], HookType]] = [
    ("sglang.srt.entrypoints.http_server.ORJSONRequest.json", read_mixes, HookType.AROUND),
    ("sglang.srt.entrypoints.http_server._setup_and_run_http_server", prepare_app, HookType.BEFORE),
]
if find_spec("openai_harmony") is not None:
    # Without that package SGLang has no /v1/responses, and the module cannot be imported.
    HOOKS.append(
        (
            "sglang.srt.entrypoints.openai.serving_responses.OpenAIServingResponses._validate_model",
            accept_model,
            HookType.AROUND,
        )
    )
