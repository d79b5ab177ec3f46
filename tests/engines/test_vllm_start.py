"""vLLM's child processes start regardless of how their parent has used the GPU driver."""

import json
import os
import subprocess
import sys

import pytest
import torch
from transformers import Qwen2Config

from services.common.runspec.engines import ENGINES
from services.rollout.engines.base import EngineDiedError
from services.rollout.engines.build import make_engine
from services.rollout.engines.engine_config import EngineConfig

pytest.importorskip("vllm")

# On a machine with a GPU, the services choose the device first, and a child forked later fails at its first
# use of the device. The script makes the fork itself fail so, because torch's CPU build has no driver.
_START = """
import json, os, sys

def refuse():
    sys.stderr.write("Cannot re-initialize CUDA in forked subprocess")
    sys.stderr.flush()
    os._exit(3)

def work():
    pass

if __name__ == "__main__":
    import torch
    from services.common.runspec.engines import ENGINES
    from services.common.settings import set_defaults
    os.register_at_fork(after_in_child=refuse)
    if "prepared" in sys.argv:
        set_defaults(ENGINES["vllm"].environment)
    import vllm
    from vllm.utils.system_utils import get_mp_context
    child = get_mp_context().Process(target=work)
    child.start()
    child.join(60)
    print(json.dumps(child.exitcode))
"""


def _exit_code_of_child(tmp_path: object, *arguments: str) -> int:
    script = f"{tmp_path}/start.py"
    with open(script, "w") as file:  # noqa: PTH123
        file.write(_START)
    # Another test may have set the engine's variables in this process.
    names = ENGINES["vllm"].environment
    result = subprocess.run(
        [sys.executable, script, *arguments],
        env={name: value for name, value in os.environ.items() if name not in names},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    code: int = json.loads(result.stdout.splitlines()[-1])
    return code


def test_a_forked_child_of_a_process_that_used_its_device_fails(tmp_path: object) -> None:
    assert _exit_code_of_child(tmp_path) == 3


def test_vllms_children_start_after_this_process_used_its_device(tmp_path: object) -> None:
    assert _exit_code_of_child(tmp_path, "prepared") == 0


def test_an_option_that_vllm_does_not_have_is_refused_before_it_starts() -> None:
    engine_config = EngineConfig(
        config=Qwen2Config(),
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_running=2,
        arguments={"gpu_memory_utilisation": 0.5},
    )
    with pytest.raises(ValueError, match="did you mean gpu_memory_utilization"):
        make_engine("vllm", engine_config)


async def test_the_last_lines_of_the_log_say_why_vllm_did_not_start(
    capfd: pytest.CaptureFixture[str],
) -> None:
    engine_config = EngineConfig(
        config=Qwen2Config(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
            architectures=["Qwen2ForCausalLM"],
        ),
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_running=2,
        arguments={"max_model_len": 4096, "kv_cache_memory_bytes": 4096},
    )
    with pytest.raises(EngineDiedError):
        await make_engine("vllm", engine_config).run()
    *_, last = capfd.readouterr().err.rstrip().splitlines()
    assert "No available memory for the cache blocks" in last
