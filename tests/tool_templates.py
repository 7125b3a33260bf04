# SPDX-License-Identifier: Apache-2.0
"""Chat templates as families write calls of tools: ours, in their formats."""

from __future__ import annotations

_TOOLS = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
)
_OPENING = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def _chatml(calls: str, opening: str = _OPENING, tools: str = _TOOLS) -> str:
    """Messages of ChatML, with calls behind the content."""
    return (
        tools + "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content }}"
        "{% if m.tool_calls %}" + calls + "{% endif %}<|im_end|>\n{% endfor %}" + opening
    )


HERMES = _chatml(
    "{% for c in m.tool_calls %}{{ '\n' if not loop.first or m.content }}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
)
THINKING = _chatml(
    "{% for c in m.tool_calls %}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}',
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}",
)
OPENED = THINKING.replace("<think>\n\n</think>\n\n", "").replace(
    "<|im_start|>assistant\n{% if enable", "<|im_start|>assistant\n<think>\n{% if enable"
)
LLAMA = (
    "{% if tools %}system: {{ tools | tojson }}\n{% endif %}{% for m in messages %}{% if m.tool_calls %}"
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('one call at once') }}{% endif %}"
    "{% set f = m.tool_calls[0].function %}"
    'assistant: {"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}'
    "<|eot|>{% else %}{{ m.role }}: {{ m.content }}<|eot|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
