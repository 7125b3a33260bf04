"""Built-in chat templates of well-known model families, by name, for files with none or a wrong one.

Each writes what the family's published template writes for conversations without tools.
"""

from __future__ import annotations

_ALTERNATE = (
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('after the system message, user and assistant must take turns, the user first') }}{% endif %}"
)
_WITHOUT_SYSTEM = (
    "{% set system = messages[0]['content'] if messages[0]['role'] == 'system' else '' %}"
    "{% set rest = messages[1:] if messages[0]['role'] == 'system' else messages %}"
)

TEMPLATES = {
    "chatml": (
        "{% for message in messages %}"
        "{{ '<|im_start|>' ~ message['role'] ~ '\n' ~ message['content'] ~ '<|im_end|>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "gemma": (  # Gemma 3: the system message comes at the beginning of the first user message
        "{{ bos_token }}" + _WITHOUT_SYSTEM + "{% for message in rest %}" + _ALTERNATE + "{{ '<start_of_turn>' ~ "
        "('model' if message['role'] == 'assistant' else 'user') ~ '\n' ~ (system ~ '\n\n' if loop.first and system "
        "else '') ~ message['content'] | trim ~ '<end_of_turn>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
    ),
    "llama2": (
        _WITHOUT_SYSTEM + "{% for message in rest %}" + _ALTERNATE + "{% if message['role'] == 'user' %}{{ bos_token ~ "
        "'[INST] ' ~ ('<<SYS>>\n' ~ system ~ '\n<</SYS>>\n\n' if loop.first and system else '') ~ "
        "message['content'] | trim ~ ' [/INST]' }}{% else %}{{ ' ' ~ message['content'] | trim ~ ' ' ~ eos_token }}"
        "{% endif %}{% endfor %}"
    ),
    "llama3": (
        "{{ bos_token }}{% for message in messages %}{{ '<|start_header_id|>' ~ message['role'] ~ "
        "'<|end_header_id|>\n\n' ~ message['content'] | trim ~ '<|eot_id|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
    ),
    "mistral": (  # 7B v0.3: the system message comes at the beginning of the last user message
        "{{ bos_token }}" + _WITHOUT_SYSTEM + "{% for message in rest %}" + _ALTERNATE + "{% if message['role'] == "
        "'user' %}{{ '[INST] ' ~ (system ~ '\n\n' if loop.last and system else '') ~ message['content'] ~ '[/INST]' }}"
        "{% else %}{{ ' ' ~ message['content'] | trim ~ eos_token }}{% endif %}{% endfor %}"
    ),
    "phi3": (
        "{% for message in messages %}{{ '<|' ~ message['role'] ~ '|>\n' ~ message['content'] ~ '<|end|>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
    ),
    "vicuna": (
        _WITHOUT_SYSTEM + "{{ system ~ ' ' if system else '' }}{% for message in rest %}" + _ALTERNATE + "{% if "
        "message['role'] == 'user' %}{{ 'USER: ' ~ message['content'] ~ ' ASSISTANT:' }}{% else %}"
        "{{ ' ' ~ message['content'] ~ eos_token }}{% endif %}{% endfor %}"
    ),
    "zephyr": (
        "{% for message in messages %}{{ '<|' ~ message['role'] ~ '|>\n' ~ message['content'] ~ eos_token ~ '\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
    ),
}

ENDS = {"chatml": "<|im_end|>", "gemma": "<end_of_turn>", "llama3": "<|eot_id|>", "phi3": "<|end|>"}
"""Ends of turns, where these differ from the vocabulary's EOS."""
