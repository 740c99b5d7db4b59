"""Trains the tiny checkpoint on, so that it finds a line planted far back; resumable, and stops in time.

    python -m tools.train_retrieval --smoke --compile --out OUT                 # memory and speed of every length
    python -m tools.train_retrieval --init MODEL --total-steps N --minutes 8.9 --compile --out OUT
    python -m tools.train_retrieval --init MODEL --total-steps N --minutes 8.9 --compile --out OUT --resume OUT/state
    python -m tools.train_retrieval --evaluate OUT/model --out OUT

Needs the corpus of tools.tiny_corpus and the package. Writes OUT/model, OUT/state, OUT/log.jsonl as tools.train_tiny does,
and OUT/retrieval.json from --evaluate: values found by distance, as served and with parts of the attention taken away.
"""

import argparse
import json
import sys
import time
from itertools import pairwise
from pathlib import Path

import torch

from thalweg.models.open import TINY
from tools.tiny.checkpoint import load_model
from tools.tiny.dense_attention import Mode
from tools.tiny.dense_parts import Fusible
from tools.tiny.needles import NeedleStream
from tools.tiny.retrieval_evaluation import DISTANCES, accuracy
from tools.tiny.retrieval_schedule import BLOCK_ROWS, LENGTHS, RetrievalSchedule
from tools.tiny.retrieval_trainer import RetrievalSettings, RetrievalTrainer
from tools.tiny.training_data import TokenStream, read_corpus

NEAR = (64, 256)  # beside DISTANCES, in --evaluate: within the window, and just outside


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder for the model, the state, the log and retrieval.json")
    add("--init", type=Path, default=TINY, help="the checkpoint to begin with (default: the bundled one)")
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
    add("--smoke", action="store_true", help="instead: memory and speed of a few steps of every length")
    add("--evaluate", type=Path, metavar="MODEL", help="instead: values found by a saved model, by distance")
    add("--documents", type=int, default=200, help="with --evaluate: documents of each distance (default %(default)s)")
    add("--longest", type=int, default=LENGTHS[-1][1], help="cut longer sequences to this length (default %(default)s)")
    add("--evaluate-every", type=int, default=400, help="steps between evaluations (default %(default)s)")
    corpus = Path(".local/corpus")
    add("--corpus", type=Path, default=corpus, help="folder of the .bin files or corpus.tar.xz (default %(default)s)")
    add("--batch-tokens", type=int, default=65536, help="tokens of a step (default %(default)s)")
    add("--muon-rate", type=float, default=0.02, help="learning rate of the blocks' matrices (default %(default)s)")
    add("--seed", type=int, default=1, help="fixes every batch (default %(default)s)")
    gpu = "cuda" if torch.cuda.is_available() else "cpu"
    add("--device", default=gpu, help="cuda or cpu (default: here %(default)s)")
    add("--compile", action=argparse.BooleanOptionalAction, default=False, help="fuse small operations (GPU)")
    options = parser.parse_args(arguments)
    if not (options.smoke or options.evaluate or options.total_steps):
        parser.error("say --total-steps N, or --smoke, or --evaluate MODEL")
    return options


def evaluate(model_folder: Path, heldout: TokenStream, device: torch.device, documents: int) -> dict:
    """Values and digits found by mode and distance."""
    model, stream = load_model(model_folder, device), NeedleStream(heldout)
    modes = {
        "indexer, fp8 cache": Mode("indexer", quantise_cache=True, block_rows=BLOCK_ROWS),
        "indexer": Mode("indexer", block_rows=BLOCK_ROWS),
        "all entries": Mode("dense", block_rows=BLOCK_ROWS),
        "indexer, no HCA entries": Mode("indexer", coarse=False, block_rows=BLOCK_ROWS),
        "random entries": Mode("random", block_rows=BLOCK_ROWS),
        "random entries, no HCA entries": Mode("random", coarse=False, block_rows=BLOCK_ROWS),
    }
    results: dict[str, dict[int, dict[str, float]]] = {}
    for name, mode in modes.items():
        began = time.monotonic()
        results[name] = {}
        with Fusible.plain_only():
            for distance in (*NEAR, *DISTANCES):
                results[name][distance] = accuracy(model, stream, distance, mode, documents, device)
        shares = "  ".join(f"{distance}: {found['values']:.3f}" for distance, found in results[name].items())
        say(f"{name}: {shares} ({time.monotonic() - began:.1f} s)")
    return results


