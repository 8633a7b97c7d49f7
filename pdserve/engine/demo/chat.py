"""ChatML, the text form of conversations that the demo model reads: its tokens and its chat template."""

from __future__ import annotations

import json
from typing import Any, Final

END_OF_TEXT: Final = "<|endoftext|>"
TURN_START: Final = "<|im_start|>"
TURN_END: Final = "<|im_end|>"

_TURNS: Final = """\
{%- macro text(content) %}
    {%- if content is string %}
        {{- content }}
    {%- else %}
        {%- for part in content or [] if part.text is string %}
            {{- part.text }}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- set above = ['root', 'system', 'developer'] %}
{%- set system = text(messages[0].content) if messages[0].role in above else default_system %}
{%- if tools %}
    {{- '<|im_start|>system\\n' + system + ('\\n\\n' if system else '') }}
    {{- '# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n' }}
    {{- 'You are provided with function signatures within <tools></tools> XML tags:\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments ' }}
    {{- 'within <tool_call></tool_call> XML tags:\\n<tool_call>\\n{"name": <function-name>, ' }}
    {{- '"arguments": <args-json-object>}\\n</tool_call><|im_end|>\\n' }}
{%- elif system or messages[0].role in above %}
    {{- '<|im_start|>system\\n' + system + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set content = text(message.content) %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + content }}
        {%- for call in message.tool_calls or [] %}
            {%- set function = call.function if call.function else call %}
            {{- '\\n<tool_call>\\n{"name": "' + function.name + '", "arguments": ' }}
            {{- function.arguments if function.arguments is string else function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- elif message.role not in above %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif not loop.first %}
        {{- '<|im_start|>system\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
"""
_THINKS: Final = """\
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
"""
# SGLang knows the form of tool calls by a condition that a template which cannot think does not need
_DOES_NOT_THINK: Final = """\
    {#- Nothing if enable_thinking is defined and enable_thinking is false -#}
"""


def chat_template(default_system: str, thinks: bool) -> str:
    """Prints every role, `developer` and `root` as `system`, and content as a string or as a list of parts.
    Tools, their calls and results have the form that SGLang's `qwen` parser reads.

    `default_system`: what a conversation without a system message begins with; empty: nothing. `thinks`:
    with `enable_thinking` false the answer begins after a thought of no words.
    """
    system = "{%- set default_system = " + json.dumps(default_system) + " %}\n"
    return system + _TURNS + (_THINKS if thinks else _DOES_NOT_THINK) + "{%- endif %}\n"


def tokenizer_config(context_length: int, template: str) -> dict[str, Any]:
    """What `tokenizer_config.json` holds beside the tokenizer itself."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context_length,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
    }
