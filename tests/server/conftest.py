import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

import thalweg
from thalweg.engine.engine import Engine
from thalweg.engine.params import Params
from thalweg.engine.pools import CacheSettings
from thalweg.engine.sampler import Drawn
from thalweg.engine.text import Text
from thalweg.models.interface import Model
from thalweg.models.open import TINY, open_model

MODEL = "thalweg-tiny"
PATIENCE = 60.0  # seconds until a condition that must come true counts as missed


class Server:
    """A running `thalweg serve` and what it printed."""

    def __init__(self, *options: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "thalweg", "serve", "--port", "0", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(Path(thalweg.__file__).parents[1]), "OMP_NUM_THREADS": "1"},
        )
        assert self.process.stdout is not None and self.process.stderr is not None
        self.said = self.process.stdout.readline()
        found = re.search(r"http://[\d.]+:\d+", self.said)
        self.url = found[0] if found else ""
        self.errors = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.errors += line

    def wait_ready(self) -> "Server":
        until(lambda: self.process.poll() is not None or self.get("/ready").status_code == 200)
        assert self.process.poll() is None, self.errors
        return self

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=PATIENCE)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(self.url + path, json={"model": MODEL, **body}, timeout=PATIENCE)

    def engine(self) -> dict[str, Any]:
        return self.get("/server_info").json()["engine"]

    def metric(self, name: str) -> float:
        lines = [line for line in self.get("/metrics").text.splitlines() if line.startswith(f"thalweg:{name} ")]
        return float(lines[0].split()[-1]) if lines else 0.0

    def exit_code(self) -> int:
        code = self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        return code

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None and self.process.stderr is not None
        self.process.stdout.close()
        self._reader.join(PATIENCE)
        self.process.stderr.close()


def until(condition: Callable[[], bool]) -> None:
    """Returns once the condition holds; fails where it never does."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "did not come true"
        time.sleep(0.05)


def gone(process_id: int) -> bool:
    """Whether a process has ended, read by its parent or not."""
    try:
        state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in "ZX"


@contextmanager
def serving(*options: str) -> Iterator[Server]:
    server = Server(*options)
    try:
        yield server.wait_ready()
    finally:
        server.end()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all tests that leave it as it was."""
    with serving("--profile-folder", str(tmp_path_factory.mktemp("profiles"))) as running:
        yield running


@pytest.fixture(scope="session")
def tiny() -> Model:
    return open_model(TINY)


@pytest.fixture(scope="session")
def bare(tiny: Model) -> Callable[[list[int], Params], tuple[str, list[Drawn]]]:
    """The engine without a server: text and tokens of one prompt alone."""
    engine = Engine(tiny, Text(TINY, 256), CacheSettings(1024, 1024), prefix_reuse=False)

    def write(prompt: list[int], params: Params) -> tuple[str, list[Drawn]]:
        outputs = list(engine.stream(prompt, params))
        return "".join(output.text for output in outputs), [drawn for output in outputs for drawn in output.drawn]

    return write
