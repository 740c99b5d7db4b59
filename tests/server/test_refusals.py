"""What cannot be served is HTTP 400 in OpenAI's error shape (404 for a model that is not here), neighbours undisturbed."""

from typing import Any

import httpx
import openai
import pytest

from tests.server.conftest import MODEL, PATIENCE, Server

LONG = [256, *range(32, 127)] * 700  # 67,200 tokens


def error_of(answer: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error" and "\n" not in error["message"]
    return error


@pytest.mark.parametrize(
    ("options", "param", "message"),
    [
        ({"n": 0}, "n", "greater than or equal to 1 (0 was given)"),
        ({"n": 129}, "n", "less than or equal to 128"),
        ({"n": 100, "prompt": ["a", "b"]}, "n", "2 prompts with 100 choices each"),
        ({"n": "2"}, "n", "valid integer ('2' was given)"),
        ({"n": True}, "n", "valid integer"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"max_tokens": 1.5}, "max_tokens", "integer"),
        ({"max_tokens": 70_000}, None, "exceed the context length 65,536"),
        ({"prompt": LONG}, None, "a prompt of 67,200 tokens"),
        ({"temperature": -0.1}, "temperature", "greater than or equal to 0 (-0.1 was given)"),
        ({"temperature": "hot"}, "temperature", "valid number"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"top_k": -2}, "top_k", "greater than or equal to -1"),
        ({"min_p": 2}, "min_p", "less than or equal to 1"),
        ({"presence_penalty": 3}, "presence_penalty", "less than or equal to 2"),
        ({"frequency_penalty": -3}, "frequency_penalty", "greater than or equal to -2"),
        ({"repetition_penalty": 0}, "repetition_penalty", "greater than 0"),
        ({"seed": 2**63}, "seed", "less than"),
        ({"stop": ""}, "stop", "at least 1 character"),
        ({"stop": ["a", ""]}, "stop", "at least 1 character"),
        ({"stop": 3}, "stop", "stop: Input should be a valid string, or Input should be a valid list (3 was given)"),
        ({"stop": ["a"] * 17}, "stop", "at most 16 items"),
        ({"stop_token_ids": [999]}, None, "token id 999 in stop-token-ids"),
        ({"logprobs": 21}, "logprobs", "less than or equal to 20"),
        ({"prompt": None}, "prompt", "prompt: Input should be"),
        ({"prompt": []}, "prompt", "empty list"),
        ({"prompt": [[]]}, None, "the prompt is empty"),
        ({"prompt": [5, 99_999]}, None, "token id 99999 in the prompt: this model's are 0 to 271"),
        ({"prompt": ["a", 5]}, "prompt", "valid"),
        ({"stream": "yes"}, "stream", "boolean"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "only allowed with stream: true"),
        ({"best_of": 3}, "best_of", "best_of is 3; possible is n, which is 1"),
        ({"echo": True}, "echo", "'echo' is not supported"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "'logit_bias' is not supported"),
        ({"nonsense": 1}, "nonsense", "'nonsense' is not supported"),
    ],
)
def test_a_completion_that_cannot_be(server: Server, options: dict[str, Any], param: str | None, message: str) -> None:
    error = error_of(server.post("/v1/completions", **{"prompt": "a", "max_tokens": 2, **options}))
    assert error["param"] == param
    assert message in error["message"]


def said(content: Any = "x", **more: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content, **more}]


@pytest.mark.parametrize(
    ("options", "param", "message"),
    [
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": "hello"}, "messages", "valid list"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages", "messages.0.role: Input should be 'system'"),
        ({"messages": [{"role": "user"}]}, "messages", "no content"),
        ({"messages": said([{"type": "image_url", "image_url": {"url": "http://x"}}])}, "messages", "'text'"),
        ({"messages": said(tool_calls=[1])}, "tool_calls", "not supported"),
        ({"messages": said(), "tools": [{"type": "function"}]}, "tools", "not supported"),
        ({"messages": said(), "response_format": {"type": "json_object"}}, "response_format", "not supported"),
        ({"messages": said(), "top_logprobs": 2}, "top_logprobs", "only allowed with logprobs: true"),
        ({"messages": said(), "max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "differ"),
        ({"messages": said("x" * 66_000)}, None, "exceed the context length"),
    ],
)
def test_a_chat_that_cannot_be(server: Server, options: dict[str, Any], param: str | None, message: str) -> None:
    error = error_of(server.post("/v1/chat/completions", **options))
    assert error["param"] == param
    assert message in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b'{"model": "thalweg-tiny", "prompt": "\xff"}',
        b'{"model": "thalweg-tiny", "prompt": "\\ud800"}',
        b'{"model": "thalweg-tiny", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"model": "thalweg-tiny", "prompt": "a", "stop": "\\ud800"}',
        b'{"model": "thalweg-tiny", "prompt": "a", "\\ud800": 1}',
        b'{"model": "thalweg-tiny", "prompt": "a", "temperature": NaN}',
        b'{"model": "thalweg-tiny", "prompt": "a", "temperature": 1e999}',
        b'{"model": "thalweg-tiny", "prompt": ' + b"[" * 100_000,
        b'{"prompt": "a"}',
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_body_that_is_no_request(server: Server, path: str, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    error_of(httpx.post(server.url + path, content=body, headers=headers, timeout=PATIENCE))


def test_a_model_a_path_and_a_method_that_are_not_here(server: Server) -> None:
    error = error_of(server.post("/v1/completions", model="gpt-9", prompt="a"), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert "'gpt-9' does not exist here; this server has 'thalweg-tiny'" in error["message"]
    assert "Not Found" in error_of(server.get("/v1/nowhere"), 404)["message"]
    error_of(httpx.put(server.url + "/v1/models", timeout=PATIENCE), 405)


def test_parameters_that_ask_for_nothing_are_taken(server: Server) -> None:
    neutral = {"echo": False, "logit_bias": {}, "suffix": None, "best_of": 1, "user": "someone", "top_k": -1, "n": None}
    assert server.post("/v1/completions", prompt="a", max_tokens=1, **neutral).status_code == 200


def test_refused_requests_leave_a_running_stream_alone(server: Server) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        options: dict[str, Any] = {"model": MODEL, "prompt": "def main():", "max_tokens": 20, "temperature": 0}
        alone = client.completions.create(**options).choices[0].text
        stream = client.completions.create(**options, stream=True)
        text = next(stream).choices[0].text
        for wrong in ({"prompt": [99_999]}, {"prompt": "a", "max_tokens": 70_000}, {"prompt": 1}):
            error_of(server.post("/v1/completions", **wrong))
        assert text + "".join(chunk.choices[0].text for chunk in stream) == alone
