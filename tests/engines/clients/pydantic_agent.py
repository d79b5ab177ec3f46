"""The first example of Pydantic AI with a tool."""

import sys

import shell
from pydantic_ai import Agent

agent = Agent("openai-chat:policy", instructions="You play with dice.", tools=[shell.bash])
result = agent.run_sync(sys.argv[1])
print(result.output)
