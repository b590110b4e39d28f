"""Conversations through a tokenizer's own Jinja template, and which of their tokens are trained.

Trained is what the model is to say: each assistant turn's content up to and with the token on which generation stops. Templates
do not mark it, so it is found by rendering prefixes: up to a turn with the prompt for generation, and up to its end. Nothing of
headers, other roles or tools is trained. Text in messages that spells a special token stays text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxtrain.data import files
from jaxtrain.errors import UserError

_BREAK = "\ufdd0"  # a noncharacter, put into special tokens that messages spell
_DATE = "26 Jul 2024"  # what templates get for today: the same data must give the same rows tomorrow


class Unfit(Exception):
    """A conversation that cannot be rendered or has nothing to train; the message says why."""


class Template:
    """A chat template. Raises UserError if it is no Jinja."""

    def __init__(self, source: str, name: str, specials: Mapping[str, int], bos: str, eos: str):
        """name: for messages; specials: text of special tokens; bos, eos: what the template calls bos_token and eos_token."""
        jinja2 = files.require("jinja2", "a chat template")
        sandbox = files.require("jinja2.sandbox", "a chat template")
        extension = files.require("jinja2.ext", "a chat template").Extension

        class Generation(extension):
            """The marks {% generation %} ... {% endgeneration %}: nothing; what is trained is found without them."""

            tags = {"generation"}

            def parse(self, parser):
                next(parser.stream)
                return parser.parse_statements(["name:endgeneration"], drop_needle=True)

        self._name, self._specials, self._eos = name, sorted(specials, key=len, reverse=True), eos
        self._error = jinja2.TemplateError
        environment = sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
        )
        environment.filters["tojson"] = lambda value, indent=None, **_: json.dumps(value, ensure_ascii=False, indent=indent)
        environment.globals.update(raise_exception=_refuse, strftime_now=lambda format: _DATE, bos_token=bos, eos_token=eos)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise UserError(f"the chat template of {name}: {error}") from error

    def render(self, messages: Sequence[Any], tools: Any, prompt: bool = False) -> str:
        """The text of messages; `prompt`: with the header of an assistant turn to come. Raises Unfit."""
        try:
            return self._template.render(messages=messages, tools=tools, documents=None, add_generation_prompt=prompt)
        except self._error as error:
            raise Unfit(f"the chat template refuses it: {error}") from error
        except Exception as error:  # a template is a program
            raise Unfit(f"the chat template fails on it: {type(error).__name__}: {error}") from error

    def prompt(self, messages: Sequence[Any], tools: Any = None) -> list[str]:
        """The rendered conversation with the header of an assistant turn to come, in pieces to be encoded each by itself.

        What messages spell never becomes a special token. Raises Unfit.
        """
        text = self.render(self._harmless(messages), self._harmless(tools or None), prompt=True)
        return [piece for piece in text.split(_BREAK) if piece]

    def spans(self, messages: Sequence[Any], tools: Any, turns: str = "all") -> list[tuple[str, bool]]:
        """Consecutive parts of the rendered conversation, with whether each is trained.

        Args:
          turns: "all" assistant turns, or the "last".

        Raises:
          Unfit: a message is malformed, no assistant turn is there, or the template fails.
          UserError: what the template renders of a turn depends on what follows, or it never ends a turn.
        """
        for number, message in enumerate(messages):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise Unfit(f"message {number} is no object with a role and content")
            if not isinstance(message.get("content"), str | list) and not message.get("tool_calls"):
                raise Unfit(f"message {number} ({message['role']}) has no content")
        messages, tools = self._harmless(messages), self._harmless(tools or None)
        assistant = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        if not assistant:
            raise Unfit("no message of the assistant to train on")
        whole = self.render(messages, tools)
        parts, done = [], 0
        for number in assistant if turns == "all" else assistant[-1:]:
            start, end = self._turn(messages, tools, number, whole)
            parts += [(whole[done:start], False), (whole[start:end], True)]
            done = end
        parts.append((whole[done:], False))
        return [(piece, trained) for text, trained in parts for piece in text.split(_BREAK) if piece]

    def _turn(self, messages: Sequence[Any], tools: Any, number: int, whole: str) -> tuple[int, int]:
        """Where what is trained of an assistant turn begins and ends in the whole text."""
        before = self.render(messages[:number], tools, prompt=True) if number else ""
        until = self.render(messages[: number + 1], tools)
        if not whole.startswith(until) or not whole.startswith(before) or len(before) > len(until):
            raise UserError(
                f"the chat template of {self._name} renders message {number} in another way once more messages follow, so that "
                "what the model says in it cannot be told; set data.train_turns='last'"
            )
        start, content = len(before), messages[number].get("content")
        content = content if isinstance(content, str) else ""
        begin = whole.find(content.strip(), start, len(until)) if content.strip() else start
        if whole[start:begin].strip() and (not number or before == self.render(messages[:number], tools)):
            start = begin  # the template has no prompt for generation: its header is not for the model to say
        found = max(begin, start) + len(content.strip())
        if end := self._last_special(whole[found : len(until)]):
            return start, found + end
        following = whole[len(until) :].lstrip("\n")
        if self._eos and following.startswith(self._eos):  # by some templates the token belongs to the next message
            return start, len(whole) - len(following) + len(self._eos)
        if number + 1 < len(messages) and following:
            raise UserError(
                f"the chat template of {self._name} ends message {number}, of the assistant, with no special token: a model "
                "trained on it would not learn to stop; give another template as data.chat_template_file"
            )
        return start, len(until)  # the document's EOS follows

    def _last_special(self, text: str) -> int:
        """Where the last special token in a text ends; 0 if there is none."""
        return max((start + len(s) for s in self._specials if (start := text.rfind(s)) >= 0), default=0)

    def _harmless(self, value: Any) -> Any:
        """The same with breaks in special tokens that it spells, wherever."""
        if isinstance(value, str):
            if _BREAK in value:
                raise Unfit("holds the noncharacter U+FDD0")
            for special in self._specials:
                if len(special) > 1 and special in value:
                    value = value.replace(special, special[0] + _BREAK + special[1:])
            return value
        if isinstance(value, dict):
            return {key: value if key == "role" else self._harmless(value) for key, value in value.items()}
        return [self._harmless(part) for part in value] if isinstance(value, list | tuple) else value


def _refuse(message: str) -> None:
    raise ValueError(message)
