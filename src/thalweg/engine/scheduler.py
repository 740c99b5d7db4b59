"""Which requests run, and which rows each computes in the next step.

Requests are admitted in order of arrival. A step first takes one row (or a strategy's rows) of every decoding request,
then fills up to `chunk_tokens` rows with prompts. Where pages run out, idle cached prefixes go first, then the request
that arrived last is retracted: it gives up its pages, waits at the front, and later computes its tokens again.
"""

from collections import deque
from dataclasses import dataclass, field

from thalweg.engine.decoding import Strategy
from thalweg.engine.pages import OutOfPages
from thalweg.engine.pools import CachePools, OutOfWindowPages
from thalweg.engine.prefix import Node, PrefixTree, Snapshot
from thalweg.engine.request import Request
from thalweg.layouts.sizes import LOGICAL_PAGE_TOKENS, pages_for
from thalweg.models.interface import Model


@dataclass
class Progress:
    """Where a running request stands in the prefix tree.

    nodes: the tree's node of each finished page, the request one of its users; boundaries: token counts at which a
    snapshot is wanted.
    """

    nodes: list[Node] = field(default_factory=list)
    boundaries: set[int] = field(default_factory=set)


class Scheduler:
    """Requests by state, their pages, and the prefix tree (None: prompts are not shared)."""

    def __init__(self, model: Model, pools: CachePools, strategy: Strategy, *, prefix_reuse: bool) -> None:
        self.model, self.pools, self.strategy = model, pools, strategy
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.tree: PrefixTree | None = None
        if prefix_reuse:
            self.tree = PrefixTree(pools.pages, pools.window_pages, needs_snapshot=pools.window is not None)
        self.retractions = 0
        self._rows = list(range(pools.settings.max_requests - 1, -1, -1))
        self._progress: dict[Request, Progress] = {}

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Finishes or cancels a request, whatever its state; its pages come back at once."""
        if request in self.running:
            self._stop_running(request)
        else:
            self.waiting.remove(request)

    def plan(self) -> dict[Request, list[int]]:
        """Tokens of the next step's rows by request, in order of arrival within decoding and reading; pages are given.

        Empty only when nothing is waiting or running.
        """
        self._admit()
        planned: dict[Request, list[int]] = {}
        budget = self.pools.settings.chunk_tokens
        for request in sorted(self.running, key=lambda request: (not request.decoding, request.number)):
            if request not in self.running:
                continue  # retracted for an earlier one
            if request.decoding:
                tokens = self.strategy.propose(request)
            elif budget > 0:
                tokens = request.tokens_between(request.computed, self._stop(request, budget))
            else:
                continue
            if self._ensure(request, request.computed + len(tokens), planned):
                planned[request] = tokens
                budget -= len(tokens)
        return planned

    def computed(self, request: Request, tokens: int) -> None:
        """`tokens` more of the request's tokens have their rows in the caches."""
        assert request.row is not None
        before, request.computed = request.computed, request.computed + tokens
        if self.tree is not None:
            for number in range(before // LOGICAL_PAGE_TOKENS, request.computed // LOGICAL_PAGE_TOKENS):
                self._enter_tree(request, number)
        self.pools.trim(request.row, request.computed)

    def _admit(self) -> None:
        while self.waiting and self._rows:
            request = self.waiting[0]
            path: list[Node] = []
            matched = 0
            if self.tree is not None:
                path, matched = self.tree.match(request.tokens)
            needed = pages_for(request.pending + request.computed + 1, LOGICAL_PAGE_TOKENS) - len(path)
            spare = self.tree.evictable if self.tree is not None else 0
            # Its own prefix may be what is counted as spare; without anyone running there is nothing to wait for.
            if self.running and self.pools.pages.free + spare - len(path) < needed:
                return
            self.waiting.popleft()
            self._start_running(request, path, matched)

    def _start_running(self, request: Request, path: list[Node], matched: int) -> None:
        row = request.row = self._rows.pop()
        progress = self._progress[request] = Progress()
        self.running.append(request)
        for number, node in enumerate(path):
            assert self.tree is not None
            self.tree.use(node)
            self.pools.pages.share(node.page)
            self.pools.put(row, number, node.page)
            progress.nodes.append(node)
        request.computed = len(path) * LOGICAL_PAGE_TOKENS
        if path and path[-1].snapshot is not None:
            self.pools.window_pages.share(path[-1].snapshot.window_page)
            self.pools.put_window(row, len(path) - 1, path[-1].snapshot.window_page)
            self.model.carry_in(self.pools.caches, self.pools.state_slot(row), path[-1].snapshot.carried)
        if not request.output and request.cached_tokens == 0:
            request.cached_tokens = request.computed
        if self.pools.window is not None:
            last = (len(request.prompt) - 1) // LOGICAL_PAGE_TOKENS
            wanted = {last, matched} if matched > len(path) else {last}
            progress.boundaries = {number * LOGICAL_PAGE_TOKENS for number in wanted if number > len(path)}

    def _stop_running(self, request: Request) -> None:
        assert request.row is not None
        for node in self._progress.pop(request).nodes:
            assert self.tree is not None
            self.tree.leave(node)
        self.pools.release(request.row)
        self._rows.append(request.row)
        self.running.remove(request)
        request.row, request.computed = None, 0

    def _retract(self, request: Request) -> None:
        self._stop_running(request)
        self.waiting.appendleft(request)
        self.retractions += 1

    def _stop(self, request: Request, budget: int) -> int:
        """How far the request may be read in this step: within the budget, to a boundary that wants a snapshot."""
        end = min(request.computed + request.pending, request.computed + budget)
        if self.tree is None:
            return end
        return min([end, *(at for at in self._progress[request].boundaries if at > request.computed)])

    def _ensure(self, request: Request, length: int, planned: dict[Request, list[int]]) -> bool:
        """Pages for tokens up to `length`; False where the request itself had to give way."""
        while True:
            assert request.row is not None
            try:
                self.pools.grow(request.row, request.computed, length)
                return True
            except OutOfWindowPages:
                if self.tree is not None and self.tree.drop_snapshot():
                    continue
                raise
            except OutOfPages:
                if self.tree is not None and self.tree.evict():
                    continue
            victim = max(self.running, key=lambda other: other.number)
            planned.pop(victim, None)
            self._retract(victim)
            if victim is request:
                return False

    def _enter_tree(self, request: Request, number: int) -> None:
        """The request has finished its page `number`: the tree takes it over, unless it has one like it."""
        assert self.tree is not None and request.row is not None
        progress = self._progress[request]
        if number < len(progress.nodes):
            return
        start = number * LOGICAL_PAGE_TOKENS
        key = tuple(request.tokens_between(start, start + LOGICAL_PAGE_TOKENS))
        parent = progress.nodes[-1] if progress.nodes else None
        node = self.tree.child(parent, key)
        if node is None:
            page = self.pools.page(request.row, number)
            self.pools.pages.share(page)
            node = self.tree.insert(parent, key, page)
        self.tree.use(node)
        progress.nodes.append(node)
        end = start + LOGICAL_PAGE_TOKENS
        if node.snapshot is None and end == request.computed and end in progress.boundaries:
            window_page = self.pools.window_page(request.row, number)
            self.pools.window_pages.share(window_page)
            node.snapshot = Snapshot(
                window_page, self.model.carry_out(self.pools.caches, self.pools.state_slot(request.row))
            )
