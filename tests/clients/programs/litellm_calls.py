"""litellm: the same conversation by OpenAI's and by Anthropic's API, with tools, streamed."""

import json
import sys

import litellm

address, provider = sys.argv[1:]
base = f"{address}/v1" if provider == "openai" else address
tools = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Tell the weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]
common = {
    "model": f"{provider}/scripted",
    "api_base": base,
    "api_key": "none",
    "tools": tools,
}
messages = [
    {"role": "system", "content": "Use the tools."},
    {"role": "user", "content": "How is the sky of Paris?"},
]
first = litellm.completion(messages=messages, **common).choices[0].message
messages.append(first.model_dump())
for call in first.tool_calls:
    print(call.function.name, json.loads(call.function.arguments))
    messages.append({"role": "tool", "tool_call_id": call.id, "content": "clear"})
parts = list(litellm.completion(messages=messages, stream=True, **common))
print(litellm.stream_chunk_builder(parts).choices[0].message.content)
