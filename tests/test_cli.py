"""The command line: text on stdout, everything else on stderr, a mistake is one line and exit code 2."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from thalweg.cli import main
from thalweg.models.open import TINY


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line that a mistake prints."""
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1 and "Traceback" not in captured.err
    return captured.err


def damaged(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TINY, tmp_path / "damaged"))


def change_config(folder: Path, **values: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_generate_writes_text_and_nothing_else_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--max-tokens", "12", "def main():"]) == 0
    captured = capsys.readouterr()
    assert len(captured.out) > 1 and captured.out.endswith("\n")
    assert captured.err == ""


def test_the_prompt_comes_from_an_argument_a_file_or_stdin(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = "The source of the river — "
    (tmp_path / "prompt.txt").write_text(prompt)
    outputs = []
    for argv in ([prompt], ["--file", str(tmp_path / "prompt.txt")], []):
        if not argv:
            monkeypatch.setattr("sys.stdin", open(tmp_path / "prompt.txt"))  # noqa: SIM115
        assert main(["generate", "--max-tokens", "10", *argv]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] == outputs[2]


def test_a_seed_makes_sampled_text_repeatable(capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for seed in ("1", "1", "2"):
        assert main(["generate", "--max-tokens", "24", "--temperature", "1", "--seed", seed, "A"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


def test_stats_say_rates_pages_and_work_per_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--stats", "--max-tokens", "4", "x" * 300]) == 0
    prefill, decode, pages = capsys.readouterr().err.splitlines()
    assert re.match(r"prefill: 301 tokens in [\d.]+ s \([\d.,]+ tok/s\), 2 steps; per step", prefill)
    assert re.match(r"decode: 3 tokens .* per step 15[0-2] keys scored, \d+ entries attended, \d+ pages read", decode)
    assert pages == "pages at most: 2 of 2, 2 of the window"


def test_explain_names_an_implementation_and_a_reason_for_every_operation(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("operations on cpu")
    assert any(line.split() == ["kv_compact", "reference", "the", "only", "implementation"] for line in lines)
    assert main(["explain", "--device", "cpu", "--json"]) == 0
    choices = json.loads(capsys.readouterr().out)
    assert {choice["operation"] for choice in choices} >= {"index_topk", "compress", "mla_verify", "kv_compact"}


def test_a_misspelt_implementation_is_an_error_not_a_fallback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THALWEG_IMPLEMENTATION", "refrence")
    assert "no implementation 'refrence'; there are: hopper, reference" in refused(capsys, "explain", "--device", "cpu")
    assert "no implementation 'refrence'" in refused(capsys, "generate", "x")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_explain_refuses_a_device_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in (["explain"], ["generate", "x"]):
        assert "device cuda: torch sees 0 CUDA devices here; possible is cpu\n" in refused(
            capsys, *verb, "--device", "cuda"
        )


@pytest.mark.parametrize("device", ["", "tpu", "meta", "cpu:1", "cuda:x"])
def test_every_verb_refuses_the_same_devices(capsys: pytest.CaptureFixture[str], device: str) -> None:
    for verb in (["explain"], ["generate", "x"]):
        assert f"device {device}: possible are cpu, cuda and cuda:N" in refused(capsys, *verb, "--device", device)


def test_a_message_is_one_line_whatever_a_path_holds(capsys: pytest.CaptureFixture[str]) -> None:
    assert "/no where: no such folder" in refused(capsys, "generate", "--model", "/no\nwhere", "x")


def test_a_missing_checkpoint(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "no such folder" in refused(capsys, "generate", "--model", str(tmp_path / "nowhere"), "x")
    assert "no config.json" in refused(capsys, "generate", "--model", str(tmp_path), "x")


def test_a_checkpoint_without_weights(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = damaged(tmp_path)
    (folder / "model.safetensors").unlink()
    assert "safetensors" in refused(capsys, "generate", "--model", str(folder), "x")


@pytest.mark.parametrize("kept", [0, 5, 1000, 1_000_000])
def test_a_truncated_checkpoint(capsys: pytest.CaptureFixture[str], tmp_path: Path, kept: int) -> None:
    folder = damaged(tmp_path)
    os.truncate(folder / "model.safetensors", kept)
    assert "model.safetensors" in refused(capsys, "generate", "--model", str(folder), "x")


def test_a_checkpoint_without_a_tokenizer(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = damaged(tmp_path)
    (folder / "tokenizer.json").write_text("{")
    assert "not a tokenizer" in refused(capsys, "generate", "--model", str(folder), "x")
    (folder / "tokenizer.json").unlink()
    assert "no tokenizer.json" in refused(capsys, "generate", "--model", str(folder), "x")


def test_an_unknown_architecture(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = damaged(tmp_path)
    change_config(folder, model_type="llama", architectures=["LlamaForCausalLM"])
    error = refused(capsys, "generate", "--model", str(folder), "x")
    assert "unknown architecture 'llama'; possible are deepseek_v4" in error


def test_a_config_that_does_not_fit_the_weights(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = damaged(tmp_path)
    change_config(folder, hidden_size=256)
    assert "config.json asks for" in refused(capsys, "generate", "--model", str(folder), "x")


def test_a_prompt_longer_than_the_context(capsys: pytest.CaptureFixture[str]) -> None:
    error = refused(capsys, "generate", "--context-length", "256", "--max-tokens", "100", "x" * 300)
    assert "a prompt of 301 tokens and 100 new ones exceed the context length 256" in error


def test_a_pool_that_cannot_be(capsys: pytest.CaptureFixture[str]) -> None:
    error = refused(capsys, "generate", "--context-length", "8192", "--kv-tokens", "4096", "x")
    assert "a pool of 4,096 KV tokens cannot hold one request of the context length 8,192" in error
    assert "GiB available: lower --kv-tokens" in refused(capsys, "generate", "--kv-tokens", "999999999999", "x")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--temperature", "-1", "x"], "temperature is -1.0"),
        (["--temperature", "1e-320", "x"], "temperature is 1e-320; possible is 0 (greedy), or 1e-30 or more"),
        (["--temperature", "inf", "x"], "temperature is inf"),
        (["--seed", str(2**64), "x"], f"seed is {2**64}; possible is -2^63 to 2^64 - 1"),
        (["--seed", str(-(2**63) - 1), "x"], "possible is -2^63 to 2^64 - 1"),
        (["--max-tokens", "1048575", "x"], "a prompt of 2 tokens and 1,048,575 new ones exceed this model's 1,048,576"),
        (["--top-p", "0", "x"], "top-p is 0.0"),
        (["--chunk-tokens", "0", "x"], "chunk-tokens is 0"),
        (["--max-tokens", "0", "x"], "max-tokens is 0"),
        (["--context-length", "0", "x"], "context length 0"),
        (["--device", "tpu", "x"], "device tpu: possible are cpu, cuda"),
        (["--kv-layout", "v5", "x"], "KV layout v5: possible for this model are v4, exact"),
        (["--file", "/nowhere/at/all"], "/nowhere/at/all: cannot be read: No such file"),
        (["--file", "/nowhere", "x"], "a prompt and --file were both given"),
    ],
)
def test_impossible_options(capsys: pytest.CaptureFixture[str], argv: list[str], message: str) -> None:
    assert message in refused(capsys, "generate", *argv)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "thalweg: the following arguments are required: VERB"),
        (["write"], "thalweg: argument VERB: invalid choice: 'write'"),
        (["generate", "--max-tokens", "many", "x"], "thalweg generate: argument --max-tokens: invalid int value"),
        (["generate", "--dtype", "float16", "x"], "thalweg generate: argument --dtype: invalid choice: 'float16'"),
        (["explain", "--quick"], "thalweg explain: unknown option --quick"),
    ],
)
def test_a_mistake_among_the_options_is_one_line(
    capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(argv)
    error = capsys.readouterr().err
    assert error.startswith(message) and error.count("\n") == 1


def test_a_file_that_is_no_text(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"abc\xff")
    assert "not UTF-8 text: invalid start byte at byte 3" in refused(
        capsys, "generate", "--file", str(tmp_path / "bytes")
    )


def test_ctrl_c_ends_cleanly() -> None:
    command = [sys.executable, "-m", "thalweg", "generate", "--stats", "--max-tokens", "100000", "Once upon a time"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(8)  # it writes
        process.send_signal(signal.SIGINT)
        errors = process.stderr.read().decode()
        process.stdout.read()
    assert process.returncode == 130
    assert "Traceback" not in errors and "decode:" in errors


def test_a_reader_that_leaves_is_no_error() -> None:
    command = f"{sys.executable} -m thalweg generate --max-tokens 2000 'Once upon' | head -c 20"
    done = subprocess.run(["bash", "-c", command], capture_output=True, timeout=120, check=True)
    assert len(done.stdout) == 20 and b"Traceback" not in done.stderr and b"Broken" not in done.stderr


def test_the_version_needs_no_torch() -> None:
    code = "import sys, thalweg.cli as c\ntry: c.main(['--version'])\nexcept SystemExit: print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["thalweg", "0.1.0", "False"]


@pytest.mark.parametrize(
    ("given", "spins"), [({}, "1000"), ({"OMP_WAIT_POLICY": "ACTIVE"}, None), ({"GOMP_SPINCOUNT": "7"}, "7")]
)
def test_idle_threads_sleep_unless_the_environment_says_otherwise(given: dict[str, str], spins: str | None) -> None:
    """Set before torch is imported: the OpenMP library reads it then."""
    code = (
        "import sys, os, thalweg.cli as c\ntry: c.main(['--version'])\nexcept SystemExit: pass\n"
        "assert 'torch' not in sys.modules\nprint(os.environ.get('GOMP_SPINCOUNT'))"
    )
    environment = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")} | given
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.split()[-1] == str(spins)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["generate", "--temprature", "1", "x"],
            "thalweg generate: unknown option --temprature; did you mean --temperature?",
        ),
        (["serve", "--prt=1"], "thalweg serve: unknown option --prt; did you mean --port?"),
        (["explain", "--zzz"], "thalweg explain: unknown option --zzz (see thalweg explain --help)"),
        (["generate", "x", "y"], "thalweg generate: unexpected argument 'y'"),
    ],
)
def test_an_unknown_option_is_named_with_the_one_that_was_meant(
    capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(argv)
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and message in error and error.count("\n") == 1
