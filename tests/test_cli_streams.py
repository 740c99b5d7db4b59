"""Streams as a user may leave them: closed, full, of another encoding. Never a traceback, and what is wrong is one line."""

import os
import subprocess
import sys

import pytest


def shell(command: str, **environment: str) -> tuple[int, bytes, str]:
    """(exit code, stdout, stderr) of `command`, in which $T is the command thalweg."""
    values = os.environ | {"T": f"{sys.executable} -m thalweg"} | environment
    done = subprocess.run(["bash", "-c", command], capture_output=True, timeout=120, env=values, check=False)
    error = done.stderr.decode()
    assert "Traceback" not in error and "Exception ignored" not in error, error
    return done.returncode, done.stdout, error


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
@pytest.mark.parametrize("verb", ["generate --max-tokens 2 x", "explain", "explain --json"])
def test_a_full_disk_is_one_line(verb: str) -> None:
    code, _, error = shell(f"$T {verb} > /dev/full")
    assert code == 2 and error == f"thalweg {verb.split()[0]}: stdout: cannot be written: No space left on device\n"


def test_a_closed_stdout_is_one_line() -> None:
    code, _, error = shell("$T generate --max-tokens 2 x >&-")
    assert code == 2 and error == "thalweg generate: stdout is closed: there is nowhere to write to\n"


def test_a_closed_stdin_is_one_line_and_no_matter_where_a_prompt_is_given() -> None:
    code, _, error = shell("$T generate --max-tokens 2 <&-")
    assert code == 2 and error == "thalweg generate: stdin is closed: give the prompt as an argument or with --file\n"
    assert shell("$T generate --max-tokens 2 x <&-")[0] == 0


def test_a_closed_stderr_keeps_the_statistics_out_of_the_text() -> None:
    code, text, _ = shell("$T generate --stats --max-tokens 2 x 2>&-")
    assert code == 0 and b"tok/s" not in text


def test_an_encoding_without_the_characters_shows_question_marks() -> None:
    code, text, _ = shell("$T generate --max-tokens 30 --temperature 1e30 x", PYTHONIOENCODING="ascii")
    assert code == 0 and b"?" in text and text.isascii()


def test_an_argument_is_utf8_whatever_the_locale_says() -> None:
    ascii_locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = "$T generate --max-tokens 8 'h\u00e9 \U0001f600'"
    assert shell(command, **ascii_locale)[:2] == shell(command)[:2]
    code, _, error = shell(r"$T generate $'ab\xff'")
    assert code == 2 and error == "thalweg generate: the prompt: not UTF-8 text: invalid start byte at byte 2\n"
