"""Requests as coding agents and client libraries shape them, of three consecutive turns each. Made by hand.

Each client's `body(turn, answers)` is the request of a turn, from 0 on; `answers` are the texts of the turns
before it. What makes caches miss is in them: a nonce, marks that move on, members in another order, a text
that becomes parts, messages of the system between others.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

CHAT: Final = "/v1/chat/completions"
MESSAGES: Final = "/v1/messages"
RESPONSES: Final = "/v1/responses"
TURNS: Final = 3
MAX_TOKENS: Final = 8
RULES: Final = " ".join(
    f"Rule {number}: {text}"
    for number, text in enumerate(
        (
            "read a file before you change it.",
            "keep changes small, and say what they do.",
            "never remove a test that you do not understand.",
            "ask before you install a package.",
            "answer in few words.",
        )
        * 6
    )
)
ASKS: Final = ("Why does the build fail?", "Then mend it.", "Now write a test for it.")
FILE: Final = "\n".join(f"{line:3} | value_{line} = compute(value_{line - 1})" for line in range(1, 20))
ARGUMENTS: Final = {"path": "src/main.py", "limit": 200, "follow": True}
SCHEMA: Final = {
    "type": "object",
    "properties": {
        "path": {"type": "string", "description": "The file, from the root of the repository."},
        "limit": {"type": "integer"},
        "follow": {"type": "boolean"},
    },
    "required": ["path"],
}
Body = dict[str, Any]


@dataclass(frozen=True)
class Client:
    """One client: where it asks, what it calls its session, and what it sends in each turn."""

    name: str
    path: str
    headers: dict[str, str]
    body: Callable[[int, Sequence[str]], Body]


def _text(text: str, *, is_marked: bool = False, kind: str = "text") -> Body:
    mark = {"cache_control": {"type": "ephemeral"}} if is_marked else {}
    return {"type": kind, "text": text, **mark}


def _said(role: str, content: Any) -> Body:
    return {"role": role, "content": content}


def _tool(name: str) -> Body:
    return {"name": name, "description": f"To {name} a file of the repository.", "parameters": SCHEMA}


def _functions() -> list[Body]:
    return [{"type": "function", "function": _tool(name)} for name in ("read", "edit")]


def _call(turn: int, arguments: str) -> Body:
    return {"id": f"call_{turn}", "type": "function", "function": {"name": "read", "arguments": arguments}}


def claude_code(turn: int, answers: Sequence[str], rules: str = RULES, file: str = FILE) -> Body:
    """A nonce, a mark on the last block, calls of tools, and a message of the system behind each question."""
    messages: list[Body] = []
    for number in range(turn + 1):
        is_last = number == turn
        blocks = [_text("<system-reminder>The day is Monday.</system-reminder>")] if number == 0 else []
        if number:
            call = {"type": "tool_use", "id": f"t{number}", "name": "read", "input": ARGUMENTS}
            messages.append(_said("assistant", [_text(answers[number - 1]), call]))
            result = {"type": "tool_result", "tool_use_id": f"t{number}", "content": [_text(file)]}
            blocks.append(result)
        blocks.append(_text(ASKS[number % len(ASKS)], is_marked=is_last))
        messages.append(_said("user", blocks))
        messages.append(_said("system", f"<total_tokens>{190_000 - 3_000 * number} left</total_tokens>"))
    nonce = f"x-anthropic-billing-header: cc_version=2.1.{turn}.{turn}a; cc_entrypoint=cli; cch={turn}ea6;"
    return {
        "model": "demo-tiny",
        "max_tokens": MAX_TOKENS,
        "system": [
            _text(nonce),
            _text("You are a coding agent.", is_marked=True),
            _text(rules, is_marked=True),
        ],
        "tools": [
            {"name": name, "description": _tool(name)["description"], "input_schema": SCHEMA}
            for name in ("read", "edit")
        ],
        "messages": messages,
        "metadata": {"user_id": "user_1_account__session_77ac"},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "temperature": 1,
    }


def _codex(turn: int, answers: Sequence[str]) -> Body:
    """All of its input again with each turn: what the developer says, and calls with their outputs."""
    items: list[Body] = [
        {"type": "message", **_said("developer", [_text("Work in /repo only.", kind="input_text")])},
        {"type": "message", **_said("user", [_text("<cwd>/repo</cwd>", kind="input_text")])},
    ]
    for number in range(turn + 1):
        if number:
            said = _said("assistant", [_text(answers[number - 1], kind="output_text")])
            items.append({"type": "message", **said})
            call = {"name": "read", "arguments": json.dumps(ARGUMENTS), "call_id": f"c{number}"}
            items.append({"type": "function_call", **call})
            items.append({"type": "function_call_output", "call_id": f"c{number}", "output": FILE})
        items.append({"type": "message", **_said("user", [_text(ASKS[number], kind="input_text")])})
    return {
        "model": "demo-tiny",
        "max_output_tokens": MAX_TOKENS,
        "instructions": RULES,
        "input": items,
        "tools": [{"type": "function", "strict": False, **_tool(name)} for name in ("read", "edit")],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "77ac",
        "service_tier": None,
    }


def _chat(messages: list[Body], **more: Any) -> Body:
    return {"model": "demo-tiny", "max_tokens": MAX_TOKENS, "messages": messages, **more}


def _opencode(turn: int, answers: Sequence[str]) -> Body:
    """Two messages of the system, and arguments written without spaces."""
    messages = [_said("system", RULES), _said("system", "The repository is /repo.")]
    for number in range(turn + 1):
        if number:
            written = json.dumps(ARGUMENTS, separators=(",", ":"))
            answer = {**_said("assistant", answers[number - 1]), "tool_calls": [_call(number, written)]}
            messages += answer, {"role": "tool", "tool_call_id": f"call_{number}", "content": FILE}
        messages.append(_said("user", ASKS[number]))
    return _chat(messages, tools=_functions(), tool_choice="auto")


def _aider(turn: int, answers: Sequence[str]) -> Body:
    """Examples, and the map of the repository, as a conversation before the first question."""
    messages = [
        _said("system", RULES),
        _said("user", "Change the name of f to g."),
        _said("assistant", "<<<< f ==== g >>>>"),
        _said("user", f"These are files of the repository:\n{FILE}"),
        _said("assistant", "Ok."),
    ]
    return _chat([*messages, *_talk(turn, answers)], temperature=0)


def _talk(turn: int, answers: Sequence[str]) -> list[Body]:
    said = [_said("user", ASKS[0])]
    for number in range(turn):
        said += _said("assistant", answers[number]), _said("user", ASKS[number + 1])
    return said


def _continue(turn: int, answers: Sequence[str]) -> Body:
    """The last question is a text, earlier ones are parts."""
    messages = [_said("system", RULES), *_talk(turn, answers)]
    for message in messages[1:-1]:
        if message["role"] == "user":
            message["content"] = [_text(message["content"])]
    return _chat(messages)


def _open_webui(turn: int, answers: Sequence[str]) -> Body:
    return _chat([_said("system", RULES), *_talk(turn, answers)])


def _langchain(turn: int, answers: Sequence[str]) -> Body:
    """Members in another order from the second turn on, and calls of tools with a null content."""
    messages: list[Body] = [_said("system", RULES), _said("user", ASKS[0])]
    for number in range(1, turn + 1):
        calls = [_call(number, json.dumps(ARGUMENTS))]
        messages.append({"content": None, "role": "assistant", "tool_calls": calls})
        messages.append({"role": "tool", "content": FILE, "tool_call_id": f"call_{number}"})
        messages += _said("assistant", answers[number - 1]), _said("user", ASKS[number])
    if turn:
        messages = [dict(reversed(message.items())) for message in messages]
    return _chat(messages, tools=_functions())


def _openai(turn: int, answers: Sequence[str]) -> Body:
    return _chat([_said("developer", RULES), *_talk(turn, answers)], user="u2", safety_identifier="u2")


def _anthropic(turn: int, answers: Sequence[str]) -> Body:
    """The mark for caches at the last block, which moves on; texts where there is no mark."""
    messages = _talk(turn, answers)
    messages[-1]["content"] = [_text(messages[-1]["content"], is_marked=True)]
    return {"model": "demo-tiny", "max_tokens": MAX_TOKENS, "system": RULES, "messages": messages}


CLIENTS: Final = (
    Client("Claude Code", MESSAGES, {"x-app": "cli", "x-claude-code-session-id": "77ac"}, claude_code),
    Client("Codex", RESPONSES, {"session_id": "77ac"}, _codex),
    Client("OpenCode", CHAT, {"x-session-affinity": "ses_77ac"}, _opencode),
    Client("Aider", CHAT, {}, _aider),
    Client("Continue", CHAT, {}, _continue),
    Client("Open WebUI", CHAT, {"x-openwebui-chat-id": "5be9a713-77ac"}, _open_webui),
    Client("LangChain", CHAT, {}, _langchain),
    Client("OpenAI SDK", CHAT, {}, _openai),
    Client("Anthropic SDK", MESSAGES, {}, _anthropic),
)


def whole_pages(tokens: int, page_tokens: int) -> int:
    """Of a prompt of so many tokens, those in full pages."""
    return tokens // page_tokens * page_tokens
