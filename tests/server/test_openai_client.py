"""The openai package against `thalweg serve`: the bare engine's text, the right counts, OpenAI's shapes."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.server.conftest import MODEL, Server
from thalweg.engine.params import Params, Sampling
from thalweg.engine.sampler import Drawn

Bare = Callable[[list[int], Params], tuple[str, list[Drawn]]]
PROMPT = "def main():"
PROMPT_IDS = [256, *PROMPT.encode()]
CHAT = [{"role": "system", "content": "You write code."}, {"role": "user", "content": "def main():"}]
CHAT_IDS = [256, 259, *b"You write code.", 260, *b"def main():", 261]


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def streamed(client: openai.OpenAI, **options: Any) -> tuple[str, list[Any]]:
    chunks = list(client.completions.create(**({"model": MODEL, "stream": True, "temperature": 0} | options)))
    return "".join(choice.text for chunk in chunks for choice in chunk.choices), chunks


def test_the_model_is_listed_and_found(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.models.retrieve("gpt-9")


def test_a_streamed_completion_is_the_bare_engines_text(client: openai.OpenAI, bare: Bare) -> None:
    text, chunks = streamed(client, prompt=PROMPT, max_tokens=24, stream_options={"include_usage": True})
    assert text == bare(PROMPT_IDS, Params(max_tokens=24))[0]
    assert len(chunks) > 12, "it came in pieces"
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1] == "length"
    usage = chunks[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (12, 24, 36)
    assert chunks[-1].choices == [] and all(chunk.usage is None for chunk in chunks[:-1])


def test_a_whole_completion_is_the_streamed_one(client: openai.OpenAI, bare: Bare) -> None:
    answer = client.completions.create(model=MODEL, prompt=PROMPT_IDS, max_tokens=24, temperature=0)
    assert answer.choices[0].text == bare(PROMPT_IDS, Params(max_tokens=24))[0]
    assert answer.choices[0].finish_reason == "length" and answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (12, 24)


def test_streamed_chat_is_the_bare_engines_text(client: openai.OpenAI, bare: Bare) -> None:
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=CHAT,  # type: ignore[arg-type]
            max_completion_tokens=16,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == bare(CHAT_IDS, Params(max_tokens=16))[0]
    assert chunks[0].choices[0].delta.role == "assistant"
    usage = chunks[-1].usage
    assert usage is not None and (usage.prompt_tokens, usage.completion_tokens) == (len(CHAT_IDS), 16)


def test_whole_chat_takes_a_content_in_parts(client: openai.OpenAI, bare: Bare) -> None:
    parts = [{"type": "text", "text": "def "}, {"type": "text", "text": "main():"}]
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[CHAT[0], {"role": "user", "content": parts}],  # type: ignore[list-item]
        max_tokens=8,
        temperature=0,
    )
    message = answer.choices[0].message
    assert message.role == "assistant" and message.content == bare(CHAT_IDS, Params(max_tokens=8))[0]


def test_text_ends_at_the_models_end_of_text_token_unless_it_is_ignored(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": MODEL, "prompt": [256, 97], "max_tokens": 4, "logprobs": 0}
    extra = {"stop_token_ids": list(range(256))}  # whatever byte it writes
    answer = client.completions.create(**options, extra_body=extra)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.completion_tokens == 1


def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI, bare: Bare) -> None:
    whole, _ = bare(PROMPT_IDS, Params(max_tokens=32))
    stop = whole[9:12]
    expected = whole[: whole.index(stop)]
    for stops in (stop, ["never written", stop]):
        text, chunks = streamed(client, prompt=PROMPT, max_tokens=32, stop=stops)
        assert text == expected
        assert chunks[-1].choices[0].finish_reason == "stop"


def test_choices_are_drawn_under_seeds_that_count_up(client: openai.OpenAI) -> None:
    def texts(**options: Any) -> list[str]:
        answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=12, temperature=1, **options)
        assert [choice.index for choice in answer.choices] == list(range(len(answer.choices)))
        assert answer.usage is not None and answer.usage.prompt_tokens == 12  # once, whatever n is
        assert answer.usage.completion_tokens == 12 * len(answer.choices)
        return [choice.text for choice in answer.choices]

    two = texts(n=2, seed=7)
    assert two == texts(seed=7) + texts(seed=8)
    assert two[0] != two[1]


def test_without_a_seed_texts_differ(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=24, n=2)
    assert answer.choices[0].text != answer.choices[1].text


def test_sampling_is_the_engines(client: openai.OpenAI, bare: Bare) -> None:
    sampling = Sampling(0.8, 5, 0.9, 0.05, 1.1, 0.5, 0.25, seed=3)
    answer = client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        max_tokens=16,
        temperature=0.8,
        top_p=0.9,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        seed=3,
        extra_body={"top_k": 5, "min_p": 0.05, "repetition_penalty": 1.1},
    )
    assert answer.choices[0].text == bare(PROMPT_IDS, Params(sampling, 16))[0]


def test_many_prompts_are_answered_in_order(client: openai.OpenAI, bare: Bare) -> None:
    prompts = [PROMPT, "import "]
    answer = client.completions.create(model=MODEL, prompt=prompts, max_tokens=8, temperature=0)
    alone = [bare([256, *prompt.encode()], Params(max_tokens=8))[0] for prompt in prompts]
    assert [choice.text for choice in answer.choices] == alone
    assert answer.usage is not None and answer.usage.prompt_tokens == 12 + 8


def test_streams_side_by_side_are_what_each_is_alone(client: openai.OpenAI, bare: Bare) -> None:
    prompts = [PROMPT, "The river carries "]
    with ThreadPoolExecutor(2) as pool:
        texts = list(pool.map(lambda prompt: streamed(client, prompt=prompt, max_tokens=24)[0], prompts))
    assert texts == [bare([256, *prompt.encode()], Params(max_tokens=24))[0] for prompt in prompts]


@pytest.mark.parametrize("stream", [False, True])
def test_legacy_logprobs(client: openai.OpenAI, bare: Bare, stream: bool) -> None:
    text, drawn = bare(PROMPT_IDS, Params(max_tokens=6, logprobs=2))
    options: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "logprobs": 2}
    if stream:
        choices = [choice for chunk in streamed(client, **options)[1] for choice in chunk.choices]
    else:
        choices = client.completions.create(model=MODEL, **options).choices
    logprobs = [choice.logprobs for choice in choices]
    assert "".join(token for part in logprobs for token in part.tokens) == text
    assert [value for part in logprobs for value in part.token_logprobs] == [token.logprob for token in drawn]
    assert [offset for part in logprobs for offset in part.text_offset] == list(range(6))  # a character a token
    for top, token in zip([top for part in logprobs for top in part.top_logprobs], drawn, strict=True):
        assert top == {chr(id): logprob for id, logprob in token.top}  # greedy: the token is among them


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs(client: openai.OpenAI, bare: Bare, stream: bool) -> None:
    _, drawn = bare(CHAT_IDS, Params(max_tokens=4, logprobs=3))
    answer: Any = client.chat.completions.create(
        model=MODEL,
        messages=CHAT,  # type: ignore[arg-type]
        max_tokens=4,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
        stream=stream,
    )
    choices = [choice for chunk in answer for choice in chunk.choices] if stream else answer.choices
    content = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
    assert [entry.logprob for entry in content] == [token.logprob for token in drawn]
    assert [bytes(entry.bytes) for entry in content] == [bytes([token.token]) for token in drawn]
    for entry, token in zip(content, drawn, strict=True):
        assert [(top.token, top.logprob) for top in entry.top_logprobs] == [(chr(id), p) for id, p in token.top]


def test_a_prompt_seen_before_says_how_much_of_it_was_cached(client: openai.OpenAI) -> None:
    prompt = [256, *range(32, 127)] * 4  # 384 tokens: one page and a half
    cached = []
    for _ in range(2):
        answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=1)
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        cached.append(answer.usage.prompt_tokens_details.cached_tokens)
    assert cached == [0, 256]
