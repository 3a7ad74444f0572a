"""sglang.lang with adapters: each call's request, and no other, carries its adapters, whatever thread it runs on."""

import json
import runpy
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import sglang

from sglang_lora_tree.lang import RuntimeEndpoint, assistant, function, gen, gen_int, select, user

MIX = {"math": 0.7, "json": 0.3}


@pytest.fixture
def server():
    """A server that answers /generate with the adapters it was asked for, and remembers the bodies."""
    bodies = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.answer({"model_path": "llama"})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            bodies.append(body)
            said = json.dumps(body.get("lora"))
            logprobs = [[-1.0, 1, "a"], [-1.0, 2, "b"], [-1.0, 3, "c"]]
            meta = {
                "prompt_tokens": 3,
                "cached_tokens": 1,
                "input_token_logprobs": logprobs,
                "output_token_logprobs": logprobs,
            }
            answers = [
                {"text": said, "meta_info": meta}
                for _ in range(len(body["text"]) if isinstance(body.get("text"), list) else 1)
            ]
            if body.get("stream"):
                self.answer(f"data: {json.dumps(answers[0])}\n\ndata: [DONE]\n\n".encode())
            else:
                self.answer(answers if isinstance(body.get("text"), list) else answers[0])

        def answer(self, content):
            content = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever)
    thread.start()
    backend = RuntimeEndpoint(f"http://127.0.0.1:{httpd.server_port}")
    backend.bodies = bodies
    yield backend
    httpd.shutdown()
    thread.join()
    httpd.server_close()


@function
def agent(s, adapters):
    s += user("x") + assistant("plan: " + gen("plan", max_tokens=4) + gen("answer", max_tokens=4, adapters=adapters))
    s += gen("after", max_tokens=4)


@pytest.mark.parametrize("adapters", [MIX, "math:0.7,json:0.3", [{"name": "math", "scale": 0.7}], "math", {}])
@pytest.mark.parametrize("use_thread", [True, False])
def test_each_call_carries_its_own_adapters(server, adapters, use_thread):
    state = agent.run(adapters=adapters, backend=server, use_thread=use_thread)
    assert (state["plan"], json.loads(state["answer"]), state["after"]) == ("null", adapters, "null")
    assert ["lora" in body for body in server.bodies] == [False, True, False]


def test_streams(server):
    state = agent.run(adapters=MIX, backend=server, stream=True)
    assert "".join(state.text_iter()).endswith("null") and json.loads(state["answer"]) == MIX
    assert [body.get("lora") for body in server.bodies if body["stream"]] == [None, MIX, None]


def test_forks_run_under_different_mixes_at_once(server):
    mixes = [{"math": 0.1 * i} for i in range(1, 9)]

    @function
    def program(s):
        s += "x"
        forks = s.fork(len(mixes))
        for fork, mix in zip(forks, mixes, strict=True):
            fork += gen("answer", max_tokens=4, adapters=mix)
        s += "".join(fork["answer"] for fork in forks)
        s += gen("last", max_tokens=4, adapters="json")

    state = program.run(backend=server)
    assert state.text() == "x" + "".join(map(json.dumps, mixes)) + '"json"'


def test_batches(server):
    mixes = [{"math": 0.1 * i} for i in range(20)]
    states = agent.run_batch([{"adapters": mix} for mix in mixes], backend=server, num_threads=8)
    assert [json.loads(state["answer"]) for state in states] == mixes
    assert all(state["plan"] == state["after"] == "null" for state in states)


def test_the_example_agent(server, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["agent.py", "--url", server.base_url])
    runpy.run_path(str(Path(__file__).parents[1] / "examples" / "agent.py"), run_name="__main__")
    turns = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()]
    assert turns[:4] == ["base", "json", "math", "{'math': 0.7, 'json': 0.3}"] and len(turns) == 11


@pytest.mark.parametrize("choose", [select, gen])
def test_choices_are_scored_under_the_mix(server, choose):
    @function
    def program(s):
        s += "x" + choose("answer", choices=["a", "b"], adapters=MIX)
        s += choose("after", choices=["a", "b"])

    state = program.run(backend=server)
    assert state["answer"] in ("a", "b") and state["after"] in ("a", "b")
    assert [body.get("lora") for body in server.bodies] == [MIX, MIX, None, None]  # the prefix, then the choices


def test_typed_calls(server):
    @function
    def program(s):
        s += "x" + gen_int("answer", max_tokens=4, adapters="math")

    assert program.run(backend=server)["answer"] == '"math"'


def test_calls_of_sglang_itself_go_on_as_before(server):
    @sglang.function
    def program(s):
        s += "x" + sglang.gen("answer", max_tokens=4)

    assert program.run(backend=server)["answer"] == "null"


@pytest.mark.parametrize("adapters", [{"math": float("nan")}, {"math": object()}])
def test_adapters_that_are_not_json_are_refused_where_they_are_written(adapters):
    with pytest.raises(ValueError, match="adapters="):
        gen("answer", adapters=adapters)


@pytest.mark.filterwarnings("ignore:Error in stream_executor")
def test_what_would_ignore_adapters_is_refused(server):
    plain = sglang.RuntimeEndpoint(server.base_url)
    state = agent.run(adapters=MIX, backend=plain)
    assert "it would ignore them" in str(state.error())

    @function(num_api_spec_tokens=8)
    def speculating(s):
        s += "x" + gen("answer", max_tokens=4, adapters=MIX)

    assert "num_api_spec_tokens" in str(speculating.run(backend=server).error())
