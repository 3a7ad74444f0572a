"""Whatever one client sends, everybody else's answers stay right and the server lives."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from .conftest import Live, on
from .test_api import MIX, QUESTION, Client, prompt_of

pytestmark = on("float32")

MIXES: list[Any] = [None, "math", MIX, {"upper": 1.5}]


@pytest.fixture
def client(live: Live) -> Client:
    return Client(live)


@contextmanager
def others(client: Client) -> Iterator[None]:
    """Requests that run beside, under adapters, mixes and none: every answer must be the one from before."""
    expected = [client.native(lora=mix) for mix in MIXES]
    over = threading.Event()

    def ask(place: int) -> int:
        count = 0
        while not over.is_set() or not count:
            place = (place + 1) % len(MIXES)
            assert client.native(lora=MIXES[place]) == expected[place], f"beside, under {MIXES[place]}"
            count += 1
        return count

    with ThreadPoolExecutor(2) as pool:
        asking = [pool.submit(ask, place) for place in range(2)]
        try:
            yield
        finally:
            over.set()
            for one in asking:
                assert one.result(60) > 0
    client.server.check_at_rest()


def test_a_request_that_would_stop_the_scheduler_is_a_400(client: Client) -> None:
    bodies: list[tuple[dict[str, Any], str]] = [
        ({"text": ""}, "the prompt is empty"),
        ({"input_ids": [[1], []], "lora": ["math", "json"]}, "the prompt is empty"),
        ({"input_ids": [-1]}, "there is no token -1"),
        ({"input_ids": [[1], [1000]], "lora": ["math", "json"]}, "there is no token 1000"),
        ({"text": "x", "return_logprob": True, "top_logprobs_num": 1000}, "top_logprobs_num 1000"),
        ({"text": "x", "sampling_params": {"top_k": 2**31}}, "top_k = 2147483648"),
        ({"text": "x", "rid": "HEALTH_CHECK_1"}, "the server's own"),
        ({"text": "x", "positional_embed_overrides": [[1, [1.0]]]}, "positional_embed_overrides"),
        ({"text": "x", "lora": [{"name": "math", "scale": 1e39}]}, "range of float32"),
        ({"text": "x", "return_logprob": True, "logprob_start_len": -2}, "logprob_start_len = -2"),
        ({"text": "x", "return_logprob": True, "top_logprobs_num": [1, 2]}, "top_logprobs_num: a list of 2"),
        ({"text": ["x", "y"], "return_logprob": [True]}, "return_logprob: a list of 1 for a batch of 2"),
        ({"text": "x", "sampling_params": {"temperature": 1e-5, "repetition_penalty": 1e-36}}, "repetition_penalty"),
        ({"text": "x", "sampling_params": {"min_new_tokens": 1, "stop_token_ids": [1000000]}}, "stop_token_ids 1000000"),
        ({"text": "x", "return_logprob": True, "token_indices_to_pool": [5]}, "token_indices_to_pool (setwise scores)"),
        ({"text": "x", "return_logprob": True, "token_indices_to_pool": [0]}, "token_indices_to_pool (setwise scores)"),
        ({"text": "x", "session_params": {"id": []}}, "session_params: id = []"),
    ]
    with others(client):
        for body, says in bodies:
            response = client.server.post("/generate", {"lora": "math", "sampling_params": {"max_new_tokens": 2}, **body})
            assert response.status_code == 400 and says in response.text, (body, response.text)
        response = client.complete(client.base, "x", logprobs=1000, lora="math")
        assert response.status_code == 400, response.text
        for parameters in ({"sampling_params": {"regex": ["a"]}}, {"sampling_params": {"temperature": "hot"}}):
            body = {"instances": [{"text": "x"}], "parameters": {"lora": "math", **parameters}}
            response = client.server.post("/vertex_generate", body)
            assert response.status_code == 400, response.text


def test_numbers_that_are_none_stop_nobody(client: Client) -> None:
    """Weights that overflow, and a bias beyond float32, next to others that sample too."""
    params = {"max_new_tokens": 2, "temperature": 0.8, "top_p": 0.9}
    with others(client):
        for more in ({"lora": {"math": 1e30}}, {"sampling_params": {**params, "logit_bias": {"5": 1e39}}}):
            response = client.server.post("/generate", {"text": "x", "lora": "math", "sampling_params": params, **more})
            assert response.status_code == 200, response.text


def test_what_sglang_refuses_in_the_scheduler_needs_no_adapter(client: Client) -> None:
    """It runs such requests for one token, also where their adapters are on no GPU."""
    bodies: list[dict[str, Any]] = [
        {"return_logprob": True, "logprob_start_len": 1000, "sampling_params": {"max_new_tokens": 2}},
        {"sampling_params": {"max_new_tokens": 2, "regex": "(["}},
        {"sampling_params": {"max_new_tokens": 2, "json_schema": '{"type": 5}'}},
    ]
    expected = client.native(lora=MIXES[1])
    for mix in ("math", {"math": 0.5, "json": 0.5}):
        for body in bodies:
            client.server.flush()
            response = client.server.post("/generate", {"text": "x", "lora": mix, **body})
            assert response.status_code == 400, (body, response.text)
    assert client.native(lora=MIXES[1]) == expected


def test_what_a_running_server_cannot_do_right_is_refused(client: Client) -> None:
    asked: list[tuple[str, dict[str, Any], str]] = [
        ("/release_memory_occupation", {}, "adapters live in the memory"),
        ("/resume_memory_occupation", {}, "adapters live in the memory"),
        ("/update_weights_from_disk", {"model_path": "x"}, "start another server"),
        ("/update_weights_from_tensor", {"serialized_named_tensors": ["AA=="]}, "start another server"),
        ("/weights_checker", {"action": "reset_tensors"}, "start another server"),
        ("/send_weights_to_remote_instance", {"master_address": "x", "ports": "1"}, "LoRA wrappers"),
        ("/start_expert_distribution_record", {}, "experts"),
    ]
    with others(client):
        for path, body, says in asked:
            response = client.server.post(path, body)
            assert response.status_code == 400 and says in response.text, (path, response.text)


def test_a_pause_delays_answers_and_changes_none(client: Client) -> None:
    """Both ways to pause; adapters are loaded meanwhile, and with nothing running the cache is flushed under waiting requests."""
    server, math = client.server, client.live.adapters["math"]
    with others(client):
        for mode in "in_place", "retract":
            assert server.post("/pause_generation", {"mode": mode}).status_code == 200
            try:
                assert server.load("paused", math).status_code == 200
                assert mode == "in_place" or server.post("/flush_cache").status_code == 200
                assert server.unload("paused").status_code == 200
            finally:
                assert server.post("/continue_generation").status_code == 200
            assert client.native(lora="math")


def test_a_session_s_turns_have_mixes_of_their_own(client: Client) -> None:
    server, sampling = client.server, {"temperature": 0, "max_new_tokens": 8}
    session = server.post("/open_session", {"capacity_of_str_len": 1000}).json()

    def turn(text: str, mix: Any, after: str | None) -> dict[str, Any]:
        body = {"text": text, "lora": mix, "sampling_params": sampling, "session_params": {"id": session, "rid": after}}
        response = server.post("/generate", body)
        assert response.status_code == 200, response.text
        return dict(response.json())

    first = turn(prompt_of(QUESTION), "math", None)
    second = turn(prompt_of("And Ann?"), MIX, first["meta_info"]["id"])
    tokens = [server.post("/tokenize", {"prompt": prompt_of(text)}).json()["tokens"] for text in (QUESTION, "And Ann?")]
    alone = {"input_ids": tokens[0] + first["output_ids"] + tokens[1], "lora": MIX, "sampling_params": sampling}
    assert second["output_ids"] == server.post("/generate", alone).json()["output_ids"]
    again = {"text": "x", "lora": "math", "sampling_params": sampling, "session_params": {"id": session, "replace": True}}
    assert server.post("/generate", again).status_code == 200, "SGLang's scheduler stopped at a session that is begun anew"
    assert client.native(lora="math")
    assert server.post("/close_session", {"session_id": session}).status_code == 200


def test_names_that_come_and_go_under_requests(client: Client, seconds: float = 8.0) -> None:
    """Loads, unloads and requests for the same few names by many clients: an answer is that of bytes the name could have had, or
    a 400; and nothing is left held."""
    kinds = ("math", "json", "upper")
    allowed = {client.native(lora=kind) for kind in kinds}
    refusals = ("no adapter is called", "not loaded", "loaded already", "does not exist", "Failed to implicitly load")
    deadline = time.monotonic() + seconds

    def play(seed: int) -> None:
        rng = random.Random(seed)
        while time.monotonic() < deadline:
            name, action = f"n{rng.randrange(3)}", rng.random()
            if action < 0.3:
                response = client.server.load(name, client.live.adapters[rng.choice(kinds)], pinned=rng.random() < 0.2)
            elif action < 0.5:
                response = client.server.unload(name)
            else:
                sampling = {"temperature": 0, "max_new_tokens": 24}
                body = {"text": prompt_of(QUESTION), "lora": name, "sampling_params": sampling}
                response = client.server.post("/generate", body)
                if response.status_code == 200:
                    assert response.json()["text"] in allowed
            assert response.status_code == 200 or any(text in response.text for text in refusals), response.text

    with others(client), ThreadPoolExecutor(6) as pool:
        for playing in [pool.submit(play, seed) for seed in range(6)]:
            playing.result(60 + seconds)
    for card in client.models():
        if card["id"].startswith("n") and card["id"] not in client.live.adapters:
            assert client.server.unload(card["id"]).status_code == 200
