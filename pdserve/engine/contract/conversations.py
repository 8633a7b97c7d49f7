"""Messages of chats, Anthropic's messages and Responses' input: shapes that SGLang trips over, roles that a
template does not print, and calls of tools that a model once got wrong and that every later turn repeats.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from pdserve.engine.contract.grammars import tool_schema
from pdserve.engine.contract.values import (
    Rule,
    as_object,
    boolean,
    fields,
    integer,
    kind,
    list_of,
    refused,
    size,
    text,
)
from pdserve.errors import RequestError

MAX_MESSAGES: Final = 10_000
MAX_PARTS: Final = 10_000
MAX_TOOLS: Final = 1024
MAX_NAME: Final = 256
MAX_TEXT: Final = 1 << 30
"""Characters; the body's own bound and the model's context come first."""
ABOVE: Final = ("system", "developer")
"""Roles of messages that tell the model what it is."""
ROLES: Final = frozenset(
    {"system", "developer", "user", "assistant", "tool", "function", "latest_reminder", "root"}
)
MEDIA: Final = frozenset({"image_url", "video_url", "audio_url", "input_audio", "input_image", "image"})
CHAT_PARTS: Final = frozenset({"text", "input_text", "output_text", "thinking", "tool_reference", *MEDIA})
BLOCKS: Final = frozenset(
    {
        "text",
        "image",
        "tool_use",
        "tool_result",
        "tool_reference",
        "search_result",
        "thinking",
        "redacted_thinking",
    }
)
SERVER_TOOLS: Final = ("web_search_", "computer_", "bash_", "text_editor_")
INPUT_ITEMS: Final = frozenset(
    {
        "message",
        "function_call",
        "function_call_output",
        "custom_tool_call",
        "custom_tool_call_output",
        "reasoning",
    }
)


@dataclass(frozen=True)
class Abilities:
    """What this engine's model and template can do."""

    prints_role: Callable[[str], bool] = field(default=lambda _role: True)
    """Whether the chat template shows a message of this role."""
    prints_inline_system: bool = True
    """Whether the template shows a message of the system that stands behind others. SGLang merges such ones
    into the head where it does not, which then changes from turn to turn, and no page is found.
    """
    takes_media: bool = True
    has_reasoning_parser: bool = True


def chat_messages(abilities: Abilities) -> Rule:
    """OpenAI's `messages`. `developer` becomes `system` where the template prints no such role."""
    messages = list_of(lambda name, value: _chat_message(name, value, abilities), MAX_MESSAGES, least=1)
    return messages if abilities.prints_inline_system else _in_place(messages)


def _in_place(messages: Rule, kind: str = "text") -> Rule:
    """Messages of the system at the start become one, and those behind others texts of the user, where they
    stand. `kind`: the type of a part with a text.
    """

    def rule(name: str, value: Any) -> Any:
        judged = messages(name, value)
        if not isinstance(judged, list):
            return judged
        made: list[dict[str, Any]] = []
        for message in judged:
            is_above = message.get("role") in ABOVE
            if not is_above or not made:
                made.append(message)
            elif all(one.get("role") in ABOVE for one in made):
                made[-1] = _joined(made[-1], _parts_of(message, kind), kind)
            elif parts := _shown_to_user(message, kind):
                if made[-1].get("role") == "user":
                    made[-1] = _joined(made[-1], parts, kind)
                else:
                    made.append({"role": "user", "content": parts})
        return judged if made == judged else made

    return rule


def _joined(message: dict[str, Any], parts: list[Any], kind: str) -> dict[str, Any]:
    return {**message, "content": [*_parts_of(message, kind), *parts]}


def _shown_to_user(message: dict[str, Any], kind: str) -> list[Any]:
    texts = [part.get("text") for part in _parts_of(message, kind) if isinstance(part, dict)]
    return [
        {"type": kind, "text": f"<system>\n{text}\n</system>"}
        for text in texts
        if isinstance(text, str) and text.strip()
    ]


def _parts_of(message: dict[str, Any], kind: str) -> list[Any]:
    content = message.get("content")
    return [{"type": kind, "text": content}] if isinstance(content, str) else list(content or ())


def _chat_message(name: str, value: Any, abilities: Abilities) -> dict[str, Any]:
    role = as_object(name, value).get("role")
    if not isinstance(role, str) or role.lower() not in ROLES:
        raise refused(f"{name}.role", f"must be one of {', '.join(sorted(ROLES))}")
    made = {**value, "role": _printed_role(f"{name}.role", role.lower(), abilities)}
    content = value.get("content")
    if content is None and role.lower() == "user":
        raise refused(f"{name}.content", "is missing")
    if (content is None and role.lower() in ("tool", "function")) or content == []:
        made["content"] = ""
    elif content is not None:
        made["content"] = _content(f"{name}.content", content, abilities)
    if value.get("tool_calls") is not None:
        calls = list_of(_tool_call, MAX_TOOLS)(f"{name}.tool_calls", value["tool_calls"])
        made["tool_calls"] = calls
    if not made.get("tool_calls"):
        made.pop("tool_calls", None)
    for member in ("name", "tool_call_id", "reasoning_content"):
        if made.get(member) is not None:
            text(MAX_TEXT)(f"{name}.{member}", made[member])
    return value if made == value else made


