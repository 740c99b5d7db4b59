"""Runs implementations at cases, each in a process of its own that outlives its cases but not its mistakes."""

import json
import os
import selectors
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from thalweg.kernels.bench.cases import Case

START_SECONDS = 120.0
CASE_SECONDS = 120.0  # a peer's compiler may run in it
_STARTS = 3  # a process that dies is started again, so often in all


class Worker:
    """The process of one implementation."""

    def __init__(self, impl: str, command: list[str], environment: dict[str, str]) -> None:
        self.impl = impl
        self.hello: dict[str, Any] = {}
        self._command, self._environment = command, environment
        self._starts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115

    def start(self) -> None:
        """Starts the process; `wait_until_ready` collects its first line, so that several can start at once."""
        self._starts += 1
        self._pending = b""
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, env=self._environment
        )

    def wait_until_ready(self) -> list[str]:
        """What could not be imported, in lines; after a crash or none of its operations it is not `alive`."""
        hello, failure = self._read(START_SECONDS)
        if hello is None:
            return [failure]
        self.hello = hello
        if not hello["ops"]:
            self.stop()
        return hello["failures"]

    @property
    def alive(self) -> bool:
        return self._process is not None

    def run(self, case: Case, seed: int) -> tuple[list[dict[str, Any]], list[str]]:
        """(results, failures) at `case`; starts the process again where an earlier case ended it."""
        if not self.alive:
            if not self.hello.get("ops"):
                return [], []  # said when it started
            if self._starts >= _STARTS:
                return [], [f"{self.impl}: not run, its process has ended {self._starts} times"]
            self.start()
            failures = self.wait_until_ready()
            if not self.alive:
                return [], failures
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"case": asdict(case), "seed": seed}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return [], [self._died()]
        answer, failure = self._read(CASE_SECONDS)
        if answer is None:
            return [], [failure]
        return answer["results"], answer["failures"]

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _read(self, seconds: float) -> tuple[dict[str, Any] | None, str]:
        """The next line as JSON, or None and what happened instead."""
        assert self._process is not None and self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._pending:
                if not selector.select(seconds):
                    self.stop()
                    return None, f"{self.impl}: no answer in {seconds:.0f} s, stopped"
                data = os.read(self._process.stdout.fileno(), 1 << 16)
                if not data:
                    return None, self._died()
                self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        return json.loads(line), ""

    def _died(self) -> str:
        assert self._process is not None
        self._process.communicate()
        code, self._process = self._process.returncode, None
        self._log.seek(0)
        lines = [line for line in self._log.read().decode(errors="replace").splitlines() if line.strip()]
        return f"{self.impl}: the process ended with code {code}: {lines[-1][:300] if lines else 'it said nothing'}"


def workers(benchmark: str, impls: list[str], peers: Path | None) -> list[Worker]:
    """A worker for each implementation of a benchmark, not started. `peers`: a folder of `benchmarks/peers.py`, or None."""
    made = []
    for impl in impls:
        command = [sys.executable, "-m", "thalweg.kernels.bench.worker", benchmark, impl]
        made.append(Worker(impl, command, _environment(None if impl in ("thalweg", "torch") else peers)))
    return made


def _environment(peers: Path | None) -> dict[str, str]:
    environment = dict(os.environ)
    package = str(Path(__file__).resolve().parents[3])
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(peers.resolve()) if peers else "", package, os.environ.get("PYTHONPATH", "")])
    )
    environment.setdefault("CUDA_HOME", "/usr/local/cuda")
    nvrtc = _folder_of_nvrtc(environment["CUDA_HOME"])
    if nvrtc is not None:
        environment["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, [nvrtc, os.environ.get("LD_LIBRARY_PATH", "")]))
    return environment


def _folder_of_nvrtc(cuda_home: str) -> str | None:
    """DeepGEMM loads libnvrtc.so by its plain name: torch's own copy where it has one, else the toolkit's."""
    import torch

    places = [Path(torch.__file__).parents[1] / "nvidia", Path(cuda_home)]
    found = (file for place in places for file in sorted(place.rglob("libnvrtc.so.1[0-9]")))
    return next((str(file.parent) for file in found), None)
