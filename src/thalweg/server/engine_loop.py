"""The engine behind a connection: what messages do, and what is reported after each step."""

import os
import time
from collections.abc import Callable

import torch

from thalweg.engine.device import choose_device, choose_dtype
from thalweg.engine.engine import Engine, Phase
from thalweg.engine.pools import CacheSettings
from thalweg.engine.request import Output
from thalweg.engine.text import Text
from thalweg.errors import UserError
from thalweg.models.open import TINY, open_model
from thalweg.server.connection import Connection
from thalweg.server.messages import (
    Accepted,
    Cancel,
    EngineReport,
    PhaseReport,
    ProfileAnswer,
    Ready,
    Refused,
    Shutdown,
    StartProfile,
    Step,
    StopProfile,
    Submit,
    ToEngine,
    Token,
    Tokens,
)
from thalweg.server.profiler import Profiler
from thalweg.server.settings import EngineSettings

_SNAPSHOTS_PER_REQUEST = (
    4  # prompts to restart from, beyond what runs: one more turn of each conversation, and branches
)


def open_engine(settings: EngineSettings) -> tuple[Engine, Ready]:
    """Loads the checkpoint and allocates the cache. Raises UserError for what cannot be."""
    began = time.perf_counter()
    device = choose_device(settings.device)
    dtype = choose_dtype(settings.dtype, device)
    folder = settings.model or str(TINY)
    model = open_model(folder, device=device, dtype=dtype)
    context_length = settings.context_length
    if context_length is None:
        context_length = min(model.config.max_position_embeddings, settings.kv_tokens)
    cache = CacheSettings(
        context_length,
        settings.kv_tokens,
        settings.max_requests,
        min(settings.chunk_tokens, context_length),
        snapshots=_SNAPSHOTS_PER_REQUEST * settings.max_requests if settings.prefix_reuse else 0,
        kv_layout=settings.kv_layout or model.kv_layouts[0],
    )
    text = Text(folder, model.config.bos_token_id)
    engine = Engine(model, text, cache, prefix_reuse=settings.prefix_reuse)
    resolved = EngineSettings(
        model=folder,
        context_length=cache.context_length,
        kv_tokens=cache.kv_tokens,
        max_requests=cache.max_requests,
        chunk_tokens=cache.chunk_tokens,
        kv_layout=cache.kv_layout,
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        prefix_reuse=settings.prefix_reuse,
    )
    ready = Ready(
        settings=resolved,
        architecture=type(model.config).__name__.removesuffix("Config"),
        vocab_size=model.config.vocab_size,
        bos_token_id=model.config.bos_token_id,
        eos_token_ids=list(model.config.eos_token_ids),
        process_id=os.getpid(),
        torch_version=str(torch.__version__),
        load_seconds=time.perf_counter() - began,
        report=report(engine),
    )
    return engine, ready


class EngineLoop:
    """Raises EOFError where the HTTP process is gone."""

    def __init__(self, engine: Engine, connection: Connection) -> None:
        self.engine, self.connection = engine, connection
        self.profiler = Profiler()

    def run(self) -> None:
        """Until Shutdown."""
        while self.turn():
            pass

    def turn(self) -> bool:
        """Takes the messages that have come (one at least, where there is nothing to compute), and then one step; False
        after Shutdown."""
        for message in self.connection.receive(wait=not self.engine.busy):
            if isinstance(message, Shutdown):
                return False
            self._take(message)
        outputs = self.engine.step() if self.engine.busy else []
        self.connection.send(Step([_tokens(output) for output in outputs], report(self.engine)))
        return True

    def _take(self, message: ToEngine) -> None:
        match message:
            case Submit():
                self.connection.send(self._submit(message))
            case Cancel(ids):
                for id in ids:
                    self.engine.cancel(id)
            case StartProfile(folder):
                self.connection.send(_answer(lambda: self.profiler.start(folder)))
            case StopProfile():
                self.connection.send(_answer(self.profiler.stop))
            case _:
                raise RuntimeError(f"the engine takes no {type(message).__name__} while it runs")

    def _submit(self, submit: Submit) -> Accepted | Refused:
        for sequence in submit.sequences:
            try:
                self.engine.add(sequence.id, submit.prompts[sequence.prompt], sequence.params)
            except UserError as error:
                for added in submit.sequences:
                    if added is sequence:
                        break
                    self.engine.cancel(added.id)
                return Refused(submit.id, str(error))
        return Accepted(submit.id)


def report(engine: Engine) -> EngineReport:
    """How the engine stands between two steps."""
    scheduler, pools = engine.scheduler, engine.pools
    return EngineReport(
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        retractions=scheduler.retractions,
        pages_used=pools.pages.used,
        pages_cached=scheduler.tree.evictable if scheduler.tree is not None else 0,
        pages_total=pools.pages.used + pools.pages.free,
        window_pages_used=pools.window_pages.used,
        window_pages_total=pools.window_pages.used + pools.window_pages.free,
        prefill=_phase(engine.stats.prefill),
        decode=_phase(engine.stats.decode),
    )


def _phase(phase: Phase) -> PhaseReport:
    return PhaseReport(phase.rows, phase.steps, phase.seconds)


def _tokens(output: Output) -> Tokens:
    return Tokens(
        output.request_id,
        [Token(drawn.token, drawn.logprob, list(drawn.top)) for drawn in output.drawn],
        output.text,
        output.finish.value if output.finish is not None else None,
        output.prompt_tokens,
        output.output_tokens,
        output.cached_tokens,
        output.error,
    )


def _answer(action: Callable[[], str]) -> ProfileAnswer:
    try:
        return ProfileAnswer(path=action())
    except UserError as error:
        return ProfileAnswer(error=str(error))
