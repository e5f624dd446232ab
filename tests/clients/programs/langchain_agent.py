"""langchain-openai: tools bound to a model, their results, a typed answer, and a stream."""

import sys
from typing import Literal

from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Report(BaseModel):
    """An answer with fields."""

    city: str
    sky: Literal["clear", "grey"]


@tool
def get_weather(city: str) -> str:
    """Tell the weather of a city."""
    return f"{city}: clear"


address, responses = sys.argv[1], sys.argv[2] == "responses"
model = ChatOpenAI(
    model="scripted", base_url=f"{address}/v1", api_key="none", use_responses_api=responses
)
messages = [SystemMessage("Use the tools."), HumanMessage("How is the sky of Paris?")]
answer = model.bind_tools([get_weather], strict=True).invoke(messages)
messages.append(answer)
for call in answer.tool_calls:
    print(call["name"], call["args"])
    messages.append(ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"]))
whole = None
for part in model.bind_tools([get_weather]).stream(messages):
    whole = part if whole is None else whole + part
print(whole.text if isinstance(whole.text, str) else whole.text())
messages += [whole, HumanMessage("As an object.")]
print(model.with_structured_output(Report).invoke(messages).model_dump_json())
