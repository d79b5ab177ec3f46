"""Tests of OpenID Connect tokens with an identity provider on the loopback interface."""

import http.server
import json
import threading
import time

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa

from services.common.errors import (
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
)
from services.controller.api.principals import Authenticators, OidcProvider, Principal, TokenStore

KEY = rsa.generate_private_key(public_exponent=65537, key_size=2048)
FOREIGN = rsa.generate_private_key(public_exponent=65537, key_size=2048)


@pytest.fixture
def issuer():
    """Yields the URL of an identity provider on loopback that publishes ``KEY``."""
    published = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(KEY.public_key()))
    documents = {"/keys": {"keys": [{**published, "kid": "1", "use": "sig", "alg": "RS256"}]}}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(documents[self.path]).encode())

        def log_message(self, *arguments):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    url = f"http://127.0.0.1:{server.server_port}"
    documents["/.well-known/openid-configuration"] = {"issuer": url, "jwks_uri": f"{url}/keys"}
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield url
    server.shutdown()
    server.server_close()
    thread.join()


def provider_at(issuer: str, roles_claim: str = "slipstream_roles") -> OidcProvider:
    return OidcProvider(issuer, audience="slipstream", roles_claim=roles_claim, name_claim="sub")


def header(issuer: str, *, key=KEY, algorithm="RS256", **changes) -> str:
    claims = {
        "iss": issuer,
        "aud": "slipstream",
        "sub": "ann",
        "exp": time.time() + 300,
        "slipstream_roles": ["blue:operator"],
        **changes,
    }
    token = jwt.encode(claims, key, algorithm=algorithm, headers={"kid": "1"})
    return f"Bearer {token}"


def test_a_token_that_is_no_web_token_is_not_called_a_broken_one(issuer):
    with pytest.raises(UnauthenticatedError, match="expired or revoked"):
        provider_at(issuer).authenticate("Bearer sl_ended-page-token")


def test_a_token_gives_name_project_and_role(issuer):
    principal = provider_at(issuer).authenticate(header(issuer))
    assert principal == Principal(name="ann", project="blue", role="operator")


def test_roles_may_be_inside_an_object(issuer):
    token = header(issuer, realm_access={"roles": ["offline", "red:viewer"]})
    principal = provider_at(issuer, "realm_access.roles").authenticate(token)
    assert (principal.project, principal.role) == ("red", "viewer")


@pytest.mark.parametrize(
    "changes",
    [
        {"exp": time.time() - 300},
        # a day ahead: the value is computed when pytest collects the tests
        {"nbf": time.time() + 86_400},
        {"aud": "another"},
        {"iss": "https://elsewhere.example"},
        {"key": FOREIGN},
        {"key": "shared-secret-of-thirty-two-bytes", "algorithm": "HS256"},
        {"key": None, "algorithm": "none"},
    ],
    ids=["expired", "early", "audience", "issuer", "foreign key", "shared secret", "unsigned"],
)
def test_a_token_that_is_not_valid_here_is_refused(issuer, changes):
    with pytest.raises(UnauthenticatedError):
        provider_at(issuer).authenticate(header(issuer, **changes))


@pytest.mark.parametrize(
    "roles", [[], ["blue:owner"], ["operator"], "blue:admin", ["blue:viewer", "red:viewer"]]
)
def test_a_token_without_one_role_in_one_project_may_do_nothing(issuer, roles):
    with pytest.raises(PermissionDeniedError, match="slipstream_roles"):
        provider_at(issuer).authenticate(header(issuer, slipstream_roles=roles))


@pytest.mark.parametrize(
    "roles",
    [
        ["blue:viewer", "blue:admin", "blue:operator"],
        ["blue:admin", "blue:viewer"],
        ["blue:owner", "blue:admin"],
    ],
)
def test_of_several_roles_in_a_project_the_highest_holds(issuer, roles):
    principal = provider_at(issuer).authenticate(header(issuer, slipstream_roles=roles))
    assert (principal.project, principal.role) == ("blue", "admin")


def test_a_provider_that_is_away_is_not_a_wrong_token(issuer):
    with pytest.raises(UnavailableError):
        provider_at("http://127.0.0.1:1").authenticate(header(issuer))


def test_api_tokens_and_the_provider_work_side_by_side(issuer, database):
    tokens = TokenStore(database)
    token = tokens.create(name="bob", project="red", role="viewer")
    users = Authenticators([tokens, provider_at(issuer)])
    assert users.authenticate(f"Bearer {token}").name == "bob"
    assert users.authenticate(header(issuer)).name == "ann"
    with pytest.raises(UnauthenticatedError):
        users.authenticate("Bearer slp_wrong")
    with pytest.raises(UnauthenticatedError):
        users.authenticate("")