def _printed_role(name: str, role: str, abilities: Abilities) -> str:
    if role in ("user", "assistant", "tool") or abilities.prints_role(role):
        return role
    if role == "developer" and abilities.prints_role("system"):
        return "system"
    raise refused(name, f"is {role}, which this model's chat template does not show")


def _content(name: str, value: Any, abilities: Abilities) -> Any:
    parts = list_of(lambda member, part: _part(member, part, abilities), MAX_PARTS)
    return _text_or(parts, "parts")(name, value)


def _part(name: str, value: Any, abilities: Abilities) -> Any:
    found = as_object(name, value).get("type")
    if not isinstance(found, str) or found not in CHAT_PARTS:
        raise refused(f"{name}.type", f"must be one of {', '.join(sorted(CHAT_PARTS))}")
    if found in ("text", "input_text", "output_text"):
        text(MAX_TEXT)(f"{name}.text", value.get("text"))
    elif found in MEDIA:
        if not abilities.takes_media:
            raise refused(f"{name}.type", f"is {found}, and this model takes text only")
        _media(name, found, value.get(found))
    size(value, name)
    return value


def _media(name: str, found: str, value: Any) -> None:
    """Its source: an address or data, not empty."""
    member = f"{name}.{found}"
    if isinstance(value, str) and value:
        return
    address = as_object(member, value).get("url", value.get("source"))
    if not (value.get("data") if found == "input_audio" else address):
        raise refused(member, "names no data")


def _tool_call(name: str, value: Any) -> dict[str, Any]:
    """A call in the history. Arguments that are no object any more are shown to the model as what they are:
    the conversation cannot be served again otherwise.
    """
    call = as_object(name, value)
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise refused(f"{name}.function", "must be an object with a name")
    arguments = as_arguments(f"{name}.function.arguments", function.get("arguments"))
    if function.get("arguments") == arguments:
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def as_arguments(name: str, value: Any) -> str:
    """The text of a JSON object: that of the arguments, or one that holds the malformed text."""
    if value is None or value == "":
        return "{}"
    if isinstance(value, dict):
        size(value, name)
        return json.dumps(value, ensure_ascii=False)
    if not isinstance(value, str):
        raise refused(name, f"must be the text of a JSON object, not {kind(value)}")
    try:
        if isinstance(json.loads(value, parse_constant=_no_constant), dict):
            value.encode()
            return value
    except (ValueError, RecursionError):
        pass
    return json.dumps({"arguments": value.encode("utf-8", "replace").decode()}, ensure_ascii=False)


def _no_constant(word: str) -> Any:
    raise ValueError(word)


def chat_tools(name: str, value: Any) -> Any:
    """OpenAI's `tools` of a chat."""
    tool = fields({"function": _function, "type": _function_type}, needed=("function",))
    return list_of(tool, MAX_TOOLS)(name, value)


def _function_type(name: str, value: Any) -> Any:
    if value != "function":
        raise refused(name, 'must be "function": a tool of another type cannot be called here')
    return value


def _function(name: str, value: Any) -> Any:
    known: dict[str, Rule] = {
        "name": _tool_name,
        "description": text(MAX_TEXT),
        "parameters": tool_schema,
        "strict": boolean,
    }
    return fields(known, needed=("name",))(name, value)


def _tool_name(name: str, value: Any) -> Any:
    if not text(MAX_NAME)(name, value):
        raise refused(name, "is empty")
    return value


def tool_choice(name: str, value: Any) -> Any:
    """auto, required, none, or the function to call."""
    if value in ("auto", "required", "none"):
        return value
    if not isinstance(value, dict) or value.get("type", "function") != "function":
        raise refused(name, 'must be "auto", "required", "none", or name a function')
    function = fields({"name": _tool_name}, needed=("name",))
    return fields({"function": function}, needed=("function",))(name, value)


def _unknown(name: str, found: Any, why: str) -> RequestError:
    """Of a type, which is told where it is a word and no text of the client."""
    is_word = isinstance(found, str) and found.isascii() and found.isidentifier() and len(found) < 64
    return refused(f"{name}.type", f"is {found if is_word else 'unknown'}: {why}")


