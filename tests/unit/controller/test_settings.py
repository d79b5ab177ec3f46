"""Tests that servers on non-loopback addresses require authentication."""

from contextlib import AsyncExitStack
from importlib import import_module

import pytest
from cryptography import x509
from pydantic import ValidationError

from services.common.doors import DoorError
from services.common.errors import InvalidArgumentError
from services.controller.__main__ import extensions_of, open_extensions, open_fleets
from services.controller.settings import ControllerSettings
from services.rollout.settings import RolloutSettings
from services.transferqueue.settings import TransferQueueSettings
from tests.helpers.packages import install
from tests.unit.common.security.test_issuer import make_issuer

CONTROLLER = {"transferqueue_address": "127.0.0.1:1", "state_directory": "runs"}
WORKER = {"controller_address": "127.0.0.1:1", "run_id": "run_1", "worker_id": "rollout-0"}


def test_a_controller_without_users_does_not_start():
    with pytest.raises(InvalidArgumentError, match="admin_token_file"):
        ControllerSettings(**CONTROLLER).check_users()


@pytest.mark.parametrize(
    "users",
    [{"admin_token_file": "t"}, {"oidc_issuer": "https://id.example"}],
)
def test_a_controller_with_users_starts(users):
    ControllerSettings(**CONTROLLER, **users).check_users()


@pytest.mark.parametrize(
    ("bind", "hosts"),
    [
        ("127.0.0.1:8700", ("127.0.0.1", "localhost", "[::1]")),
        ("0.0.0.0:8700", ()),
    ],
)
def test_on_loopback_the_api_has_the_names_of_loopback_only(bind, hosts):
    assert ControllerSettings(**CONTROLLER, rest_bind=bind).hosts == hosts
    assert ControllerSettings(**CONTROLLER, rest_bind=bind, rest_hosts=["a"]).hosts == ("a",)


@pytest.mark.parametrize(
    ("cls", "settings", "missing"),
    [
        (ControllerSettings, CONTROLLER, "service_key_file"),
        (TransferQueueSettings, {}, "service_key_file"),
        (RolloutSettings, WORKER, "run_token"),
    ],
)
def test_grpc_that_other_hosts_reach_needs_tokens(cls, settings, missing):
    cls(**settings)
    with pytest.raises(ValidationError, match=missing):
        cls(**settings, bind="0.0.0.0:50051")
    cls(**settings, bind="0.0.0.0:50051", **{missing: "a" * 32})


def test_a_run_token_is_not_shown():
    assert "slr_" not in repr(RolloutSettings(**WORKER, run_token="slr_run_1.x"))


def test_tls_files_belong_together():
    with pytest.raises(ValidationError, match="all three"):
        RolloutSettings(**WORKER, tls_certificate="tls.crt")


@pytest.mark.parametrize(
    ("cls", "settings", "name"),
    [
        (ControllerSettings, CONTROLLER, "controller.slipstream"),
        (TransferQueueSettings, {}, "transferqueue.slipstream"),
    ],
)
def test_services_make_their_certificates_with_an_issuer_or_have_them_in_files(
    tmp_path, cls, settings, name
):
    make_issuer(tmp_path / "issuer")
    identity = cls(**settings, tls_issuer=tmp_path / "issuer").identity()
    names = [name_of(identity.tls.current()), name_of(identity.certificate_for("run_1"))]
    assert names == [name, "run-1.worker.slipstream"]
    assert cls(**settings).identity().certificate_for("run_1") is None
    files = dict.fromkeys(("tls_certificate", "tls_key", "tls_authority"), "file")
    with pytest.raises(ValidationError, match="tls_issuer"):
        cls(**settings, tls_issuer=tmp_path, **files)


def name_of(certificate):
    parsed_certificate = x509.load_pem_x509_certificate(certificate.chain)
    names = parsed_certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    (name,) = names.value.get_values_for_type(x509.DNSName)
    return name


EXTENSION = """
from contextlib import asynccontextmanager

SERVED = []


@asynccontextmanager
async def serving(settings, manager):
    SERVED.append((settings.launcher, manager))
    yield


def read_fleets(file):
    return ["fleets of", str(file)]
"""


async def test_a_package_extends_the_controller(tmp_path, monkeypatch):
    (tmp_path / "their_extension.py").write_text(EXTENSION)
    points = {"theirs": "their_extension:serving", "broken": "their_extension:missing"}
    formats = {"toml": "their_extension:read_fleets"}
    groups = {"slipstream.controller_extensions": points, "slipstream.fleet_formats": formats}
    install(tmp_path, monkeypatch, entry_points=groups)
    settings = ControllerSettings(
        **CONTROLLER, extensions=["theirs"], fleets_file="fleets.toml", fleets_format="toml"
    )
    async with AsyncExitStack() as stack:
        await open_extensions(stack, settings, "manager")
    assert import_module("their_extension").SERVED == [("process", "manager")]
    assert open_fleets(settings) == ["fleets of", "fleets.toml"]

    broken = ControllerSettings(**CONTROLLER, extensions=["broken"])
    async with AsyncExitStack() as stack:
        with pytest.raises(DoorError, match=r"slipstream-test-package 1\.2"):
            await open_extensions(stack, broken, "manager")
        await open_extensions(stack, ControllerSettings(**CONTROLLER), "manager")
    with pytest.raises(ValidationError, match="'rlruns', 'theirs' or 'broken'"):
        ControllerSettings(**CONTROLLER, extensions=["unknown"])


def test_rlruns_are_served_on_kubernetes_only():
    keys = {"launcher": "kubernetes", "rlrun_namespaces": ["a"], "extensions": ["rlruns"]}
    assert extensions_of(ControllerSettings(**CONTROLLER, **keys)) == ["rlruns"]
    assert extensions_of(ControllerSettings(**CONTROLLER, rlrun_namespaces=["a"])) == []
