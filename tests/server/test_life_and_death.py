"""How a server ends: after its engine died twice, after a drain, at once, or before it began. Nothing is left behind."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.server.conftest import MODEL, PATIENCE, Server, gone, serving, until
from thalweg.models.open import TINY


def client_of(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def begin(client: openai.OpenAI, max_tokens: int) -> Iterator[Any]:
    """A stream that has said something."""
    extra = {"ignore_eos": True}
    stream = client.completions.create(
        model=MODEL, prompt="abc", max_tokens=max_tokens, temperature=0, stream=True, extra_body=extra
    )
    next(stream)
    return stream


def engine_pid(server: Server) -> int:
    return server.engine()["process_id"]


class Background:
    """A request in a thread of its own, and its answer."""

    def __init__(self, server: Server) -> None:
        self.answer: httpx.Response | None = None
        self.thread = threading.Thread(target=self._ask, args=(server,))
        self.thread.start()

    def _ask(self, server: Server) -> None:
        self.answer = server.post("/v1/completions", prompt="abc", max_tokens=5000, ignore_eos=True)

    def wait(self) -> httpx.Response:
        self.thread.join(PATIENCE)
        assert self.answer is not None
        return self.answer


def test_an_engine_that_is_killed_is_replaced_once() -> None:
    with serving() as server, client_of(server) as client:
        first = engine_pid(server)
        stream, whole = begin(client, 5000), Background(server)
        until(lambda: server.engine()["report"]["running"] == 2)
        os.kill(first, signal.SIGKILL)
        with pytest.raises(openai.APIError, match="the engine died"):
            list(stream)
        answer = whole.wait()
        assert answer.status_code == 500
        assert answer.json()["error"] == {
            "message": "the engine died while it worked on this request",
            "type": "server_error",
            "param": None,
            "code": "engine_died",
        }
        assert server.get("/health").status_code == 200
        assert server.get("/ready").status_code == 503
        refused = server.post("/v1/completions", prompt="abc")
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "engine_not_ready"
        server.wait_ready()
        second = engine_pid(server)
        assert second != first and gone(first)
        assert server.post("/v1/completions", prompt="abc", max_tokens=2).status_code == 200
        assert server.metric("engine_restarts_total") == server.engine()["restarts"] == 1
        stream = begin(client, 5000)
        os.kill(second, signal.SIGKILL)
        with pytest.raises(openai.APIError, match="the engine died"):
            list(stream)
        assert server.exit_code() == 3
        assert "the engine's process died (signal SIGKILL); it is started once more" in server.errors
        assert "the engine's process died again (signal SIGKILL)" in server.errors.splitlines()[-1]
        assert "Traceback" not in server.errors
        assert gone(second)


def test_sigterm_lets_running_requests_finish_and_takes_no_new_ones() -> None:
    with serving() as server, client_of(server) as client:
        process = engine_pid(server)
        stream = begin(client, 60)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: server.get("/ready").json()["state"] == "draining")
        refused = server.post("/v1/completions", prompt="abc")
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "shutting_down"
        assert "Retry-After" in refused.headers
        chunks = list(stream)
        assert len(chunks) > 30 and chunks[-1].choices[0].finish_reason == "length"
        assert server.exit_code() == 0
        assert gone(process) and server.errors == ""


def test_a_drain_ends_at_its_deadline_and_says_so_to_who_still_waits() -> None:
    with serving("--drain-seconds", "0.2") as server, client_of(server) as client:
        process = engine_pid(server)
        stream = begin(client, 5000)
        os.kill(process, signal.SIGTERM)  # a supervisor signals every process; the engine leaves it to its parent
        os.kill(process, signal.SIGINT)
        next(stream)
        server.process.send_signal(signal.SIGINT)
        with pytest.raises(openai.APIError, match="the server is going down"):
            list(stream)
        assert server.exit_code() == 0
        assert gone(process) and server.errors == ""


def test_a_second_signal_ends_it_at_once_and_a_killed_server_takes_its_engine_along() -> None:
    with serving() as server, client_of(server) as client:
        process = engine_pid(server)
        stream = begin(client, 5000)
        server.process.send_signal(signal.SIGTERM)
        next(stream)
        time.sleep(1.1)  # two signals within a second count as one
        server.process.send_signal(signal.SIGTERM)
        assert server.exit_code() == 128 + signal.SIGTERM
        until(lambda: gone(process))
    with serving() as server, client_of(server) as client:
        process = engine_pid(server)
        begin(client, 5000)
        server.process.kill()
        server.exit_code()
        until(lambda: gone(process))


def refused(*options: str) -> str:
    """The one line of a server that does not start."""
    command = [sys.executable, "-m", "thalweg", "serve", "--port", "0", *options]
    root = str(Path(sys.modules["thalweg"].__file__ or "").parents[1])
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE, env=os.environ | {"PYTHONPATH": root}
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("thalweg serve: ")
    return done.stderr


def test_a_mistake_in_the_options_is_one_line(server: Server) -> None:
    port = server.url.rpartition(":")[2]
    assert f"port {port} of 127.0.0.1 is in use; give another with --port" in refused("--port", port)
    assert "port 70000: possible are" in refused("--port", "70000")
    assert "drain-seconds is -1.0" in refused("--drain-seconds", "-1")


def test_what_the_engine_cannot_load_is_one_line(tmp_path: Path) -> None:
    assert "nowhere: no such folder" in refused("--model", str(tmp_path / "nowhere"))
    folder = shutil.copytree(TINY, tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{{ ''.__class__.__mro__ }}")
    assert "the chat template is refused" in refused("--model", str(folder))


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {code}"], capture_output=True, text=True
    )


def test_the_http_process_needs_no_torch() -> None:
    assert python("import thalweg.server.run; print('torch' in sys.modules)").stdout == "False\n"


def test_without_the_extra_the_verb_says_what_to_install() -> None:
    done = python("sys.modules['fastapi'] = None; from thalweg.cli import main; sys.exit(main(['serve']))")
    assert done.returncode == 2
    assert done.stderr == "thalweg serve: fastapi is not installed; run: pip install 'thalweg[serve]'\n"
