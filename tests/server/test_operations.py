"""What an operator reads: health, readiness, metrics, server_info, profiles; and what a client that leaves gives back."""

import gzip
import json
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.conftest import MODEL, Server, until
from thalweg.models.open import TINY


def test_a_loaded_server_is_healthy_and_ready(server: Server) -> None:
    assert server.get("/health").json() == {"status": "ok"}
    assert server.get("/ready").json() == {"ready": True, "state": "ready"}


def test_server_info_says_what_was_resolved(server: Server) -> None:
    info = server.get("/server_info").json()
    assert info["model"] == MODEL and info["architecture"] == "DeepseekV4"
    settings = info["settings"]
    assert settings["model"] == str(TINY) and settings["context_length"] == settings["kv_tokens"] == 65_536
    assert (settings["kv_layout"], settings["chunk_tokens"], settings["max_requests"]) == ("v4", 256, 16)
    assert set(info["versions"]) == {"thalweg", "python", "fastapi", "torch"}
    assert info["engine"]["state"] == "ready" and info["engine"]["report"]["pages_total"] == 256


def test_metrics_count_what_was_served(server: Server) -> None:
    names = ("prompt_tokens_total", "generation_tokens_total", "time_to_first_token_seconds_count")
    before = [server.metric(name) for name in names]
    steps = server.metric("decode_steps_total")
    assert server.post("/v1/completions", prompt="abc", max_tokens=5, n=2).status_code == 200
    assert [server.metric(name) - old for name, old in zip(names, before, strict=True)] == [8, 10, 2]
    assert server.metric("decode_steps_total") > steps
    families = list(text_string_to_metric_families(server.get("/metrics").text))
    assert {"thalweg:sequences", "thalweg:inter_token_latency_seconds", "thalweg:kv_pages_used"} <= {
        family.name for family in families
    }


def cancelled(server: Server) -> float:
    return server.metric('sequences_total{finish="cancelled"}')


def idle(server: Server) -> bool:
    report = server.engine()["report"]
    return report["running"] == report["waiting"] == 0 and report["pages_used"] == report["pages_cached"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_gives_its_pages_back(server: Server, stream: bool) -> None:
    before, written = cancelled(server), server.metric("generation_tokens_total")
    request: dict[str, Any] = {"model": MODEL, "prompt": "abc", "max_tokens": 5000, "n": 2, "stream": stream}
    body = json.dumps(request | {"ignore_eos": True}).encode()
    url = httpx.URL(server.url)
    with socket.create_connection((url.host, url.port or 80)) as client:
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        until(lambda: server.engine()["report"]["running"] == 2)
        if stream:
            assert client.recv(9) == b"HTTP/1.1 "
    until(lambda: idle(server))
    assert cancelled(server) - before == 2
    assert server.metric("generation_tokens_total") - written < 2 * 5000, "it did not run to its end"


def test_a_profile_is_a_trace_of_the_engine(server: Server) -> None:
    stopped = server.post("/stop_profile")
    assert stopped.status_code == 400 and "start one first" in stopped.json()["error"]["message"]
    trace = Path(server.post("/start_profile").json()["trace"])
    again = server.post("/start_profile")
    assert again.status_code == 400 and "being recorded already" in again.json()["error"]["message"]
    assert server.post("/v1/completions", prompt="abc", max_tokens=2).status_code == 200
    assert server.post("/stop_profile").json() == {"trace": str(trace)}
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert any("sparse_mla" in str(event.get("name")) for event in events)
