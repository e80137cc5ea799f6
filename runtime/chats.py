"""Chats in Python: conversations as prompts, and the messages of their replies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qcompile.errors import UsageError, shown
from qcompile.runtime.dialogue import Dialogue, DialogueFormat, end_of_prompt
from qcompile.runtime.messages import MessageStream
from qcompile.runtime.outputs import RequestOutput
from qcompile.runtime.sampling.params import SamplingParams
from qcompile.runtime.turn import Turn

ROLES = ("system", "developer", "user", "assistant", "tool")
Conversation = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class ChatOptions:
    """How to write conversations and read replies: the arguments of `LLM.chat` that have these names."""

    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    documents: Sequence[Mapping[str, Any]] | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    def dialogue(self, messages: Conversation, structured: bool) -> Dialogue:
        """What the model is asked. structured: whether for structured output."""
        given = (self.tools or (), self.tool_choice, self.parallel_tool_calls, self.documents, self.reasoning_effort)
        end = end_of_prompt(self.add_generation_prompt, self.continue_final_message)
        return Dialogue(messages, *given, self.chat_template_kwargs or {}, structured, end)


def turns_of(
    form: DialogueFormat, conversations: Sequence[Conversation], given: Sequence[SamplingParams], asked: ChatOptions
) -> list[tuple[Turn, SamplingParams]]:
    """The prompt of each conversation and how to read its replies, with its parameters, which `given` become."""
    structured = [one.structure is not None for one in given]
    turns = [form.turn(asked.dialogue(*each)) for each in zip(conversations, structured, strict=True)]
    return [(turn, turn.params(one)) for turn, one in zip(turns, given, strict=True)]


def conversations_of(messages: Conversation | Sequence[Conversation]) -> list[Conversation]:
    """One conversation or several, as a list. Raises UsageError for anything else."""
    single = isinstance(messages, Sequence) and bool(messages) and isinstance(messages[0], Mapping)
    listed: Any = [messages] if single else messages
    if not isinstance(listed, Sequence) or isinstance(listed, str) or not listed:
        raise UsageError(f"messages must be a list of messages, or of such lists, not {shown(messages)}")
    if not all(map(_is_conversation, listed)):
        raise UsageError("each message must be a dictionary with a role and a content")
    for each in listed:
        for place, message in enumerate(each):
            if message["role"] not in ROLES:
                known = ", ".join(ROLES)
                raise UsageError(f"messages.{place}.role must be one of {known}, not {shown(message['role'])}")
    return list(listed)


def _is_conversation(given: object) -> bool:
    if not isinstance(given, Sequence) or isinstance(given, str) or not given:
        return False
    return all(isinstance(each, Mapping) and isinstance(each.get("role"), str) for each in given)


class MessageReader:
    """Reads the messages of replies, which grow. turns: of each prompt."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        self._turns = turns
        self._streams: dict[tuple[int, int], tuple[MessageStream, int]] = {}

    def read(self, output: RequestOutput) -> RequestOutput:
        """The output of a prompt, with its prompt as text and the messages of its samples."""
        turn = self._turns[output.request_id]
        output.prompt = turn.prompt
        for sample in output.outputs:
            place = output.request_id, sample.index
            stream, sent = self._streams.get(place, (None, 0))
            if stream is None:
                stream = MessageStream(turn)
            ended = sample.finish_reason is not None
            if sent >= 0:
                stream.push(sample.text[sent:], ended)
            self._streams[place] = stream, -1 if ended else len(sample.text)
            sample.message = stream.message
        return output


def with_messages(turns: Sequence[Turn], outputs: Iterable[RequestOutput]) -> Iterator[RequestOutput]:
    """The outputs of prompts with their messages. turns: of each prompt."""
    reader = MessageReader(turns)
    for output in outputs:
        yield reader.read(output)
