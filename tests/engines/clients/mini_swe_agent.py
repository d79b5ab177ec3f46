"""The example of mini-swe-agent's Python interface; its commands run in bubblewrap."""

import sys

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.extra.bubblewrap import BubblewrapEnvironment
from minisweagent.models.litellm_model import LitellmModel

agent = DefaultAgent(
    LitellmModel(model_name="openai/policy"),
    BubblewrapEnvironment(),
    system_template="You play with dice.",
    instance_template="{{task}}",
)
result = agent.run(sys.argv[1])
print(result["exit_status"])
