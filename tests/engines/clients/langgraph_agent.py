"""The first example of LangChain's agents, which are graphs of LangGraph."""

import sys

import shell
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI

agent = create_agent(
    model=ChatOpenAI(model="policy"), tools=[shell.bash], system_prompt="You play with dice."
)
result = agent.invoke({"messages": [{"role": "user", "content": sys.argv[1]}]})
print(result["messages"][-1].content)
