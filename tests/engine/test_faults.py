"""What goes wrong in one request, or in a step, costs no page and no neighbour."""

import gc

import pytest
import torch

from tests.engine.conftest import MakeEngine, alone, assert_empty, tokens
from thalweg.engine.params import Params, Sampling
from thalweg.engine.request import Finish
from thalweg.models.deepseek_v4.model import DeepseekV4Model

PROMPT = [256, *b"import os\n\n\ndef walk(path):\n    for name in sorted(os.listdir(path)):\n"]


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_end_their_request_and_no_other(
    tiny: DeepseekV4Model, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, wrong: float, temperature: float
) -> None:
    expected = alone(make_engine(), PROMPT, Params(max_tokens=6))
    real = tiny.logits

    def damaged(streams: torch.Tensor) -> torch.Tensor:
        logits = real(streams)
        if len(logits) == 2:  # a step with both requests; the second one's row is hurt
            logits[1, 7] = wrong
        return logits

    monkeypatch.setattr(tiny, "logits", damaged)
    engine = make_engine()
    engine.add("sound", PROMPT, Params(max_tokens=6))
    engine.add("hurt", PROMPT[:20], Params(Sampling(temperature=temperature), max_tokens=6))
    found: dict[str, list] = {"sound": [], "hurt": []}
    while engine.busy:
        for output in engine.step():
            found[output.request_id].append(output)
    assert found["hurt"][-1].finish is Finish.ERROR
    assert "no finite numbers at position" in found["hurt"][-1].error
    assert tokens(found["sound"]) == expected and found["sound"][-1].finish is Finish.LENGTH
    assert_empty(engine)


def test_an_exception_inside_a_step_costs_no_page(
    tiny: DeepseekV4Model, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = alone(make_engine(), PROMPT, Params(max_tokens=4))
    engine = make_engine()

    def broken(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(tiny, "forward", broken)
        with pytest.raises(MemoryError):
            list(engine.stream(PROMPT, Params(max_tokens=4)))
    assert_empty(engine)
    assert alone(engine, PROMPT, Params(max_tokens=4)) == expected


def test_two_streams_interleaved_over_one_engine_equal_each_alone(make_engine: MakeEngine) -> None:
    """A step serves every request, so the outputs of one stream may come while the other is asked: none is lost."""
    engine = make_engine()
    prompts = {"0": PROMPT, "1": PROMPT[:30]}
    expected = [alone(engine, prompt, Params(max_tokens=8)) for prompt in prompts.values()]
    found: dict[str, list] = {name: [] for name in prompts}
    for name, prompt in prompts.items():
        engine.add(name, prompt, Params(max_tokens=8))
    while engine.busy:
        for output in engine.step():
            found[output.request_id].append(output)
    assert [tokens(found[name]) for name in prompts] == expected


def test_a_stream_that_is_forgotten_gives_its_pages_back(make_engine: MakeEngine) -> None:
    engine = make_engine()
    outputs = engine.stream(PROMPT, Params(max_tokens=50))
    next(outputs)
    del outputs
    gc.collect()
    assert_empty(engine)


def test_a_stream_beside_other_requests_is_refused(make_engine: MakeEngine) -> None:
    """It would have to drop what the steps give the others."""
    engine = make_engine()
    engine.add("other", PROMPT, Params(max_tokens=2))
    with pytest.raises(RuntimeError, match="add and step"):
        next(engine.stream(PROMPT, Params(max_tokens=2)))
