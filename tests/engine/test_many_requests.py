"""Many requests at once: each gets the tokens it gets alone, token for token, whatever happens beside it."""

from collections.abc import Callable

import pytest

from tests.engine.conftest import MakeEngine, alone, assert_empty, run, tokens
from thalweg.engine.params import Params, Sampling
from thalweg.models.deepseek_v4.model import DeepseekV4Model
from thalweg.models.interface import Model
from thalweg.models.mla.model import MlaModel

SOURCE = (b"def source(river):\n    return min(river.depths)\n\n\nclass Bed:\n    '''Where water runs.'''\n" * 30)[
    :2400
]
STREAMS = 16

Prompts = Callable[[Model], list[list[int]]]


def prompts(model: Model) -> list[list[int]]:
    """Sixteen prompts of 1 to 331 tokens, some of which begin alike."""
    vocabulary = min(model.config.vocab_size, 256)
    return [[byte % vocabulary for byte in SOURCE[(i % 3) * 7 : (i % 3) * 7 + 1 + 22 * i]] for i in range(STREAMS)]


@pytest.fixture(scope="module", params=["V4", "MLA"])
def model(request: pytest.FixtureRequest, tiny: DeepseekV4Model, mla: MlaModel) -> Model:
    return tiny if request.param == "V4" else mla


def params(i: int) -> Params:
    """Every other request draws, with a seed of its own."""
    return Params(Sampling(temperature=0.9 if i % 2 else 0.0, seed=i), max_tokens=5 + i % 7)


_alone: dict[int, list[list[int]]] = {}


def expected(model: Model, make_engine: MakeEngine) -> list[list[int]]:
    if id(model) not in _alone:
        engine = make_engine(model, prefix_reuse=False)
        _alone[id(model)] = [alone(engine, prompt, params(i)) for i, prompt in enumerate(prompts(model))]
    return _alone[id(model)]


@pytest.mark.parametrize(("chunk", "prefix_reuse"), [(1, True), (64, False), (64, True), (256, True)])
def test_text_at_sixteen_streams_equals_text_alone(
    model: Model, make_engine: MakeEngine, chunk: int, prefix_reuse: bool
) -> None:
    engine = make_engine(model, prefix_reuse, kv_tokens=8192, max_requests=STREAMS, chunk_tokens=chunk)
    streams = STREAMS if chunk > 1 else 6  # a row a step is slow
    for i, prompt in enumerate(prompts(model)[:streams]):
        engine.add(str(i), prompt, params(i))
    outputs = run(engine)
    assert [tokens(outputs[str(i)]) for i in range(streams)] == expected(model, make_engine)[:streams]
    assert engine.scheduler.retractions == 0
    assert_empty(engine)


@pytest.mark.parametrize("prefix_reuse", [False, True])
def test_text_after_retraction_equals_text_alone(model: Model, make_engine: MakeEngine, prefix_reuse: bool) -> None:
    """A pool of four pages for sixteen requests of up to two pages each: some give up their pages and come back."""
    engine = make_engine(model, prefix_reuse, kv_tokens=1024, max_requests=8, chunk_tokens=64)
    long = Params(max_tokens=40)
    few = [4, 9, 11, 12, 13, 15]
    for i in few:
        engine.add(str(i), prompts(model)[i], long)
    outputs = run(engine)
    assert engine.scheduler.retractions > 0
    single = make_engine(model, prefix_reuse=False)
    for i in few:
        assert tokens(outputs[str(i)]) == alone(single, prompts(model)[i], long)
    assert_empty(engine)


def test_text_beside_cancelled_neighbours_equals_text_alone(model: Model, make_engine: MakeEngine) -> None:
    engine = make_engine(model, kv_tokens=8192, max_requests=8, chunk_tokens=64)
    for i, prompt in enumerate(prompts(model)):
        engine.add(str(i), prompt, params(i))
    outputs: dict[str, list] = {}
    cancelled = {0: "14", 2: "1", 5: "11", 6: "3"}  # waiting, running, reading, decoding
    for step in range(1000):
        if not engine.busy:
            break
        if step in cancelled:
            engine.cancel(cancelled[step])
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    for i in range(STREAMS):
        if str(i) not in cancelled.values():
            assert tokens(outputs[str(i)]) == expected(model, make_engine)[i]
    assert_empty(engine)


def test_a_cancelled_request_frees_its_pages_at_once(make_engine: MakeEngine) -> None:
    engine = make_engine(prefix_reuse=False)
    engine.add("a", list(SOURCE[:600]), Params(max_tokens=50))
    for _ in range(2):
        engine.step()
    assert engine.pools.pages.used > 0
    assert engine.cancel("a")
    assert not engine.busy and not engine.cancel("a")
    assert_empty(engine)


def test_nobody_waits_for_ever(make_engine: MakeEngine) -> None:
    """Requests start in order of arrival, however small those behind a large one are."""
    engine = make_engine(kv_tokens=1024, max_requests=2, chunk_tokens=64, prefix_reuse=False)
    engine.add("large", list(SOURCE[:900]), Params(max_tokens=30))
    for i in range(6):
        engine.add(f"small {i}", list(SOURCE[:20]), Params(max_tokens=3))
    finished = []
    while engine.busy:
        finished += [output.request_id for output in engine.step() if output.finish]
    assert finished[:6] == [f"small {i}" for i in range(6)] or "large" in finished
    assert set(finished) == {"large", *(f"small {i}" for i in range(6))}
