"""One request from prompt to text: chunked prefill, then one row a step. What many requests will share stands elsewhere."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from thalweg.engine.pools import CachePools
from thalweg.engine.sampler import Sampler, Sampling
from thalweg.errors import UserError
from thalweg.layouts.work import Work, counting
from thalweg.models.batch import RowBatch
from thalweg.models.interface import Model


@dataclass
class Phase:
    """A phase of a request: rows computed, steps, seconds, and the work that the operations counted."""

    rows: int = 0
    steps: int = 0
    seconds: float = 0.0
    work: Work = field(default_factory=Work)


@dataclass
class GenerationStats:
    """What a generation cost; pages are those in use when it ended."""

    prefill: Phase = field(default_factory=Phase)
    decode: Phase = field(default_factory=Phase)
    pages: int = 0
    window_pages: int = 0


class Generation:
    """Iterate once to get tokens. Pages are given back when the iteration ends, however it ends."""

    def __init__(
        self,
        model: Model,
        pools: CachePools,
        prompt: list[int],
        sampling: Sampling,
        max_tokens: int,
        on_prefill: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        ceiling = pools.settings.context_length
        if not prompt:
            raise UserError("the prompt is empty: give at least one token")
        if max_tokens < 1:
            raise UserError(f"max-tokens is {max_tokens}; possible is 1 or more")
        if len(prompt) + max_tokens > ceiling:
            raise UserError(
                f"a prompt of {len(prompt):,} tokens and {max_tokens:,} new ones exceed the context length {ceiling:,}: "
                f"shorten the prompt, lower --max-tokens, or raise --context-length"
            )
        wrong = [token for token in prompt if not 0 <= token < model.config.vocab_size]
        if wrong:
            raise UserError(f"token id {wrong[0]} in the prompt: this model's are 0 to {model.config.vocab_size - 1}")
        self.model, self.pools, self.prompt, self.max_tokens = model, pools, prompt, max_tokens
        self.sampler = Sampler(sampling)
        self.on_prefill = on_prefill
        self.stats = GenerationStats()
        self._row: int | None = None
        self._computed = 0

    @torch.inference_mode()
    def __iter__(self) -> Iterator[int]:
        """Yields each new token as it is drawn, the end-of-text token included, at most max_tokens.

        Raises RuntimeError at a second iteration, OutOfRows where the pools' requests are all running, and UserError where
        the model computes a logit that is no finite number.
        """
        if self._row is not None:
            raise RuntimeError("this Generation was iterated before: make another one")
        self._row = self.pools.claim()
        try:
            logits = self._prefill()
            for remaining in range(self.max_tokens, 0, -1):
                token = self.sampler(logits)
                yield token
                if token in self.model.config.eos_token_ids or remaining == 1:
                    break
                logits = self._step([token], self.stats.decode)
        finally:
            self.stats.pages, self.stats.window_pages = self.pools.pages.used, self.pools.window_pages.used
            self.pools.release(self._row)

    def _prefill(self) -> torch.Tensor:
        total, chunk = len(self.prompt), self.pools.settings.chunk_tokens
        logits = torch.empty(0)
        for start in range(0, total, chunk):
            self.on_prefill(start, total)
            logits = self._step(self.prompt[start : start + chunk], self.stats.prefill)
        self.on_prefill(total, total)
        return logits

    def _step(self, tokens: list[int], phase: Phase) -> torch.Tensor:
        """Computes `tokens` as the next rows; float32 logits [vocabulary] of the last one."""
        assert self._row is not None
        began = time.perf_counter()
        before, after = self._computed, self._computed + len(tokens)
        self.pools.grow(self._row, before, after)
        device = self.model.device
        batch = RowBatch(
            tokens=torch.tensor(tokens, device=device),
            positions=torch.arange(before, after, device=device),
            row_to_request=torch.full((len(tokens),), self._row, device=device),
            page_table=self.pools.page_table,
            window_table=self.pools.window_table,
            state_slots=self.pools.state_slots,
        )
        with counting() as work:
            hidden = self.model.forward(batch, self.pools.caches)
            logits = self.model.logits(hidden[-1:])[0].cpu()  # on a GPU this waits for the step
        if not bool(torch.isfinite(logits).all()):
            raise UserError(
                f"the model computed logits that are no finite numbers at position {after - 1:,}: its weights are damaged, "
                "or too large for bfloat16 (--dtype float32 holds more)"
            )
        self._computed = after
        self.pools.trim(self._row, before, after)
        phase.work.add(work)
        phase.rows += len(tokens)
        phase.steps += 1
        phase.seconds += time.perf_counter() - began
        return logits
