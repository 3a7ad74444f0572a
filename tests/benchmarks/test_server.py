"""A benchmark that a time limit ends takes its server along."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
STAND_IN = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""
BENCHMARK = """
import sys, time
from pathlib import Path
from benchmarks.server import ServerProcess
with ServerProcess([], Path(sys.argv[2]), command=("-c", sys.argv[1])) as server:
    print(server.process.pid, flush=True)
    try:
        time.sleep(60)
    except Exception:  # a case that fails; a time limit is none
        time.sleep(60)
"""


def test_a_time_limit_ends_the_server_too(tmp_path: Path) -> None:
    command = [sys.executable, "-c", BENCHMARK, STAND_IN, str(tmp_path / "log")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as benchmark:
        assert benchmark.stdout is not None
        server = psutil.Process(int(benchmark.stdout.readline()))
        benchmark.terminate()
        try:
            assert benchmark.wait(30) != 0
            psutil.wait_procs([server], timeout=5)
            assert not server.is_running(), "the server outlives its benchmark"
        finally:
            if server.is_running():
                server.kill()
