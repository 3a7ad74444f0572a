"""GET /lora_tree on a FastAPI app, with SGLang's own rule for --api-key; the scheduler is a stub."""

from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from sglang_lora_tree.config import ENVIRONMENT_VARIABLE
from sglang_lora_tree.observability.http_hooks import add_route
from sglang_lora_tree.observability.state_hooks import NODES_WANTED


@pytest.fixture
def client(monkeypatch):
    """Make a client; ``tree``: what the scheduler says, ``flag``: whether --lora-tree is on."""
    from sglang.srt.entrypoints import http_server
    from sglang.srt.utils.auth import add_api_key_middleware

    def make(tree, flag=True, api_key=None):
        async def ask(request):
            assert request.rid == NODES_WANTED
            return [SimpleNamespace(internal_state={} if tree is None else {"lora_tree": tree})]

        manager = SimpleNamespace(auto_create_handle_loop=lambda: None, get_internal_state_communicator=ask)
        app = FastAPI()
        monkeypatch.setattr(http_server, "app", app)
        monkeypatch.setattr(http_server, "get_global_state", lambda: SimpleNamespace(tokenizer_manager=manager))
        if flag:
            monkeypatch.setenv(ENVIRONMENT_VARIABLE, "1")
        else:
            monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
        add_route()
        add_route()
        if api_key:
            add_api_key_middleware(app, api_key=api_key, admin_api_key=None)
        assert sum(getattr(route, "path", None) == "/lora_tree" for route in app.routes) == flag
        return TestClient(app)

    return make


def test_it_answers_what_the_scheduler_says(client):
    answer = client({"nodes": [1]}).get("/lora_tree")
    assert (answer.status_code, answer.json()) == (200, {"nodes": [1]})


def test_an_api_key_covers_it(client):
    app = client({"nodes": []}, api_key="secret")
    assert app.get("/lora_tree").status_code == 401
    assert app.get("/lora_tree", headers={"Authorization": "Bearer secret"}).status_code == 200


def test_without_the_flag_there_is_no_route(client):
    assert client(None, flag=False).get("/lora_tree").status_code == 404


def test_a_scheduler_without_a_tree(client):
    answer = client(None).get("/lora_tree")
    assert answer.status_code == 404 and "without --lora-tree" in answer.text
