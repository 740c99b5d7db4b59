"""Any order of submitting, stepping and cancelling: right tokens, no request forgotten, every page back in the end."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.engine.paper_model import PaperModel, continuation
from thalweg.engine.engine import Engine
from thalweg.engine.params import Params
from thalweg.engine.pools import CacheSettings
from thalweg.engine.request import Finish
from thalweg.engine.text import Text
from thalweg.models.open import TINY

TEXT = Text(TINY, None)
CONTEXT = 640
# Three beginnings that agree for a while: prefixes match in part, whole, or not at all.
STEMS = [[(i * i + i // 256 * stem) % 50 for i in range(600)] for stem in range(3)]


class EngineMachine(RuleBasedStateMachine):
    """A pool of four pages for requests of up to three; some must give way."""

    def __init__(self) -> None:
        super().__init__()
        cache = CacheSettings(CONTEXT, kv_tokens=1024, max_requests=3, chunk_tokens=200, snapshots=1)
        self.engine = Engine(PaperModel(), TEXT, cache)
        self.prompts: dict[str, tuple[list[int], int]] = {}
        self.written: dict[str, list[int]] = {}
        self.open: list[str] = []

    @rule(
        stem=st.integers(0, 2),
        length=st.sampled_from([1, 5, 127, 255, 256, 257, 300, 512, 530, 599]),
        new=st.integers(1, 40),
    )
    def submit(self, stem: int, length: int, new: int) -> None:
        name = str(len(self.prompts))
        prompt = STEMS[stem][:length]
        self.prompts[name], self.written[name] = (prompt, new), []
        self.engine.add(name, prompt, Params(max_tokens=new))
        self.open.append(name)

    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self._step()

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if self.open:
            name = data.draw(st.sampled_from(self.open))
            assert self.engine.cancel(name)
            self.open.remove(name)

    def _step(self) -> None:
        for output in self.engine.step():
            name = output.request_id
            assert name in self.open, "an output of a request that has ended"
            self.written[name] += [drawn.token for drawn in output.drawn]
            prompt, new = self.prompts[name]
            assert self.written[name] == continuation(prompt, len(self.written[name]))
            if output.finish is not None:
                assert output.finish is Finish.LENGTH and len(self.written[name]) == new
                self.open.remove(name)

    @invariant()
    def pages_are_accounted_for(self) -> None:
        pools, scheduler = self.engine.pools, self.engine.scheduler
        assert pools.pages.used + pools.pages.free == pools.pages.pages - 1
        assert scheduler.tree is not None
        if not scheduler.running:
            nodes = scheduler.tree._nodes()
            assert pools.pages.used == len(nodes) == scheduler.tree.evictable
            assert pools.window_pages.used == sum(node.snapshot is not None for node in nodes)

    def teardown(self) -> None:
        # The longest request takes 3 reading steps and 40 more; with retraction each may be read again for another.
        for _ in range(200 * (len(self.open) + 1)):
            if not self.engine.busy:
                break
            self._step()
        assert not self.open and not self.engine.busy, "a request starves"
        tree = self.engine.scheduler.tree
        assert tree is not None
        tree.clear()
        assert (self.engine.pools.pages.used, self.engine.pools.window_pages.used) == (0, 0)


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(
    max_examples=12, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def test_the_paper_model_notices_a_page_of_a_neighbour() -> None:
    """The check can fail: with two requests' second pages exchanged half-way, the tokens are others."""
    engine = Engine(PaperModel(), TEXT, CacheSettings(CONTEXT, kv_tokens=1280, max_requests=2, chunk_tokens=200))
    written: dict[str, list[int]] = {"0": [], "1": []}
    for name in written:
        engine.add(name, STEMS[int(name)][:300], Params(max_tokens=8))
    for step in range(100):
        if step == 6:
            engine.pools.page_table[:, 1] = engine.pools.page_table[:, 1].flip(0)
        for output in engine.step():
            written[output.request_id] += [drawn.token for drawn in output.drawn]
    assert any(tokens != continuation(STEMS[int(name)][:300], 8) for name, tokens in written.items())
