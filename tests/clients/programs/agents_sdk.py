"""The openai-agents package: an agent with two tools and a typed answer, and a second question."""

import sys

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    SQLiteSession,
    function_tool,
)
from openai import AsyncOpenAI
from pydantic import BaseModel


class Report(BaseModel):
    """An answer with fields."""

    city: str
    degrees: int


@function_tool
def get_weather(city: str) -> str:
    """Tell the weather of a city."""
    return f"{city}: 7 degrees"


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


address, api = sys.argv[1:]
client = AsyncOpenAI(base_url=f"{address}/v1", api_key="none")
models = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}
agent = Agent(
    name="Reporter",
    instructions="Use the tools.",
    tools=[get_weather, add],
    output_type=Report,
    model=models[api](model="scripted", openai_client=client),
)
quiet = RunConfig(tracing_disabled=True)
session = SQLiteSession("one")
for question in ("How warm is Paris, and a degree more?", "And what was it?"):
    result = Runner.run_sync(agent, question, run_config=quiet, session=session)
    print(result.final_output.model_dump_json())
