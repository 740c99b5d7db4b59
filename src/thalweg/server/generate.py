"""From a request to its answer: prompts to token ids, sequences to the engine, choices back, whole or streamed."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from thalweg.server.errors import ApiError, unavailable, unknown_model
from thalweg.server.events import EventStream, json_response, until_disconnect
from thalweg.server.messages import Sequence, Submit
from thalweg.server.openai_answers import Answers, ChatAnswers, Choice, CompletionAnswers, usage
from thalweg.server.openai_schema import MAX_CHOICES, ChatRequest, CompletionRequest
from thalweg.server.service import Loaded, Service
from thalweg.server.streams import Stream


async def completion(service: Service, body: CompletionRequest, request: Request) -> Response:
    """/v1/completions."""
    loaded = _served(service, body.model)
    given = body.prompts
    if len(given) * body.choices > MAX_CHOICES:
        message = f"{len(given)} prompts with {body.choices} choices each; possible are {MAX_CHOICES} choices in all"
        raise ApiError(message, param="n")
    prompts = [
        await asyncio.to_thread(loaded.text.encode, prompt) if isinstance(prompt, str) else prompt for prompt in given
    ]
    answers = CompletionAnswers(loaded.vocabulary, body.logprobs is not None)
    return await _answer(service, loaded, body, prompts, answers, request)


async def chat(service: Service, body: ChatRequest, request: Request) -> Response:
    """/v1/chat/completions."""
    loaded = _served(service, body.model)
    messages = [message.for_template() for message in body.messages]
    prompt = await asyncio.to_thread(loaded.chat.encode, messages)
    return await _answer(service, loaded, body, [prompt], ChatAnswers(loaded.vocabulary, bool(body.logprobs)), request)


def _served(service: Service, model: str) -> Loaded:
    if service.draining:
        raise unavailable("the server is going down and takes no new requests", "shutting_down")
    if service.loaded is None:
        raise unavailable("the engine is loading", "engine_not_ready")
    if model != service.loaded.name:
        raise unknown_model(model, service.loaded.name)
    return service.loaded


async def _answer(
    service: Service,
    loaded: Loaded,
    body: CompletionRequest | ChatRequest,
    prompts: list[list[int]],
    answers: Answers,
    request: Request,
) -> Response:
    id = f"{answers.prefix}-{uuid.uuid4().hex}"
    sequences: list[Sequence] = []
    for number, prompt in enumerate(prompts):
        room = max(loaded.context_length - len(prompt), 1)
        for params in body.params(room):
            sequences.append(Sequence(f"{id}-{len(sequences)}", number, params))
    choices = {sequence.id: Choice(index) for index, sequence in enumerate(sequences)}
    head = {"id": id, "object": answers.kind, "created": int(time.time()), "model": loaded.name}
    stream = service.engine.submit(Submit(id, prompts, sequences))
    streaming = False
    try:
        await until_disconnect(request.receive, stream.accepted())
        if body.stream:
            objects = _chunks(stream, choices, answers, head | {"object": answers.chunk_kind}, body)
            streaming = True
            return EventStream(objects, stream.close)
        await until_disconnect(request.receive, _collect(stream, choices))
    finally:
        if not streaming:
            stream.close()
    entries = [answers.whole(choice) for choice in choices.values()]
    return json_response(head | {"choices": entries, "usage": usage(list(choices.values()), body.choices)})


async def _collect(stream: Stream, choices: dict[str, Choice]) -> None:
    async for tokens in stream:
        choices[tokens.id].add(tokens)


async def _chunks(
    stream: Stream,
    choices: dict[str, Choice],
    answers: Answers,
    head: dict[str, Any],
    body: CompletionRequest | ChatRequest,
) -> AsyncIterator[dict[str, Any]]:
    if body.with_usage:
        head = head | {"usage": None}
    for choice in choices.values():
        if (opening := answers.opening(choice)) is not None:
            yield head | {"choices": [opening]}
    async for tokens in stream:
        choice = choices[tokens.id]
        choice.last = tokens
        # A token may complete no text yet: it waits for the rest of its character, or of a stop string.
        if tokens.text or tokens.finish or body.logprobs:
            yield head | {"choices": [answers.chunk(choice, tokens)]}
    if body.with_usage:
        yield head | {"choices": [], "usage": usage(list(choices.values()), body.choices)}
