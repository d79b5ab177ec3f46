"""The first example of the OpenAI Agents SDK with a tool."""

import sys

import shell
from agents import Agent, Runner, function_tool

agent = Agent(
    name="Player",
    instructions="You play with dice.",
    tools=[function_tool(shell.bash)],
    model="policy",
)
result = Runner.run_sync(agent, sys.argv[1])
print(result.final_output)