def _text_or(members: Rule, what: str) -> Rule:
    """A string as it is, or a list by the rule `members` of `what`."""

    def rule(name: str, value: Any) -> Any:
        if isinstance(value, str):
            return value
        if not isinstance(value, list):
            raise refused(name, f"must be a string or a list of {what}, not {kind(value)}")
        return members(name, value)

    return rule


# --- Anthropic's


def anthropic_messages(abilities: Abilities) -> Rule:
    """Anthropic's `messages`."""

    def message(name: str, value: Any) -> Any:
        if not isinstance(value, dict) or value.get("role") not in ("user", "assistant", "system"):
            raise refused(f"{name}.role", "must be user, assistant or system")
        if value.get("content") is None:
            raise refused(f"{name}.content", "is missing")
        return fields({"content": blocks(abilities)})(name, value)

    messages = list_of(message, MAX_MESSAGES, least=1)
    return messages if abilities.prints_inline_system else _in_place(messages)


def blocks(abilities: Abilities) -> Rule:
    """A string, or Anthropic's content blocks. A block that cannot be served is named."""

    def block(name: str, value: Any) -> Any:
        found = as_object(name, value).get("type")
        if not isinstance(found, str) or found not in BLOCKS:
            raise _unknown(name, found, "a block of this type cannot be shown to this model")
        if found == "image" and not abilities.takes_media:
            raise refused(f"{name}.type", "is image, and this model takes text only")
        if found == "text":
            text(MAX_TEXT)(f"{name}.text", value.get("text"))
        if found == "redacted_thinking":
            raise refused(f"{name}.type", "is redacted_thinking, which only its provider can read")
        if found == "tool_result" and value.get("content") is not None:
            return fields({"content": blocks(abilities)})(name, value)
        size(value, name)
        return value

    return _text_or(list_of(block, MAX_PARTS), "content blocks")


def anthropic_tools(name: str, value: Any) -> Any:
    """The client's own tools, and those of Anthropic's servers that SGLang knows by name."""

    def tool(member: str, given: Any) -> Any:
        found = as_object(member, given).get("type") or "custom"
        if found == "custom":
            return own(member, given)
        if not isinstance(found, str) or not found.startswith(SERVER_TOOLS):
            raise _unknown(member, found, "a tool of Anthropic's servers, which are not here")
        return given

    known: dict[str, Rule] = {"name": _tool_name, "input_schema": tool_schema, "description": text(MAX_TEXT)}
    own = fields(known, needed=("name", "input_schema"))

    return list_of(tool, MAX_TOOLS)(name, value)


def thinking(abilities: Abilities) -> Rule:
    """Anthropic's `thinking`, which popular clients send by default. Without a reasoning parser it is
    ignored.
    """

    def rule(name: str, value: Any) -> Any:
        known: dict[str, Rule] = {"budget_tokens": integer(1024, 1 << 30)}
        found = fields(known)(name, value)
        if found.get("type") not in ("enabled", "disabled", "adaptive"):
            raise refused(f"{name}.type", "must be enabled, disabled or adaptive")
        return found if abilities.has_reasoning_parser else IGNORED

    return rule


IGNORED: Final = object()
"""A value that is taken out and told of in the answer's head."""


# --- Responses


def response_input(abilities: Abilities) -> Rule:
    """`input` of `/v1/responses`: a text, or items."""

    def item(name: str, value: Any) -> Any:
        found = as_object(name, value).get("type") or "message"
        if not isinstance(found, str) or found not in INPUT_ITEMS:
            raise _unknown(name, found, "input of this type cannot be shown to this model")
        if found == "message" and not isinstance(value.get("role"), str):
            raise refused(f"{name}.role", "must be a string")
        output = value.get("output")
        if found.endswith("_output") and isinstance(output, dict):
            return {**value, "output": _output_text(f"{name}.output", output)}
        size(value, name)
        return value

    items = list_of(item, MAX_MESSAGES)
    if not abilities.prints_inline_system:
        items = _in_place(items, "input_text")
    return _text_or(items, "items")


def _output_text(name: str, output: dict[str, Any]) -> str:
    """Codex's form of a tool's output, `{"content": ..., "success": ...}`, as its text."""
    content = output.get("content")
    if isinstance(content, str):
        return content
    size(output, name)
    return json.dumps(output, ensure_ascii=False)


def response_tools(name: str, value: Any) -> Any:
    """Tools of `/v1/responses`. `strict: null` is as if it were not there."""

    def tool(member: str, given: Any) -> Any:
        known: dict[str, Rule] = {"strict": boolean, "parameters": tool_schema, "name": _tool_name}
        return fields(known, needed=("type",))(member, given)

    return list_of(tool, MAX_TOOLS)(name, value)
