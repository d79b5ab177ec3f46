"""Names that a rollout and a server of a fleet share: paths, headers, and the version of this interface."""

from typing import Final

MIDDLEWARE: Final = "services.extras.fleets.server.FleetMember"
WORKER_EXTENSION: Final = "services.extras.fleets.worker.FleetWorker"
API: Final = 4
"""Version of the interface; a server of another one is refused."""
SCHEDULER: Final = "services.extras.fleets.scheduler.fleet_scheduler"
"""Scheduler of vLLM with which a server sends tokens as :data:`TOKEN_LINES`."""
REQUESTS: Final = "slipstream-"
"""Begin of the engine's names of requests whose tokens that scheduler gathers."""
TOKEN_LINES: Final = "application/x-slipstream-tokens"  # noqa: S105 -- a content type
"""Content type of a response to the requests of a group: one JSON list a line, with the number of a request,
token ids, their logprobs, pairs of a weight version and its number of tokens, the number of cached tokens of
the context, and the finish reason or null. The client names it in ``Accept``, and sends ``group``, a unique
name, and ``requests``, pairs of a number and what vLLM takes as a request. A request with images names
their digest in ``model_inputs``, and ``model_inputs`` of the group has the tensors by digest, in safetensors'
format and base64. A server whose description has
``sends_token_lines`` has it; any other one answers single requests as vLLM does. Such a response goes on when
a version is replaced."""
PREFIX: Final = "/slipstream/v1"
STATE: Final = f"{PREFIX}/state"
"""GET: the server's instance, owner and served weights. With a session, it also renews the session."""
ATTACH: Final = f"{PREFIX}/attach"
"""POST: begins a session; the server then serves no weights before this session has loaded some.
DELETE: ends it."""
WEIGHTS: Final = f"{PREFIX}/weights"
"""POST: announces a version. PUT ``/{bucket}``: one bucket of its bytes."""
LOAD: Final = f"{PREFIX}/load"
"""POST: verifies the announced version and puts it into service."""
GROUP: Final = f"{PREFIX}/group"
"""POST: starts members of weight groups in the engine's workers (``open``), or passes messages to them and
from them (``messages``)."""
CUT: Final = f"{PREFIX}/cut"
"""POST: ends requests (``numbers``) of a group (``group``) whose response goes on."""
GENERATE: Final = "/inference/v1/generate"
"""vLLM's own path for token ids in and out (``--enable-scale-out``)."""
LOAD_TIMEOUT_S: Final = 120.0
"""Time-out of a load; the longest one copies all weights of a large model. Workers have a little less."""
WORKERS_TIMEOUT_S: Final = LOAD_TIMEOUT_S - 10.0
"""Time-out of a load in the workers: the rollout still waits for its reason."""
SESSION_HEADER: Final = "slipstream-session"
VERSION_HEADER: Final = "slipstream-weight-version"
"""Version that must be in service; otherwise the server answers 412 and samples nothing."""
ADAPTERS: Final = "adapters"
"""Value of ``holds`` with which a run attaches that shares a server; others bring whole weights."""
MAX_SHARE: Final = 1000.0
"""Max weight of a run among those that share a server."""
LEASE_S: Final = 15.0
"""Seconds without a sign of life of its owner after which another owner may take a server over."""
WITHOUT_TOKEN: Final = "SLIPSTREAM_FLEET_WITHOUT_TOKEN"  # noqa: S105 -- a variable's name
"""Environment variable of a server: ``1`` lets it receive weights although it has no token."""
