"""Chat templates in the style of the families that call tools, as short as they can be."""

from __future__ import annotations

from typing import Any

HERMES = (
    "{% if tools %}<|im_start|>system\n"
    "{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n"
    'Answer <tool_call>{"name": <name>, "arguments": <object>}</tool_call><|im_end|>\n'
    "{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n"
    "</tool_response><|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}<|im_end|>\n"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% elif open_thinking is defined %}<think>\n{% endif %}{% endif %}"
)
LLAMA3 = (
    "{% if not tools is defined %}{% set tools = none %}{% endif %}{{ bos_token }}"
    "{% if tools is not none %}<|start_header_id|>system<|end_header_id|>\n\n"
    'Respond in the format {"name": function name, "parameters": dictionary}.\n'
    "{% for t in tools %}{{ t | tojson(indent=4) }}{% endfor %}<|eot_id|>{% endif %}"
    "{% for m in messages %}<|start_header_id|>"
    "{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>\n\n"
    "{% if 'tool_calls' in m %}"
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    '{"name": "{{ m.tool_calls[0].function.name }}", '
    '"parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
    "{% else %}{{ m.content | trim }}{% endif %}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools is defined and loop.first %}[AVAILABLE_TOOLS]{{ tools | tojson }}"
    "[/AVAILABLE_TOOLS]{% endif %}[INST]{{ m.content }}[/INST]"
    "{% elif m.tool_calls is defined %}[TOOL_CALLS][{% for call in m.tool_calls %}"
    "{% if call.id | length != 9 %}{{ raise_exception('ids have 9 letters') }}{% endif %}"
    '{{ (call.function | tojson)[:-1] }}, "id": "{{ call.id }}"}'
    "{{ ', ' if not loop.last }}{% endfor %}]{{ eos_token }}"
    "{% elif m.role == 'tool' %}"
    "{% if m.tool_call_id | length != 9 %}{{ raise_exception('ids have 9 letters') }}{% endif %}"
    '[TOOL_RESULTS]{"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}'
    "[/TOOL_RESULTS]{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
QWEN_CODER = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}\n"
    "<tool_call>\n<function=name>\n<parameter=key>\nvalue\n</parameter>\n</function>\n</tool_call>"
    "<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {
    "hermes": HERMES,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "qwen3-coder": QWEN_CODER,
}


def function_tool(name: str, **properties: str) -> dict[str, Any]:
    """A tool in OpenAI's form, its arguments by their JSON types."""
    schema = {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind in properties.items()},
        "required": list(properties),
    }
    return {
        "type": "function",
        "function": {"name": name, "description": f"The {name}.", "parameters": schema},
    }


WEATHER = function_tool("get_weather", city="string")
ADD = function_tool("add", a="integer", note="string")
