"""The engine: requests in, steps, tokens and text out. One step runs the model once over rows of many requests."""

import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch

from thalweg.engine.decoding import PlainDecoding, Strategy
from thalweg.engine.params import Params
from thalweg.engine.pools import CachePools, CacheSettings
from thalweg.engine.request import Finish, Output, Request
from thalweg.engine.sampler import Drawn
from thalweg.engine.scheduler import Scheduler
from thalweg.engine.text import Text
from thalweg.errors import UserError
from thalweg.layouts.work import Work, counting
from thalweg.models.batch import RowBatch
from thalweg.models.interface import Model


@dataclass
class Phase:
    """Sums over steps that read prompts, or that only decoded: rows, steps, seconds, and the work that operations counted."""

    rows: int = 0
    steps: int = 0
    seconds: float = 0.0
    work: Work = field(default_factory=Work)


@dataclass
class EngineStats:
    """What the engine did so far. A step with any prompt row counts as prefill."""

    prefill: Phase = field(default_factory=Phase)
    decode: Phase = field(default_factory=Phase)


class Engine:
    """Not thread-safe: one thread adds, steps and cancels."""

    def __init__(
        self,
        model: Model,
        text: Text,
        settings: CacheSettings,
        *,
        strategy: Strategy | None = None,
        prefix_reuse: bool = True,
        count_work: bool = False,
    ) -> None:
        """count_work: fill `stats` with what operations did, too; counting looks at data, which costs time."""
        self.model, self.text = model, text
        self.pools = CachePools(model, settings)
        self.strategy = strategy or PlainDecoding()
        self.scheduler = Scheduler(model, self.pools, self.strategy, prefix_reuse=prefix_reuse)
        self.stats, self._count_work = EngineStats(), count_work
        self._requests: dict[str, Request] = {}
        self._arrivals = 0

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._requests)

    def add(self, request_id: str, prompt: Sequence[int], params: Params) -> Request:
        """Queues a request. Raises UserError, one line, for what could never be served; nothing is queued then."""
        prompt = list(prompt)
        if request_id in self._requests:
            raise UserError(f"request {request_id}: there is one of that id already")
        check_request(prompt, params, self.pools.settings.context_length, self.model.config.vocab_size)
        request = Request(request_id, prompt, params, self._arrivals, self.text.stream(params.stop))
        self._arrivals += 1
        self._requests[request_id] = request
        self.scheduler.add(request)
        return request

    def cancel(self, request_id: str) -> bool:
        """Ends a request in any state; its pages are free at once. False where there is no such request (any more)."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return False
        request.finish = Finish.CANCELLED
        self.scheduler.remove(request)
        return True

    @torch.inference_mode()
    def step(self) -> list[Output]:
        """Computes the next rows; what each request that got a token has to say. Empty while prompts are read only."""
        planned = self.scheduler.plan()
        if not planned:
            return []
        began = time.perf_counter()
        reading = not all(request.decoding for request in planned)
        with counting() if self._count_work else nullcontext(Work()) as work:
            logits = self._forward(planned)
        outputs = [output for request in planned if (output := self._advance(request, planned[request], logits))]
        phase = self.stats.prefill if reading else self.stats.decode
        phase.work.add(work)
        phase.rows += sum(map(len, planned.values()))
        phase.steps += 1
        phase.seconds += time.perf_counter() - began
        return outputs

    def stream(self, prompt: Sequence[int], params: Params) -> Iterator[Output]:
        """One request to its end, alone; given up half-way, it is cancelled. Several at once: `add` and `step`."""
        if self.busy:
            raise RuntimeError("stream serves one request alone: use add and step for several at once")
        request = self.add(f"stream-{self._arrivals}", prompt, params)
        try:
            while request.finish is None:
                yield from self.step()
        finally:
            self.cancel(request.id)

    def _forward(self, planned: dict[Request, list[int]]) -> dict[Request, torch.Tensor]:
        """Logits on the host: every row of a decoding request, the last row of one whose tokens are all read now."""
        device = self.model.device
        spans = [(request.row or 0, request.computed, len(tokens)) for request, tokens in planned.items()]
        batch = RowBatch(
            tokens=torch.tensor([token for tokens in planned.values() for token in tokens], device=device),
            positions=torch.cat([torch.arange(start, start + count) for _, start, count in spans]).to(device),
            row_to_request=torch.cat([torch.full((count,), row) for row, _, count in spans]).to(device),
            page_table=self.pools.page_table,
            window_table=self.pools.window_table,
            state_slots=self.pools.state_slots,
        )
        hidden = self.model.forward(batch, self.pools.caches)
        wanted: dict[Request, list[int]] = {}
        at = 0
        for request, tokens in planned.items():
            if request.decoding:
                wanted[request] = list(range(at, at + len(tokens)))
            elif request.pending == len(tokens):
                wanted[request] = [at + len(tokens) - 1]
            at += len(tokens)
        if not wanted:
            return {}
        rows = torch.tensor([row for rows in wanted.values() for row in rows], device=device)
        logits = self.model.logits(hidden[rows]).cpu()
        return dict(zip(wanted, logits.split([len(rows) for rows in wanted.values()]), strict=True))

    def _advance(self, request: Request, rows: list[int], logits: dict[Request, torch.Tensor]) -> Output | None:
        if request not in logits:
            self.scheduler.computed(request, len(rows))
            return None
        if not bool(logits[request].isfinite().all()):
            position = request.computed + len(rows) - 1
            return self._fail(request, f"the model computed logits that are no finite numbers at position {position}")
        if request.decoding:
            drawn, kept = self.strategy.accept(request, rows, logits[request])
        else:
            drawn, kept = [request.sampler(logits[request][-1], request.prompt, request.output)], len(rows)
        self.scheduler.computed(request, kept)
        return self._commit(request, drawn)

    def _commit(self, request: Request, drawn: list[Drawn]) -> Output:
        """Takes tokens one by one until one of them ends the request; those behind it are dropped."""
        text, taken = "", []
        for draw in drawn:
            request.output.append(draw.token)
            taken.append(draw)
            text += request.text.add(draw.token)
            request.finish = self._finish(request, draw.token)
            if request.finish is not None:
                break
        if request.finish is not None:
            text += request.text.flush()
            del self._requests[request.id]
            self.scheduler.remove(request)
        counts = (len(request.prompt), len(request.output), request.cached_tokens)
        return Output(request.id, tuple(taken), text, request.finish, *counts)

    def _fail(self, request: Request, error: str) -> Output:
        """Ends one request with an error; its neighbours go on."""
        request.finish = Finish.ERROR
        del self._requests[request.id]
        self.scheduler.remove(request)
        counts = (len(request.prompt), len(request.output), request.cached_tokens)
        return Output(request.id, (), request.text.flush(), Finish.ERROR, *counts, error)

    def _finish(self, request: Request, token: int) -> Finish | None:
        params = request.params
        ends = not params.ignore_eos and token in self.model.config.eos_token_ids
        if request.text.stopped or ends or token in params.stop_token_ids:
            return Finish.STOP
        return Finish.LENGTH if len(request.output) >= params.max_tokens else None


def check_request(prompt: Sequence[int], params: Params, context_length: int, vocabulary: int) -> None:
    """Raises UserError, one line, for a request that could never be served."""
    if not prompt:
        raise UserError("the prompt is empty: give at least one token")
    if len(prompt) + params.max_tokens > context_length:
        raise UserError(
            f"a prompt of {len(prompt):,} tokens and {params.max_tokens:,} new ones exceed the context length "
            f"{context_length:,}: shorten the prompt or ask for fewer new tokens"
        )
    for name, tokens in (("the prompt", prompt), ("stop-token-ids", params.stop_token_ids)):
        wrong = [token for token in tokens if not 0 <= token < vocabulary]
        if wrong:
            raise UserError(f"token id {wrong[0]} in {name}: this model's are 0 to {vocabulary - 1}")
