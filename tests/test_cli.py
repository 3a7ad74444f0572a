"""The console command: exit codes, and messages that say what to do."""

import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from sglang_lora_tree.cli import main
from tests.observability.snapshots import small_snapshot

GOOD = json.dumps(small_snapshot())


@pytest.fixture
def serve():
    """Start a server that answers GET /lora_tree with this status and body; its URL."""
    servers = []

    def start(status=200, body=GOOD, key=None):
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                allowed = key is None or self.headers["Authorization"] == f"Bearer {key}"
                self.send_response(404 if self.path != "/lora_tree" else status if allowed else 401)
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, *_):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def run(capsys, *arguments):
    code = main(arguments)
    out, err = capsys.readouterr()
    return code, out, err


def test_text(serve, capsys):
    code, out, err = run(capsys, "tree", serve())
    assert (code, err) == (0, "") and "adapter math" in out


def test_a_url_may_lack_its_scheme_or_end_in_a_slash(serve, capsys):
    url = serve()
    assert run(capsys, "tree", url.removeprefix("http://"))[0] == 0
    assert run(capsys, "tree", url + "/")[0] == 0


def test_json_is_what_the_server_answers(serve, capsys):
    code, out, _ = run(capsys, "tree", serve(), "--json")
    assert code == 0 and json.loads(out) == json.loads(GOOD)


def test_a_reader_that_stops_early_is_no_error(serve):
    command = [sys.executable, "-m", "sglang_lora_tree.cli", "tree", serve(), "--all"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.wait(60) == 0 and process.stderr.read() == b""


def test_png(serve, capsys, tmp_path):
    file = tmp_path / "tree.png"
    code, out, err = run(capsys, "tree", serve(), "--png", str(file))
    assert code == 0 and "adapter math" in out and str(file) in err
    assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["no/such/folder/tree.png", "tree.nosuchformat"])
def test_a_picture_that_cannot_be_written(serve, capsys, tmp_path, name):
    code, _, err = run(capsys, "tree", serve(), "--png", str(tmp_path / name))
    assert code == 1 and f"the picture {tmp_path / name} cannot be written" in err


def test_api_key(serve, capsys, monkeypatch):
    url = serve(key="secret")
    monkeypatch.delenv("SGLANG_API_KEY", raising=False)
    code, _, err = run(capsys, "tree", url)
    assert code == 1 and "--api-key" in err
    assert run(capsys, "tree", url, "--api-key", "secret")[0] == 0
    monkeypatch.setenv("SGLANG_API_KEY", "secret")
    assert run(capsys, "tree", url)[0] == 0


@pytest.mark.parametrize(
    "status, body, message",
    [
        (404, "{}", "start it with --lora-tree"),
        (500, "boom", "answers 500: boom"),
        (200, "<html>", "is it an SGLang server?"),
        (200, "[]", "is it an SGLang server?"),
        (200, '{"nodes": [], "pool": {}}', "use the same version"),
        (200, '{"nodes": [{"id": 0}], "pool": {}}', "use the same version"),
    ],
)
def test_servers_without_a_tree(serve, capsys, status, body, message):
    code, out, err = run(capsys, "tree", serve(status, body))
    assert code == 1 and out == "" and message in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "url, message", [("http://127.0.0.1:9", "nothing answers at http://127.0.0.1:9"), ("ftp://x", "is not a URL")]
)
def test_no_server(capsys, url, message):
    code, _, err = run(capsys, "tree", url)
    assert code == 1 and message in err and "Traceback" not in err


@pytest.mark.parametrize("arguments", [(), ("tree",), ("grow", "x"), ("tree", "x", "--colour"), ("check",)])
def test_wrong_usage(capsys, arguments):
    code, _, err = run(capsys, *arguments)
    assert code == 2 and "usage: sglang-lora-tree" in err


def test_help_names_both_commands(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0 and "check" in out and "tree" in out


def test_check_is_the_offline_check(capsys, tmp_path):
    code, _, err = run(capsys, "check", str(tmp_path))
    assert code == 1 and "refused:" in err and "adapter_config.json" in err