MISTRAL = (
    "{% for m in messages %}{% if m.role == 'user' %}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}"
    "[/AVAILABLE_TOOLS]{% endif %}[INST]{{ m.content }}[/INST]{% elif m.tool_calls %}[TOOL_CALLS] ["
    "{% for c in m.tool_calls %}{% if c.id | length < 9 %}{{ raise_exception('ids are longer') }}{% endif %}"
    '{{ (c.function | tojson)[:-1] }}, "id": "{{ c.id[-9:] }}"}{{ ", " if not loop.last }}{% endfor %}]{{ eos_token }}'
    "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]{% else %}{{ m.content ~ eos_token }}"
    "{% endif %}{% endfor %}"
)
PHI = (
    "{% if tools %}<|system|>{% for t in tools %}<|tool|>{{ t.function | tojson }}<|/tool|>{% endfor %}<|end|>"
    "{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls %}<|tool_call|>"
    "{{ c.function | tojson }}<|/tool_call|>{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% else %}{{ eos_token }}{% endif %}"
)
TEXTUAL = (  # as DeepSeek's: arguments are text
    "{{ tools | tojson if tools }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.tool_calls %}<calls>"
    "{% for c in m.tool_calls %}{{ '\n' if not loop.first }}"
    "{{ '<call>' + c.type + '<sep>' + c.function.name + '\n```json\n' + c.function.arguments + '\n```</call>' }}"
    "{% endfor %}</calls>{% endif %}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
XML = _chatml(  # as Qwen3-Coder's: arguments are no JSON
    "{% for c in m.tool_calls %}<tool_call>\n<function={{ c.function.name }}>{% for name, value in "
    "c.function.arguments | items %}<parameter={{ name }}>{{ value }}</parameter>{% endfor %}</function>{% endfor %}"
)
CODED = _chatml(  # shows calls in no way that can be read, though it speaks of them
    '{% for c in m.tool_calls %}<tool_call>{# {"name": N, "arguments": A} #}{{ c.id }}</tool_call>{% endfor %}'
    "{{ '' if true else '\"arguments\"' }}"
)
PLAIN = _chatml("", tools="")
TAGGED = (  # as Command R7B's: what says something and what calls begin with tags that begin alike
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>{% if m.role != 'assistant' %}"
    "{{ m.content }}{% elif m.tool_calls %}<|START_ACTION|>[{% for c in m.tool_calls %}{{ ', ' if not loop.first }}"
    '{"tool_name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}'
    "{% endfor %}]<|END_ACTION|>{% else %}<|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|>{% endif %}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
THOUGHTLESS = TAGGED.replace(  # as DeepSeek V3.1's: what calls has closed its thoughts, which the prompt has opened
    "<|START_ACTION|>", "</think> <|START_ACTION|>"
).replace("<assistant>{% endif %}", "<assistant><think>{% endif %}")
SPACED = (  # as Llama 4's: a line is free before the turn that calls
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{% if m.tool_calls %}{{ '\n' }}<assistant>\n"
    '{% for c in m.tool_calls %}{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}'
    "{% endfor %}{% else %}<{{ m.role }}>\n{{ m.content }}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}{{ '\n' }}<assistant>\n{% endif %}"
)
NUMBERED = (  # as Mistral Small 3.2's: an id before the arguments, and no longer ones
    "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}{% for m in messages %}"
    "{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.tool_call_id }}"
    "[TOOL_CONTENT]{{ m.content }}[/TOOL_RESULTS]{% else %}{{ m.content }}{% for c in m.tool_calls %}"
    "{% if c.id | length != 9 %}{{ raise_exception('ids have length 9') }}{% endif %}"
    "[TOOL_CALLS]{{ c.function.name }}[CALL_ID]{{ c.id }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}"
    "{{ eos_token }}{% endif %}{% endfor %}"
)
UNSHOWN = (  # knows tools, and drops calls
    "{% if tools %}{{ tools | tojson }}<|tool_call|>{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
GRANITE = (  # as Granite 3.0's: drops calls, and names results otherwise than all others
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{% if m.role == 'assistant_tool_call' %}"
    "<assistant><|tool_call|>{{ m.content }}{% elif m.role in ['user', 'assistant', 'tool_response'] %}"
    "<{{ m.role }}>{{ m.content }}{% endif %}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
FIRST_ALONE = SPACED.replace("in m.tool_calls %}", "in m.tool_calls[:1] %}")  # as gpt-oss'
KIMI = (  # as Kimi-K2's: the template makes the ids of calls, of their names and numbers
    "{% if tools %}<|im_system|>{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_{{ m.role }}|>"
    "{% if m.role == 'tool' %}## Return of {{ m.tool_call_id }}\n{% endif %}{{ m.content or '' }}{% if m.tool_calls %}"
    "<|tool_calls_section_begin|>{% for c in m.tool_calls %}<|tool_call_begin|>"
    "{{ 'functions.' + c.function.name + ':' + loop.index0 | string }}<|tool_call_argument_begin|>"
    "{{ c.function.arguments | tojson }}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>{% endif %}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}<|im_assistant|>{% endif %}"
)
KIMI_THINKING = (  # as Kimi-K2-Thinking's: it shows the ids that it is given, in which the names are
    KIMI.replace("{{ 'functions.' + c.function.name + ':' + loop.index0 | string }}", "{{ c.id }}")
    .replace("<|tool_calls_section_begin|>", "<think>{{ m.reasoning_content }}</think><|tool_calls_section_begin|>")
)  # fmt: skip
KIMI_FIRST = (  # as Kimi-K2's first: knows tools, and drops calls
    "{% if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}"
    "{% for m in messages %}<|im_{{ m.role }}|>{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>{% endif %}"
)
HARMONY = (  # as gpt-oss': channels
    "<|start|>system<|message|>Reasoning: {{ reasoning_effort | default('medium') }}<|end|>"
    "{% set first = messages[0].content if messages[0].role == 'system' %}{% if first or tools %}<|start|>developer"
    "<|message|>{{ first or '' }}{% for t in tools or [] %}type {{ t.function.name }} = {{ t.function | tojson }}"
    "{% endfor %}<|end|>{% endif %}{% set last = namespace(name=none) %}{% for message in messages %}"
    "{% if message.role == 'user' %}<|start|>user<|message|>{{ message.content }}<|end|>"
    "{% elif message.role == 'tool' %}<|start|>functions.{{ last.name }} to=assistant<|channel|>commentary<|message|>"
    "{{ message.content | tojson }}<|end|>{% elif message.tool_calls %}"
    "{% if message.content and message.thinking %}{{ raise_exception('both') }}{% endif %}"
    "{% if message.content or message.thinking %}<|start|>assistant<|channel|>analysis<|message|>"
    "{{ message.content or message.thinking }}<|end|>{% endif %}{% set f = message.tool_calls[0].function %}"
    "<|start|>assistant to=functions.{{ f.name }}<|channel|>commentary json<|message|>{{ f.arguments | tojson }}"
    "<|call|>{% set last.name = f.name %}{% elif message.role == 'assistant' %}<|start|>assistant<|channel|>final"
    "<|message|>{{ message.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