def speeds(trainer: RetrievalTrainer, steps: int) -> None:
    """Memory and speed of every length, and what a whole run comes to."""
    total, schedule = trainer.settings.total_steps, trainer.schedule
    borders = [int(part * total) for part, _ in schedule.lengths] + [total]
    mean = 0.0
    for first, end in pairwise(borders):
        if trainer.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        for count in (2, steps):
            began = time.monotonic()
            for number in range(count):
                loss, parts, _ = trainer.step_losses(first + number)
                loss.backward()
                trainer.optimiser.step(0.0)
            answer = float(parts["answer_bits"])  # waits for the device
            elapsed = time.monotonic() - began
            if count == 2:
                warm_up = elapsed
        mean += (end - first) / total * elapsed / steps
        memory = torch.cuda.max_memory_allocated() / 2**30 if trainer.device.type == "cuda" else 0.0
        tokens = schedule.rows(first) * schedule.length(first)
        say(
            f"length {schedule.length(first)} {schedule.mode(first).selection}: {tokens * steps / elapsed:,.0f} tokens/s, "
            f"{elapsed / steps * 1e3:.0f} ms a step, two first steps {warm_up:.1f} s, peak memory {memory:.1f} GiB, "
            f"answers {answer:.3f} bits a digit"
        )
    say(f"{mean * 1e3:.0f} ms a step over a whole run: {60 / mean:,.0f} steps a minute")


def say(line: str) -> None:
    print(line, flush=True)


def main(arguments: list[str] | None = None) -> int:
    started = time.monotonic()
    options = parse(arguments)
    device = torch.device(options.device)
    torch.set_float32_matmul_precision("highest" if options.evaluate else "high")
    Fusible.enabled = options.compile
    # One compiled function serves all layers and lengths: a handful of shapes each.
    torch._dynamo.config.recompile_limit = 64
    config = json.loads((options.init / "config.json").read_text())
    train, heldout = (
        TokenStream(read_corpus(options.corpus, name), config["bos_token_id"], device) for name in ("train", "heldout")
    )
    say(f"torch {torch.__version__} on {device}; {len(train):,} bytes to train on, {len(heldout):,} held out")
    options.out.mkdir(parents=True, exist_ok=True)
    if options.evaluate:
        results = evaluate(options.evaluate, heldout, device, options.documents)
        (options.out / "retrieval.json").write_text(json.dumps(results, indent=1) + "\n")
        return 0
    settings = RetrievalSettings(
        options.total_steps or 1000,
        options.batch_tokens,
        options.seed,
        options.muon_rate,
        evaluate_every=options.evaluate_every,
    )
    lengths = tuple((part, min(length, options.longest)) for part, length in LENGTHS)
    schedule = RetrievalSchedule(settings.total_steps, settings.batch_tokens, lengths)
    trainer = RetrievalTrainer(config, settings, schedule, train, heldout, device)
    trainer.start_from(options.init)
    if options.smoke:
        speeds(trainer, steps=4)
        return 0
    if options.resume:
        trainer.resume(options.resume)
        say(f"resumed at step {trainer.step} after {trainer.seconds:.0f} s of training")
    done = trainer.run(options.out, started + 60 * options.minutes - 12, say=say)
    say(f"step {trainer.step} of {settings.total_steps}: {'finished' if done else 'to be resumed'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
