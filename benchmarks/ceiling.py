"""A decode step of thalweg-tiny under two ceilings, the same pool and the same tokens: what does the ceiling cost?

    python benchmarks/ceiling.py [--context 2048] [--steps 60] [--json FILE]

Steps alternate between the two, so that drift of the machine meets both; the ratio is of medians. The two must give the
same tokens and the same counts of work, or nothing is recorded.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

from stamp import stamp  # beside this file

from thalweg.engine.engine import Engine
from thalweg.engine.params import Params
from thalweg.engine.pools import CacheSettings
from thalweg.engine.text import Text
from thalweg.models.open import TINY, open_model

CEILINGS = (8192, 1048576)
WARM_UP = 5  # steps
TEXT = b"The river carries what the rain brings, and the bed keeps what the river cannot carry. "


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--context", type=int, default=2048, help="live tokens before the first timed step")
    parser.add_argument("--steps", type=int, default=60, help="timed steps of each ceiling")
    parser.add_argument("--json", type=Path, help="append the records to this file")
    options = parser.parse_args()
    model = open_model(TINY)
    prompt = [256, *(TEXT * (options.context // len(TEXT) + 1))][: options.context]
    engines = []
    for ceiling in CEILINGS:
        engine = Engine(model, Text(TINY, None), CacheSettings(ceiling, kv_tokens=CEILINGS[-1]), count_work=True)
        engine.add("one", prompt, Params(max_tokens=options.steps + 6, ignore_eos=True))
        while engine.stats.decode.steps < WARM_UP:
            engine.step()
        engines.append(engine)
    tokens: list[list[int]] = [[], []]
    seconds: list[list[float]] = [[], []]
    for step in range(options.steps):
        for which in (0, 1) if step % 2 else (1, 0):
            began = time.perf_counter()
            (output,) = engines[which].step()
            seconds[which].append(time.perf_counter() - began)
            tokens[which].append(output.drawn[0].token)
    same = tokens[0] == tokens[1] and engines[0].stats.decode.work == engines[1].stats.decode.work
    medians = [statistics.median(times) * 1e6 for times in seconds]
    for ceiling, median in zip(CEILINGS, medians, strict=True):
        print(f"ceiling {ceiling:>9,}: {median:9,.0f} us a step, {options.context:,} live tokens")
    print(f"ratio {medians[1] / medians[0]:.3f}; same tokens and same work: {same}")
    if not same:
        return 1
    if options.json:
        with options.json.open("a") as file:
            for ceiling, median in zip(CEILINGS, medians, strict=True):
                file.write(json.dumps(record(options, ceiling, median)) + "\n")
    return 0


def record(options: argparse.Namespace, ceiling: int, median: float) -> dict:
    return {
        "bench": "ceiling",
        "op": "step",
        "impl": "thalweg",
        "case": {"streams": 1, "context": options.context, "ceiling": ceiling, "layers": 4},
        "us": round(median, 1),
        "ok": True,
        **stamp(),
    }


if __name__ == "__main__":
    sys.exit(main())
