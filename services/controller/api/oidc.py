"""Authentication of callers by tokens of an OpenID Connect provider."""

from collections.abc import Mapping
from typing import Any, cast, get_args

import httpx
import jwt

from services.common.errors import (
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
)
from services.controller.api.principals import Principal, bearer_token
from services.controller.models import Role

# Only asymmetric signatures: with a shared secret, a verifier of tokens could also create them.
_ALGORITHMS = ("RS256", "PS256", "ES256", "EdDSA")
_LEEWAY_S = 60
_TIMEOUT_S = 10.0
_KEY_CACHE_S = 300.0


class OidcProvider:
    """Verifies JSON web tokens with the keys that a provider publishes. Methods block.

    Args:
        issuer: URL of the provider; tokens must name it, and its discovery document lists its keys.
        audience: Audience that tokens must name.
        roles_claim: Claim with a list of ``project:role``, such as ``blue:operator``; dots descend
            into objects.
    """

    def __init__(self, issuer: str, *, audience: str, roles_claim: str, name_claim: str) -> None:
        self._issuer = issuer
        self._audience = audience
        self._roles_claim = roles_claim
        self._name_claim = name_claim
        self._keys: jwt.PyJWKClient | None = None

    def authenticate(self, authorization: str) -> Principal:
        """Returns the principal of an ``Authorization`` header.

        Raises:
            UnauthenticatedError: If the token is not valid here.
            PermissionDeniedError: If the token does not give a role in exactly one project.
            UnavailableError: If the provider does not publish its keys.
        """
        token = bearer_token(authorization)
        if token.count(".") != 2:
            raise UnauthenticatedError(
                f"the token is unknown, expired or revoked here, and it is no JSON web token of "
                f"{self._issuer}; log in again"
            )
        claims = self._verify(token)
        project, role = self._role(claims)
        return Principal(
            name=str(claims[self._name_claim]),
            project=project,
            role=role,
            expire_time=float(claims["exp"]) + _LEEWAY_S,
        )

    def _verify(self, token: str) -> Mapping[str, Any]:
        try:
            key = self._published_keys().get_signing_key_from_jwt(token)
            claims: dict[str, Any] = jwt.decode(
                token,
                key.key,
                algorithms=list(_ALGORITHMS),
                issuer=self._issuer,
                audience=self._audience,
                leeway=_LEEWAY_S,
                options={"require": ["exp", "iss", "aud", self._name_claim]},
            )
        except (jwt.PyJWKClientConnectionError, httpx.HTTPError) as error:
            raise UnavailableError(
                f"cannot read the keys of the identity provider {self._issuer}: {error}"
            ) from error
        except jwt.PyJWTError as error:
            raise UnauthenticatedError(
                f"the token is invalid ({error}); log in again with your identity provider"
            ) from error
        return claims

    def _published_keys(self) -> jwt.PyJWKClient:
        if self._keys is None:
            url = f"{self._issuer.rstrip('/')}/.well-known/openid-configuration"
            document = httpx.get(url, timeout=_TIMEOUT_S).raise_for_status().json()
            self._keys = jwt.PyJWKClient(
                document["jwks_uri"], lifespan=_KEY_CACHE_S, timeout=_TIMEOUT_S
            )
        return self._keys

    def _role(self, claims: Mapping[str, Any]) -> tuple[str, Role]:
        entries: Any = claims
        for part in self._roles_claim.split("."):
            entries = entries.get(part, {}) if isinstance(entries, Mapping) else {}
        roles: dict[str, Role] = {}
        for entry in entries if isinstance(entries, list) else []:
            project, _, role = str(entry).rpartition(":")
            if project and role in get_args(Role):
                found = cast("Role", role)
                # The highest of several roles in a project counts, in any order.
                roles[project] = max(found, roles.get(project, found), key=get_args(Role).index)
        if len(roles) != 1:
            raise PermissionDeniedError(
                f"the token's claim {self._roles_claim!r} must contain a role in one project, such as "
                f"'blue:operator', got {len(roles)}: {', '.join(sorted(roles)) or 'none'}"
            )
        return next(iter(roles.items()))
