"""The loop of OpenAI's guide to function calling, with chat completions."""

import json
import sys

from openai import OpenAI
from shell import DESCRIPTION, SCHEMA, bash

client = OpenAI()
function = {"name": "bash", "description": DESCRIPTION, "parameters": SCHEMA}
messages = [{"role": "user", "content": sys.argv[1]}]
while True:
    completion = client.chat.completions.create(
        model="policy", messages=messages, tools=[{"type": "function", "function": function}]
    )
    message = completion.choices[0].message
    messages.append(message)
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        result = bash(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
print(message.content)
