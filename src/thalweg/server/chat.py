"""From messages to a prompt: the checkpoint's chat template, run in jinja2's immutable sandbox.

The template is the checkpoint's, the messages are the client's. Control tokens are control only where the template wrote
them: what a message contains is marked before rendering and becomes plain text afterwards.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from thalweg.errors import UserError
from thalweg.server.errors import ApiError
from thalweg.server.vocabulary import Vocabulary

_PLAIN = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}<|assistant|>"
)
_PLAIN_NEEDS = {"<|system|>", "<|user|>", "<|assistant|>"}


class ChatTemplate:
    """`chat_template.jinja` of the folder, or tokenizer_config.json's chat_template, or a plain one where the vocabulary has
    its tokens. Raises UserError for a template that is no jinja, or that reaches out of the sandbox."""

    def __init__(self, folder: str | Path, vocabulary: Vocabulary, bos: int | None, eos: Sequence[int]) -> None:
        self._vocabulary = vocabulary
        self._variables = {"bos_token": vocabulary.name(bos), "eos_token": vocabulary.name(eos[0] if eos else None)}
        source = self._source(Path(folder))
        self._template: jinja2.Template | None = None
        if source is None:
            return
        self._source_text = source
        try:
            self._template = _environment().from_string(source)
            self._template.render(messages=[{"role": "user", "content": "x"}], **self._options())
        except (jinja2.TemplateSyntaxError, SecurityError) as error:
            raise UserError(f"{folder}: the chat template is refused: {error}") from None
        except Exception:
            pass  # it may want other messages than these; a request that fails will say so

    def encode(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """The prompt that asks for the assistant's next message. Raises ApiError where the template refuses."""
        if self._template is None:
            message = (
                "this model has no chat template; use /v1/completions, or give the checkpoint a chat_template.jinja"
            )
            raise ApiError(message)
        mark = _unused_character(self._source_text, messages)
        marked = [
            {key: self._vocabulary.mark_data(value, mark) if key != "role" else value for key, value in message.items()}
            for message in messages
        ]
        try:
            text = self._template.render(messages=marked, **self._options())
        except Exception as error:  # a template can fail in any way; whichever, it cannot take these messages
            raise ApiError(f"the chat template does not take these messages: {error}", param="messages") from None
        return self._vocabulary.encode_marked(text, mark)

    def _options(self) -> dict[str, Any]:
        return {**self._variables, "add_generation_prompt": True, "tools": None}

    def _source(self, folder: Path) -> str | None:
        file, config = folder / "chat_template.jinja", folder / "tokenizer_config.json"
        try:
            if config.is_file():
                values = json.loads(config.read_text(encoding="utf-8"))
                self._variables |= dict(_special_tokens(values))
            if file.is_file():
                return file.read_text(encoding="utf-8")
            if config.is_file() and values.get("chat_template") is not None:
                return _of_config(values["chat_template"])
        except (OSError, ValueError) as error:
            raise UserError(f"{folder}: the chat template cannot be read: {error}") from None
        return _PLAIN if self._vocabulary.added.keys() >= _PLAIN_NEEDS else None


def _of_config(template: Any) -> str | None:
    if isinstance(template, list):  # several under names
        return {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


def _special_tokens(config: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(content, str):
            yield key, content


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json  # jinja2's own escapes for HTML
    environment.globals["raise_exception"] = _refuse
    return environment


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _unused_character(template: str, messages: Sequence[dict[str, Any]]) -> str:
    """A private-use character that stands nowhere in what will be rendered."""
    used = set(template).union(*(value for message in messages for value in message.values()))
    for code in (*range(0xE000, 0xF900), *range(0xF0000, 0xFFFFE)):
        if chr(code) not in used:
            return chr(code)
    raise ApiError("the messages use every private-use character there is", param="messages")
