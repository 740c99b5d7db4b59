"""When a request ends, and what its text is then."""

import pytest

from tests.engine.conftest import MakeEngine, run, tokens
from thalweg.engine.params import Params, Sampling
from thalweg.engine.request import Finish, Output
from thalweg.engine.text import Text
from thalweg.errors import UserError

PROMPT = [256, *b"import os\nimport sys\n\n\ndef main():\n"]


def outputs(make_engine: MakeEngine, params: Params) -> list[Output]:
    return list(make_engine().stream(PROMPT, params))


def written(found: list[Output]) -> str:
    return "".join(output.text for output in found)


def test_a_stop_string_ends_the_text_before_it(make_engine: MakeEngine) -> None:
    whole = written(outputs(make_engine, Params(max_tokens=60)))
    stop = whole[17:21]
    assert whole.index(stop) == 17, "the test wants the first occurrence"
    found = outputs(make_engine, Params(max_tokens=60, stop=("never appears", stop)))
    assert written(found) == whole[:17]
    assert found[-1].finish is Finish.STOP
    assert found[-1].output_tokens == 21, "the tokens of the stop string were drawn"


def test_text_that_only_begins_like_a_stop_string_is_given_in_the_end(make_engine: MakeEngine) -> None:
    whole = written(outputs(make_engine, Params(max_tokens=20)))
    found = outputs(make_engine, Params(max_tokens=20, stop=(whole[-3:] + "\x00",)))
    assert written(found) == whole
    assert found[-1].finish is Finish.LENGTH


def test_a_stop_token_ends_the_request(make_engine: MakeEngine) -> None:
    drawn = tokens(outputs(make_engine, Params(max_tokens=20)))
    stop = drawn[9]
    found = outputs(make_engine, Params(max_tokens=20, stop_token_ids=(stop,)))
    assert tokens(found) == drawn[: drawn.index(stop) + 1]
    assert found[-1].finish is Finish.STOP


def test_end_of_text_ends_the_request_unless_ignored(make_engine: MakeEngine) -> None:
    """Drawn at a temperature so high that every token is as likely: end of text comes within a few hundred."""
    hot = Sampling(temperature=1e6, seed=5)
    found = outputs(make_engine, Params(hot, max_tokens=900))
    assert tokens(found)[-1] == 257 and found[-1].finish is Finish.STOP
    count = len(tokens(found))
    longer = outputs(make_engine, Params(hot, max_tokens=count + 3, ignore_eos=True))
    assert tokens(longer)[:count] == tokens(found) and len(tokens(longer)) == count + 3


def test_stop_strings_across_tokens_and_characters(text: Text) -> None:
    stream = text.stream(stop=("STOP", "é!"))
    pieces = [stream.add(byte) for byte in "aSTéST".encode()]
    assert "".join(pieces) == "aSTé" and not stream.stopped  # "ST" may begin STOP
    assert stream.add(ord("O")) == "" and stream.add(ord("P")) == ""
    assert stream.stopped and stream.flush() == ""


def test_an_unfinished_character_waits_for_its_bytes(text: Text) -> None:
    stream = text.stream()
    pieces = [stream.add(byte) for byte in "é€".encode()]
    assert pieces == ["", "é", "", "", "€"]


def test_logprobs_are_those_of_the_model_before_temperature(make_engine: MakeEngine) -> None:
    greedy = outputs(make_engine, Params(max_tokens=5, logprobs=3))
    for output in greedy:
        (drawn,) = output.drawn
        assert drawn.logprob is not None and drawn.logprob <= 0
        assert drawn.top[0] == (drawn.token, drawn.logprob)
        assert [value for _, value in drawn.top] == sorted((value for _, value in drawn.top), reverse=True)
    warm = outputs(make_engine, Params(Sampling(temperature=0.01), max_tokens=5, logprobs=0))
    assert [output.drawn[0].logprob for output in warm] == [output.drawn[0].logprob for output in greedy]
    assert warm[0].drawn[0].top == ()


def test_counts_are_of_prompt_and_output(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add("a", PROMPT, Params(max_tokens=4))
    (found,) = run(engine).values()
    assert [output.output_tokens for output in found] == [1, 2, 3, 4]
    assert {output.prompt_tokens for output in found} == {len(PROMPT)}


@pytest.mark.parametrize(
    "wrong",
    [{"max_tokens": 0}, {"stop": ("",)}, {"logprobs": 21}, {"logprobs": -1}],
)
def test_impossible_parameters_are_refused(wrong: dict) -> None:
    with pytest.raises(UserError):
        Params(**wrong)
