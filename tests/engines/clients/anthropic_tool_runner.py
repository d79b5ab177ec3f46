"""The tool runner of Anthropic's SDK, with streams."""

import sys

import shell
from anthropic import Anthropic, beta_tool

client = Anthropic()
runner = client.beta.messages.tool_runner(
    model="policy",
    max_tokens=1024,
    tools=[beta_tool(shell.bash)],
    messages=[{"role": "user", "content": sys.argv[1]}],
    stream=True,
)
for stream in runner:
    message = stream.get_final_message()
print(message.content[0].text)
