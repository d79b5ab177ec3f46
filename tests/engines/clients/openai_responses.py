"""The loop of OpenAI's guide to function calling, with responses."""

import json
import sys

from openai import OpenAI
from shell import DESCRIPTION, SCHEMA, bash

client = OpenAI()
tool = {"type": "function", "name": "bash", "description": DESCRIPTION, "parameters": SCHEMA}
items = [{"role": "user", "content": sys.argv[1]}]
while True:
    response = client.responses.create(model="policy", tools=[tool], input=items)
    items += response.output
    calls = [item for item in response.output if item.type == "function_call"]
    if not calls:
        break
    for call in calls:
        result = bash(**json.loads(call.arguments))
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
print(response.output_text)
