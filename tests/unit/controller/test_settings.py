"""What is reachable from other hosts asks who calls."""

import pytest
from pydantic import ValidationError

from services.common.errors import InvalidArgumentError
from services.controller.settings import ControllerSettings
from services.rollout.settings import RolloutSettings
from services.transferqueue.settings import TransferQueueSettings

CONTROLLER = {"transferqueue_address": "127.0.0.1:1", "state_directory": "runs"}
WORKER = {"controller_address": "127.0.0.1:1", "run_id": "run_1", "worker_id": "rollout-0"}


def test_a_controller_without_users_does_not_start():
    with pytest.raises(InvalidArgumentError, match="--insecure-dev"):
        ControllerSettings(**CONTROLLER).check_exposure()


@pytest.mark.parametrize(
    "users",
    [{"insecure_dev": True}, {"admin_token_file": "t"}, {"oidc_issuer": "https://id.example"}],
)
def test_a_controller_with_users_starts(users):
    ControllerSettings(**CONTROLLER, **users).check_exposure()


def test_the_open_api_is_for_this_host_only(tmp_path):
    for name in ("rest_bind", "bind"):
        settings = {**CONTROLLER, "insecure_dev": True, name: "0.0.0.0:80", "service_key_file": "k"}
        with pytest.raises(InvalidArgumentError, match="this host only"):
            ControllerSettings(**settings).check_exposure()


@pytest.mark.parametrize(
    ("cls", "given", "missing"),
    [
        (ControllerSettings, CONTROLLER, "service_key_file"),
        (TransferQueueSettings, {}, "service_key_file"),
        (RolloutSettings, WORKER, "run_token"),
    ],
)
def test_grpc_that_other_hosts_reach_needs_tokens(cls, given, missing):
    cls(**given)
    with pytest.raises(ValidationError, match=missing):
        cls(**given, bind="0.0.0.0:50051")
    cls(**given, bind="0.0.0.0:50051", **{missing: "a" * 32})


def test_a_run_token_is_not_shown():
    assert "slr_" not in repr(RolloutSettings(**WORKER, run_token="slr_run_1.x"))


def test_tls_files_belong_together():
    with pytest.raises(ValidationError, match="all three"):
        RolloutSettings(**WORKER, tls_certificate="tls.crt")
