"""What benchmarks.kernels has written whenever it is cut, with servers that answer at once."""

from __future__ import annotations

from benchmarks import kernels


class Server:
    start_seconds = 0.0

    def __init__(self, fails: bool = False) -> None:
        self.fails, self.stopped = fails, False

    def start(self) -> None:
        pass

    def wait(self, seconds: float) -> None:
        if self.fails:
            raise RuntimeError("no")

    def stop(self) -> None:
        self.stopped = True

    def generate(self, **body):
        tokens = body["sampling_params"]["max_new_tokens"]
        return [{"meta_info": {"completion_tokens": tokens}}] * len(body["input_ids"])


def run(monkeypatch, tmp_path, names, failing=()):
    servers = {name: Server(name in failing) for name in kernels.SERVERS}
    monkeypatch.setattr(kernels, "make_servers", lambda work: servers)
    monkeypatch.setattr(kernels, "write_adapters", lambda work: None)
    monkeypatch.setattr(kernels.time, "sleep", lambda seconds: None)
    written = []
    kernels.serve(tmp_path, ["decode/1", "decode/8_r64", "prefill/8", "short/1"], names, lambda records: written.append(records))
    assert all(servers[name].stopped for name in names)
    return [[record["metric"] for record in records] for records in written]


def test_the_base_rate_is_written_first_and_then_every_case(monkeypatch, tmp_path):
    written = run(monkeypatch, tmp_path, kernels.WITHOUT_GRAPHS)
    assert written[0] == ["prefill_rate/base"]
    assert {"prefill_vs_base/8", "prefill_vs_base/8/triton_v2", "prefill_vs_base/8/ours_apart"} <= set(written[1])
    assert {"decode_vs_base/1", "short_vs_base/1"} <= set(written[-1])
    of_rank_64 = [metric for metric in written[-1] if "8_r64" in metric]
    assert of_rank_64 == ["decode_vs_base/8_r64/triton_v2_rank_64", "decode_vs_base/8_r64"]


def test_prefill_graphs_are_compared_with_a_base_model_that_has_them(monkeypatch, tmp_path):
    written = run(monkeypatch, tmp_path, kernels.WITH_GRAPHS)
    assert written[0] == ["prefill_rate/base_prefill_graphs"]
    servers = ("", "/ours_prefill_graphs", "/triton_v2_prefill_graphs")
    assert {f"short_vs_base/1{server}" for server in servers} <= set(written[-1])
    assert [metric for metric in written[-1] if "8_r64" in metric] == ["decode_vs_base/8_r64"], "the others have rank 16 alone"


def test_a_server_that_does_not_start_is_left_out(monkeypatch, tmp_path):
    written = run(monkeypatch, tmp_path, ["base", "triton_v2", "ours"], failing=["triton_v2"])
    assert "decode_vs_base/1" in written[-1] and not any("triton_v2" in metric for metric in written[-1])
