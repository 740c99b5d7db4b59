"""What HTTP costs: tokens per second and time to first token over `thalweg serve`, against the engine in this process.

    python benchmarks/serving.py [--streams 1 16] [--tokens 64] [--rounds 3] [--json FILE]

The same prompts and greedy tokens on either side, one side after the other in every round, so that drift of the machine
meets both; the texts must be equal, or nothing is recorded. Medians over rounds. Two processes that run the same engine
differ by some percent, so the share of the time that each engine spends in steps is given too: what is left is what the
side adds. The client is one thread of this
process, which shares the machine with the server: on few cores that is part of what is measured.
"""

import argparse
import asyncio
import json
import re
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from stamp import stamp  # beside this file

from thalweg.engine.engine import Engine
from thalweg.engine.params import Params
from thalweg.engine.pools import CacheSettings
from thalweg.engine.text import Text
from thalweg.models.open import TINY, open_model

CONTEXT = 1024
TEXT = "The river carries what the rain brings, and the bed keeps what the river cannot carry. "


@dataclass
class Round:
    """One side's round: seconds from the first submission to the last token, seconds of them that the engine spent in
    steps, and in those that read prompts; seconds to each stream's first token, and the texts."""

    seconds: float
    stepping: float
    reading: float
    first: list[float]
    texts: list[str]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of each stream")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="append the records to this file")
    options = parser.parse_args()
    most = max(options.streams)
    model = open_model(TINY)
    engine = Engine(
        model, Text(TINY, model.config.bos_token_id), CacheSettings(CONTEXT, CONTEXT * most, most), prefix_reuse=False
    )
    server, url = start_server(most)
    try:
        for streams in options.streams:
            prompts = [f"{index}: {TEXT}" for index in range(streams)]
            sides: dict[str, list[Round]] = {"engine": [], "http": []}
            for number in range(options.rounds + 1):
                bare = run_engine(engine, prompts, options.tokens)
                http = asyncio.run(run_http(url, prompts, options.tokens))
                if bare.texts != http.texts:
                    print("the texts differ: nothing is recorded")
                    return 1
                if number:  # the first round warms up
                    sides["engine"].append(bare)
                    sides["http"].append(http)
            for side, rounds in sides.items():
                report(options, streams, side, rounds)
    finally:
        server.terminate()
        server.wait()
    return 0


def start_server(most: int) -> tuple[subprocess.Popen[str], str]:
    sizes = ["--context-length", CONTEXT, "--kv-tokens", CONTEXT * most, "--max-requests", most, "--no-prefix-reuse"]
    command = [sys.executable, "-m", "thalweg", "serve", "--port", "0", *map(str, sizes)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    found = re.search(r"http://\S+", server.stdout.readline())
    assert found is not None and "ready" in server.stdout.readline()
    return server, found[0]


def run_engine(engine: Engine, prompts: list[str], tokens: int) -> Round:
    texts, first = dict.fromkeys(map(str, range(len(prompts))), ""), {}
    before = stepping(engine)
    began = time.perf_counter()
    for name, prompt in zip(texts, prompts, strict=True):
        engine.add(name, engine.text.encode(prompt), Params(max_tokens=tokens, ignore_eos=True))
    while engine.busy:
        for output in engine.step():
            first.setdefault(output.request_id, time.perf_counter() - began)
            texts[output.request_id] += output.text
    seconds = time.perf_counter() - began
    reading, decoding = (after - start for after, start in zip(stepping(engine), before, strict=True))
    return Round(seconds, reading + decoding, reading, list(first.values()), list(texts.values()))


def stepping(engine: Engine) -> tuple[float, float]:
    return engine.stats.prefill.seconds, engine.stats.decode.seconds


async def run_http(url: str, prompts: list[str], tokens: int) -> Round:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        before = await server_stepping(client)
        began = time.perf_counter()
        answers = await asyncio.gather(*(stream(client, prompt, tokens, began) for prompt in prompts))
        seconds = time.perf_counter() - began
        reading, decoding = (after - start for after, start in zip(await server_stepping(client), before, strict=True))
        return Round(
            seconds, reading + decoding, reading, [first for first, _ in answers], [text for _, text in answers]
        )


async def server_stepping(client: httpx.AsyncClient) -> tuple[float, float]:
    report = (await client.get("/server_info")).json()["engine"]["report"]
    return report["prefill"]["seconds"], report["decode"]["seconds"]


async def stream(client: httpx.AsyncClient, prompt: str, tokens: int, began: float) -> tuple[float, str]:
    body: dict[str, Any] = {
        "model": TINY.name,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
    }
    first, text = 0.0, ""
    async with client.stream("POST", "/v1/completions", json=body | {"ignore_eos": True}) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                first = first or time.perf_counter() - began
                text += json.loads(line[6:])["choices"][0]["text"]
    return first, text


def report(options: argparse.Namespace, streams: int, side: str, rounds: list[Round]) -> None:
    rate = statistics.median(streams * options.tokens / round.seconds for round in rounds)
    first = statistics.median(first for round in rounds for first in round.first) * 1e3
    share = statistics.median(round.stepping / round.seconds for round in rounds)
    print(
        f"{side:<6} {streams:>3} streams: {rate:7.1f} tok/s, first token after {first:7.1f} ms (median), "
        f"{100 * share:.1f}% of the time in steps"
    )
    if streams == 1:  # with more, a stream waits for the others' steps
        outside = statistics.median(round.first[0] - round.reading for round in rounds) * 1e3
        print(f"{side:<6}             {outside:.1f} ms of the first token's are no step")
    if options.json is None:
        return
    record = {
        "bench": "serving",
        "impl": side,
        "case": {"streams": streams, "tokens": options.tokens, "rounds": options.rounds, "model": TINY.name},
        "tokens_per_second": round(rate, 2),
        "first_token_ms": round(first, 2),
        "share_in_steps": round(share, 4),
        "ok": True,
        **stamp(),
    }
    with options.json.open("a") as file:
        file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    sys.exit(main())
