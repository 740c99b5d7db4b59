"""Trains the tiny checkpoint; resumable, and stops in time.

    python -m tools.tiny_corpus                                    # once, needs the package registries
    python -m tools.train_tiny --smoke --out OUT                   # every part once, speeds, steps that fit in a minute
    python -m tools.train_tiny --total-steps N --minutes 8 --compile --out OUT
    python -m tools.train_tiny --total-steps N --minutes 8 --compile --out OUT --resume OUT/state
    python -m tools.train_tiny --evaluate OUT/model --out OUT
    python -m tools.loss_curve OUT/log.jsonl --out OUT

Writes OUT/model (model.safetensors, config.json, tokenizer.json), OUT/state (float32 weights, moments in bfloat16, in
shards of at most 15 MiB), OUT/log.jsonl, and OUT/evaluation.json from --evaluate. --compile fuses small operations and
runs the Triton kernel of tools/tiny/sinkhorn_kernel.py: a GPU machine with a C compiler.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch

from tools.tiny.checkpoint import load_model
from tools.tiny.dense_attention import Mode
from tools.tiny.dense_parts import Fusible
from tools.tiny.evaluation import bits_per_byte
from tools.tiny.schedule import LENGTHS, Schedule
from tools.tiny.tiny_config import CONFIG_PATH
from tools.tiny.trainer import Settings, Trainer
from tools.tiny.training_data import TokenStream, read_corpus

TOY_LENGTHS = ((0.0, 256), (0.55, 384), (0.9, 512))
TOY_SHAPE = {"hidden_size": 64, "q_lora_rank": 32, "o_lora_rank": 16, "moe_intermediate_size": 32, "index_topk": 16}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder for the model, the state, the log and evaluation.json")
    add("--total-steps", type=int, help="steps of the whole run, resumed parts included")
    add(
        "--minutes", type=float, default=8.0, help="stop and save in time, counted from the start (default %(default)s)"
    )
    add(
        "--resume",
        type=Path,
        metavar="STATE",
        help="go on from the state folder of an earlier run of the same settings",
    )
    add("--smoke", action="store_true", help="instead: every part once at small scale, and how fast it is")
    add("--evaluate", type=Path, metavar="MODEL", help="instead: measure a saved model on the held-out text")
    add("--windows", type=int, help="with --evaluate: only so many windows of 4,096 tokens, evenly spread")
    corpus = Path(".local/corpus")
    add(
        "--corpus", type=Path, default=corpus, help="folder of the .bin files or of corpus.tar.xz (default %(default)s)"
    )
    add("--batch-tokens", type=int, default=65536, help="tokens of a step (default %(default)s)")
    add(
        "--muon-rate", type=float, default=0.02, help="peak learning rate of the blocks' matrices (default %(default)s)"
    )
    add("--seed", type=int, default=1, help="fixes the starting weights and every batch (default %(default)s)")
    add(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="cuda or cpu (default: here %(default)s)",
    )
    add("--compile", action=argparse.BooleanOptionalAction, default=False, help="fuse small operations (GPU)")
    options = parser.parse_args(arguments)
    if not (options.smoke or options.evaluate or options.total_steps):
        parser.error("say --total-steps N, or --smoke, or --evaluate MODEL")
    return options


def evaluate(folder: Path, heldout: TokenStream, device: torch.device, windows: int | None, window: int) -> dict:
    """Bits per byte of a saved model, as served and with the indexer's choice taken away."""
    model = load_model(folder, device)
    modes = {
        "indexer": Mode("indexer"),
        "indexer, fp8 cache": Mode("indexer", quantise_cache=True),
        "random entries": Mode("random"),
        "all entries": Mode("dense"),
    }
    results = {}
    for name, mode in modes.items():
        began = time.monotonic()
        rows = 8 if device.type == "cuda" else 2
        with Fusible.plain_only():
            results[name] = bits_per_byte(model, heldout, mode, rows=rows, window=window, max_windows=windows)
        print(f"{name}: {json.dumps(results[name])} ({time.monotonic() - began:.1f} s)", flush=True)
    return results


