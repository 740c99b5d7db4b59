"""Processes that answer, lie, hang and die."""

import os
import sys
import textwrap

import pytest

from thalweg.kernels.bench import session
from thalweg.kernels.bench.index.cases import Case

CASE = Case(1, 128, 8192)
HELLO = """
import json, sys, os, time
print(json.dumps({"ops": ["topk"], "failures": []}), flush=True)
"""
ANSWER = 'print(json.dumps({"results": [{"seed": json.loads(line)["seed"]}], "failures": []}), flush=True)\n'


def worker(script: str, **environment: str) -> session.Worker:
    command = [sys.executable, "-c", textwrap.dedent(script)]
    return session.Worker("fake", command, {**os.environ, **environment})


def started(script: str) -> session.Worker:
    made = worker(script)
    made.start()
    assert made.wait_until_ready() == []
    return made


def test_a_worker_answers_case_after_case() -> None:
    made = started(HELLO + f"for line in sys.stdin:\n    {ANSWER}")
    assert made.run(CASE, 7) == ([{"seed": 7}], [])
    assert made.run(CASE, 8) == ([{"seed": 8}], [])
    made.stop()
    assert not made.alive


def test_a_crash_is_one_line_with_the_last_words_and_the_next_case_runs() -> None:
    script = (
        HELLO
        + f"""
line = sys.stdin.readline()
if json.loads(line)["seed"] == 1:
    print("loading", file=sys.stderr); print("illegal memory access", file=sys.stderr); os.abort()
{ANSWER}
"""
    )
    made = started(script)
    results, failures = made.run(CASE, 1)
    assert results == []
    assert failures == ["fake: the process ended with code -6: illegal memory access"]
    assert made.run(CASE, 2) == ([{"seed": 2}], [])
    made.stop()


def test_a_process_that_keeps_dying_is_given_up_aloud() -> None:
    made = started(HELLO + "sys.stdin.readline(); sys.exit(3)")
    said = [made.run(CASE, seed) for seed in range(5)]
    assert all(results == [] and len(failures) == 1 for results, failures in said)
    assert said[-1][1] == ["fake: not run, its process has ended 3 times"]


def test_a_hang_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "CASE_SECONDS", 0.3)
    made = started(HELLO + "time.sleep(60)")
    assert made.run(CASE, 1) == ([], ["fake: no answer in 0 s, stopped"])
    assert not made.alive


def test_a_worker_without_an_operation_is_not_asked_again() -> None:
    made = worker('import json\nprint(json.dumps({"ops": [], "failures": ["fake topk: no module"]}))')
    made.start()
    assert made.wait_until_ready() == ["fake topk: no module"]
    assert not made.alive
    assert made.run(CASE, 1) == ([], [])


def test_a_process_that_dies_at_its_start_is_one_line() -> None:
    made = worker("raise SystemExit('no libnvrtc')")
    made.start()
    assert made.wait_until_ready() == ["fake: the process ended with code 1: no libnvrtc"]


def test_peers_see_the_folder_of_peers_first_and_thalweg_does_not(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    ours, theirs = (made._environment for made in session.workers("index", ["thalweg", "deepgemm"], tmp_path))
    assert theirs["PYTHONPATH"].split(os.pathsep)[0] == str(tmp_path)
    assert str(tmp_path) not in ours["PYTHONPATH"]
    assert theirs["CUDA_HOME"]
