"""pydantic-ai: an agent with tools whose answer is an object, in each way that it can be had."""

import sys

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class Report(BaseModel):
    """An answer with fields."""

    city: str
    degrees: int


address, way = sys.argv[1:]
model = OpenAIChatModel(
    "scripted", provider=OpenAIProvider(base_url=f"{address}/v1", api_key="none")
)
agent = Agent(model, output_type={"native": NativeOutput, "tool": ToolOutput}[way](Report))


@agent.tool_plain
def get_weather(city: str) -> str:
    """Tell the weather of a city."""
    return f"{city}: 7 degrees"


first = agent.run_sync("How warm is Paris?")
print(first.output.model_dump_json())
second = agent.run_sync("And what was it?", message_history=first.all_messages())
print(second.output.model_dump_json())
