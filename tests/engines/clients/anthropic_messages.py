"""The loop of Anthropic's guide to tool use."""

import sys

from anthropic import Anthropic
from shell import DESCRIPTION, SCHEMA, bash

client = Anthropic()
tool = {"name": "bash", "description": DESCRIPTION, "input_schema": SCHEMA}
messages = [{"role": "user", "content": sys.argv[1]}]
while True:
    message = client.messages.create(
        model="policy", max_tokens=1024, tools=[tool], messages=messages
    )
    messages.append({"role": "assistant", "content": message.content})
    if message.stop_reason != "tool_use":
        break
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": bash(**block.input)}
        for block in message.content
        if block.type == "tool_use"
    ]
    messages.append({"role": "user", "content": results})
print(message.content[0].text)
