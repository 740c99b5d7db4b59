"""`thalweg generate`: a prompt in, text out, as it is drawn."""

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thalweg.cli_streams import write
from thalweg.errors import UserError

if TYPE_CHECKING:
    from thalweg.engine.engine import Engine
    from thalweg.engine.params import Params

_PROGRESS_TOKENS = 2048  # shorter prompts are read before a bar would help


def add(verbs: Any) -> None:
    """Adds the verb to the parser."""
    parser = verbs.add_parser("generate", help="write text after a prompt", description=__doc__)
    parser.add_argument("prompt", nargs="?", help="the prompt; without it and without --file, stdin is read")
    parser.add_argument("--file", type=Path, help="read the prompt from a file")
    parser.add_argument("--model", type=Path, help="checkpoint folder (default: the bundled thalweg-tiny)")
    parser.add_argument("--max-tokens", type=int, default=256, help="new tokens at most (default %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    parser.add_argument("--top-k", type=int, default=0, help="draw among the k most probable tokens (0: all)")
    parser.add_argument("--top-p", type=float, default=1.0, help="draw among the smallest set this probable (1: all)")
    parser.add_argument("--seed", type=int, default=0, help="fixes the draws (default %(default)s)")
    parser.add_argument("--context-length", type=int, help="ceiling in tokens (default: prompt and new tokens)")
    parser.add_argument("--kv-tokens", type=int, help="size of the cache pool in tokens (default: the context length)")
    parser.add_argument("--kv-layout", help="byte layout of the cache (default: the one the GPU path uses)")
    parser.add_argument("--chunk-tokens", type=int, default=256, help="rows of a prefill step (default %(default)s)")
    parser.add_argument("--device", help="cpu or cuda (default: cuda if there is one, else cpu)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: float32 on the CPU, else bfloat16")
    parser.add_argument(
        "--needle",
        type=int,
        metavar="N",
        help="plant a code N bytes before a question about it, in the given text (neither prompt nor --file: in built-in "
        "text), and say on stderr whether the answer is right; --seed draws the code",
    )
    parser.add_argument("--stats", action="store_true", help="rates and work per step on stderr at the end")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Streams the text to stdout; everything else goes to stderr."""
    from thalweg.engine.device import choose_device, choose_dtype
    from thalweg.engine.engine import Engine, check_request
    from thalweg.engine.needle import ANSWER_TOKENS, plant
    from thalweg.engine.params import Params, Sampling
    from thalweg.engine.pools import CacheSettings, check_settings
    from thalweg.engine.text import Text
    from thalweg.models.config import read_config
    from thalweg.models.open import TINY, open_model

    sampling = Sampling(arguments.temperature, arguments.top_k, arguments.top_p, seed=arguments.seed)
    params, needle = Params(sampling, arguments.max_tokens), None
    if arguments.chunk_tokens < 1:
        raise UserError(f"chunk-tokens is {arguments.chunk_tokens}; possible is 1 or more")
    if arguments.needle is None:
        prompt_text = _prompt(arguments)
    else:
        given = arguments.prompt is not None or arguments.file is not None
        prompt_text, needle = plant(arguments.needle, arguments.seed, _prompt(arguments) if given else None)
        params = Params(sampling, min(arguments.max_tokens, ANSWER_TOKENS), stop=(".",))
    device = choose_device(arguments.device)
    dtype = choose_dtype(arguments.dtype, device)
    folder = arguments.model or TINY
    # Everything that can be refused is, before the weights are read: that may take minutes.
    config = read_config(folder)
    text = Text(folder, config.bos_token_id)
    prompt = text.encode(prompt_text)
    needed, ceiling = len(prompt) + params.max_tokens, config.max_position_embeddings
    if arguments.context_length is None and needed > ceiling:
        raise UserError(
            f"a prompt of {len(prompt):,} tokens and {params.max_tokens:,} new ones exceed this model's {ceiling:,}: "
            "shorten the prompt or lower --max-tokens"
        )
    context_length = needed if arguments.context_length is None else arguments.context_length
    kv_tokens = context_length if arguments.kv_tokens is None else arguments.kv_tokens
    chunk = min(arguments.chunk_tokens, context_length)
    settings = CacheSettings(context_length, kv_tokens, chunk_tokens=chunk, kv_layout=arguments.kv_layout)
    check_settings(settings, ceiling)
    check_request(prompt, params, context_length, config.vocab_size)
    model = open_model(folder, device=device, dtype=dtype)
    engine = Engine(model, text, settings, prefix_reuse=False, count_work=arguments.stats)
    try:
        answer = _generate(engine, prompt, params)
        if needle is not None:
            verdict = "right" if answer.strip() == needle.value else "wrong"
            print(f"{verdict}: expected {needle.value!r}, given {answer!r}", file=sys.stderr)
    finally:
        # After Ctrl-C too: what was computed until then is what the person wants to see.
        if arguments.stats:
            print(_stats(engine), file=sys.stderr)
    return 0


def _generate(engine: "Engine", prompt: list[int], params: "Params") -> str:
    """Writes the new text as it comes and returns it."""
    bar = ProgressBar("reading the prompt") if len(prompt) >= _PROGRESS_TOKENS and sys.stderr.isatty() else None
    request = engine.add("generate", prompt, params)
    pieces: list[str] = []
    try:
        while request.finish is None:
            if bar:
                bar(request.computed, len(prompt))
            for output in engine.step():
                if output.error is not None:
                    raise UserError(output.error)
                pieces.append(output.text)
                write(output.text)
    finally:
        if pieces:
            write("\n")
    return "".join(pieces)


def _prompt(arguments: argparse.Namespace) -> str:
    if arguments.prompt is not None and arguments.file is not None:
        raise UserError("a prompt and --file were both given: give one of them")
    source = "the prompt" if arguments.prompt is not None else str(arguments.file or "stdin")
    try:
        if arguments.prompt is not None:
            # Arguments that are no text in the locale's encoding hold their bytes as lone surrogates.
            return arguments.prompt.encode(errors="surrogateescape").decode()
        if arguments.file is not None:
            return arguments.file.read_bytes().decode()
        if sys.stdin is None:
            raise UserError("stdin is closed: give the prompt as an argument or with --file")
        if sys.stdin.isatty():
            print("type the prompt, end it with Ctrl-D:", file=sys.stderr)
        return sys.stdin.buffer.read().decode()
    except OSError as error:
        raise UserError(f"{source}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{source}: not UTF-8 text: {error.reason} at byte {error.start}") from None


def _stats(engine: "Engine") -> str:
    lines, stats, pools = [], engine.stats, engine.pools
    for name, phase in (("prefill", stats.prefill), ("decode", stats.decode)):
        if phase.steps == 0:
            continue
        work, steps = phase.work, phase.steps
        lines.append(
            f"{name}: {phase.rows:,} tokens in {phase.seconds:.2f} s ({phase.rows / phase.seconds:,.1f} tok/s), "
            f"{steps:,} steps; per step {work.keys_scored / steps:,.0f} keys scored, "
            f"{work.entries_attended / steps:,.0f} entries attended, {work.pages_read / steps:,.0f} pages read"
        )
    lines.append(
        f"pages at most: {pools.pages.most:,} of {pools.pages.pages - 1:,}, {pools.window_pages.most:,} of the window"
    )
    return "\n".join(lines)


class ProgressBar:
    """One line on stderr, redrawn; gone when done."""

    def __init__(self, label: str) -> None:
        self.label, self.began, self.drawn = label, time.perf_counter(), False

    def __call__(self, done: int, total: int) -> None:
        if done >= total:
            sys.stderr.write("\r\x1b[K" if self.drawn else "")
            self.drawn = False
        else:
            self.drawn = True
            filled = 30 * done // total
            rate = done / max(time.perf_counter() - self.began, 1e-9)
            bar = "#" * filled + "." * (30 - filled)
            sys.stderr.write(f"\r\x1b[K{self.label} [{bar}] {done:,} of {total:,} tokens, {rate:,.0f} tok/s")
        sys.stderr.flush()