def speeds(trainer: Trainer, steps: int = 6) -> float:
    """Measures every stage of the schedule and returns the mean seconds per step of a whole run."""
    mean = 0.0
    schedule = trainer.schedule
    for part, length, mode in schedule.stages():
        rows = max(1, schedule.batch_tokens // length)
        for timed in (False, True):
            if trainer.device.type == "cuda":
                torch.cuda.synchronize()
            began = time.monotonic()
            for number in range(steps if timed else 2):
                ids = trainer.train.batch(trainer.settings.seed, number, rows, length + 2)
                trainer.losses(ids, mode)[0].backward()
                trainer.optimiser.step(0.0)
            if trainer.device.type == "cuda":
                torch.cuda.synchronize()
            elapsed = time.monotonic() - began
        memory = torch.cuda.max_memory_allocated() / 2**30 if trainer.device.type == "cuda" else 0.0
        per_step = elapsed / steps
        mean += part * per_step
        say(
            f"  length {length} {mode.selection}: {rows * length / per_step:,.0f} tokens/s, "
            f"{per_step * 1e3:.0f} ms a step, peak memory {memory:.1f} GiB"
        )
    return mean


def smoke(options: argparse.Namespace, config: dict, train: TokenStream, heldout: TokenStream) -> None:
    """Train, save, resume, train on, evaluate: a few steps of each; then speeds with and without compilation."""
    device = torch.device(options.device)
    toy = device.type == "cpu"
    lengths = TOY_LENGTHS if toy else LENGTHS
    window = 512 if toy else 4096
    settings = Settings(
        total_steps=40,
        batch_tokens=512 if toy else options.batch_tokens,
        seed=options.seed,
        muon_rate=options.muon_rate,
        log_every=5,
        evaluate_every=20,
        evaluation_windows=4 if toy else 16,
        evaluation_window=window,
    )
    schedule = Schedule(settings.total_steps, settings.batch_tokens, lengths)

    def fresh() -> Trainer:
        return Trainer(config, settings, schedule, train, heldout, device)

    forever = time.monotonic() + 3600
    first = fresh()
    first.run(options.out, forever, stop_at=20, say=say)
    second = fresh()
    second.resume(options.out / "state")
    same = all(torch.equal(a, b) for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True))
    print(f"resumed at step {second.step}; weights as saved: {same}", flush=True)
    if not same:
        raise SystemExit("a resumed run does not have the weights that were saved")
    second.run(options.out, forever, say=say)
    evaluate(options.out / "model", heldout, device, windows=8, window=window)
    for compiled in (False,) if toy else (False, True):
        Fusible.enabled = compiled
        began = time.monotonic()
        print(f"speeds with{'' if compiled else 'out'} compilation", flush=True)
        mean = speeds(fresh(), steps=2 if toy else 8)
        print(f"  {mean * 1e3:.0f} ms a step over a whole run: {60 / mean:,.0f} steps a minute", flush=True)
        print(f"  took {time.monotonic() - began:.0f} s, compilation included", flush=True)


def say(line: str) -> None:
    print(line, flush=True)


def main(arguments: list[str] | None = None) -> int:
    started = time.monotonic()
    options = parse(arguments)
    device = torch.device(options.device)
    torch.set_float32_matmul_precision("highest" if options.evaluate else "high")
    Fusible.enabled = options.compile
    # One compiled function serves all layers and stages: a handful of shapes each.
    torch._dynamo.config.recompile_limit = 64
    config = json.loads(CONFIG_PATH.read_text())
    if device.type == "cpu" and options.smoke:
        config |= TOY_SHAPE
    streams = []
    for name in ("train", "heldout"):
        streams.append(TokenStream(read_corpus(options.corpus, name), config["bos_token_id"], device))
    train, heldout = streams
    print(
        f"torch {torch.__version__} on {device}; {len(train):,} bytes to train on, {len(heldout):,} held out",
        flush=True,
    )
    options.out.mkdir(parents=True, exist_ok=True)
    if options.smoke:
        smoke(options, config, train, heldout)
        return 0
    if options.evaluate:
        results = evaluate(options.evaluate, heldout, device, options.windows, window=4096)
        (options.out / "evaluation.json").write_text(json.dumps(results, indent=1) + "\n")
        return 0
    settings = Settings(options.total_steps, options.batch_tokens, options.seed, options.muon_rate)
    schedule = Schedule(settings.total_steps, settings.batch_tokens)
    trainer = Trainer(config, settings, schedule, train, heldout, device)
    if options.resume:
        trainer.resume(options.resume)
        print(f"resumed at step {trainer.step} after {trainer.seconds:.0f} s of training", flush=True)
    done = trainer.run(options.out, started + 60 * options.minutes - 12, say=say)
    print(f"step {trainer.step} of {settings.total_steps}: {'finished' if done else 'to be resumed'}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
