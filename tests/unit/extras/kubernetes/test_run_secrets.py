"""Tests that the secret of a run's pods is renewed while the run is active, and deleted with it."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from cryptography import x509

from services.common.errors import UnavailableError
from services.common.security.credentials import Identity, acting_as
from services.common.security.issuer import Issuer
from services.extras.kubernetes.launcher import RunSecrets
from tests.unit.common.security.test_issuer import DAY_S, Clock, make_issuer

NAME = "run-01-identity"


class FakeApi:
    """Fake Kubernetes API for secrets that counts writes."""

    def __init__(self) -> None:
        self.secrets: dict[str, dict[str, str]] = {}
        self.writes = 0
        self.is_away = False

    async def put_secret(self, secret: Mapping[str, Any]) -> None:
        if self.is_away:
            raise UnavailableError("the Kubernetes API does not answer")
        await asyncio.sleep(0)
        self.writes += 1
        self.secrets[secret["metadata"]["name"]] = secret["stringData"]

    async def delete_secret(self, name: str) -> None:
        self.secrets.pop(name, None)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def identity(tmp_path, clock) -> Identity:
    make_issuer(tmp_path / "issuer")
    return Identity(key=b"k" * 32, issue=Issuer(tmp_path / "issuer", clock=clock).issue)


async def test_a_run_gets_a_certificate_that_names_it_and_is_renewed(identity, clock):
    api = FakeApi()
    secrets = RunSecrets(api, owner={"uid": "u1"}, clock=clock)
    with acting_as(identity):
        await secrets.put("run_01")
        first = api.secrets[NAME]
        certificate = x509.load_pem_x509_certificate(first["tls.crt"].encode())
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
        assert names.value.get_values_for_type(x509.DNSName) == ["run-01.worker.slipstream"]
        clock.now += DAY_S
        await secrets.renew()
        assert api.secrets[NAME] is first
        clock.now += DAY_S
        await secrets.renew()
        assert api.secrets[NAME]["tls.key"] != first["tls.key"]
        assert api.secrets[NAME]["token"] == first["token"]
        await secrets.renew()
        assert api.writes == 2


async def test_what_cannot_be_renewed_now_is_tried_again(identity, clock):
    api = FakeApi()
    secrets = RunSecrets(api, owner={}, clock=clock)
    with acting_as(identity):
        await secrets.put("run_01")
        clock.now += 2 * DAY_S
        api.is_away = True
        await secrets.renew()
        assert api.writes == 1
        api.is_away = False
        await secrets.renew()
        assert api.writes == 2


async def test_a_later_controller_renews_what_an_earlier_one_wrote(identity, clock):
    api = FakeApi()
    secrets = RunSecrets(api, owner={}, clock=clock)
    with acting_as(identity):
        secrets.take_over("run_01")
        assert api.writes == 0, "a pod that starts may be looking for it"
        await secrets.renew()
        assert set(api.secrets[NAME]) == {"token", "tls.crt", "tls.key", "ca.crt"}
        secrets.take_over("run_01")
        await secrets.renew()
        assert api.writes == 1


async def test_the_secret_of_an_ended_run_stays_deleted(identity, clock):
    api = FakeApi()
    secrets = RunSecrets(api, owner={}, clock=clock)
    with acting_as(identity):
        await secrets.put("run_01")
        clock.now += 2 * DAY_S
        await asyncio.gather(secrets.remove("run_01"), secrets.renew())
        assert api.secrets == {}


async def test_without_an_issuer_a_run_has_a_token_only(clock):
    api = FakeApi()
    secrets = RunSecrets(api, owner={}, clock=clock)
    with acting_as(Identity(key=b"k" * 32)):
        await secrets.put("run_01")
        secrets.take_over("run_02")
        await secrets.renew()
    assert set(api.secrets[NAME]) == {"token"}
    assert api.writes == 1
