"""Principals of the API: by stored tokens, of which only digests are kept, or by OpenID Connect."""

import hashlib
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol, cast, get_args

import httpx
import jwt
import sqlalchemy as sa

from services.common.errors import (
    NotFoundError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
)
from services.common.security.access import AUTH_FAILURES
from services.controller.schemas import Role, covers
from services.controller.store.database import Database
from services.controller.store.records import Run
from services.controller.store.tables import API_TOKENS

_PREFIX = "slp_"
_PARENTS = API_TOKENS.alias("parents")
# Tokens derived from a token that has been revoked.
_IS_ORPHAN = API_TOKENS.c.parent_digest.is_not(None) & API_TOKENS.c.parent_digest.not_in(
    sa.select(_PARENTS.c.digest)
)
DEFAULT_PROJECT = "default"
# Browsers that one token has signed in.
_MAX_DERIVED = 100
# Only asymmetric signatures: with a shared secret, a verifier of tokens could also create them.
_ALGORITHMS = ("RS256", "PS256", "ES256", "EdDSA")
_LEEWAY_S = 60
_TIMEOUT_S = 10.0
_KEY_CACHE_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """User or program that calls the API."""

    name: str
    project: str
    role: Role
    expire_time: float | None = field(default=None, compare=False)
    """Time at which its token expires, in seconds since the epoch; None means never."""
    root_digest: str | None = field(default=None, compare=False)
    """Digest of the API token that authenticated the principal or, if that token was derived, of its
    parent token; None if no API token was used."""
    authorization: str = field(default="", repr=False, compare=False)
    """The ``Authorization`` header, kept to check later if it is still valid."""

    def require_role(self, role: Role) -> None:
        """Checks that the principal has at least a role.

        Raises:
            PermissionDeniedError: If its role is lower.
        """
        if not covers(self.role, role):
            raise PermissionDeniedError(
                f"this operation requires the role {role}, but {self.name} has {self.role}; ask an admin "
                f"of project {self.project}"
            )

    def require_run(self, run: Run) -> Run:
        """Checks that a run belongs to the principal's project; other projects' runs appear not to exist.

        Raises:
            NotFoundError: If it belongs to another project.
        """
        if run.project != self.project:
            raise NotFoundError(
                f"run {run.run_id!r} does not exist; list the runs of the project",
                run_id=run.run_id,
            )
        return run


class Authenticator(Protocol):
    """Authenticates principals. Methods block."""

    def authenticate(self, authorization: str) -> Principal:
        """Returns the principal of an ``Authorization`` header.

        Raises:
            UnauthenticatedError: If it names no known principal.
        """


class Authenticators:
    """Tries several authenticators in order; the first one that knows the caller decides."""

    def __init__(self, authenticators: Sequence[Authenticator]) -> None:
        self._authenticators = authenticators

    def authenticate(self, authorization: str) -> Principal:
        """Returns the principal of an ``Authorization`` header.

        Raises:
            UnauthenticatedError: If no authenticator knows it; the error is that of the last one.
        """
        *authenticators, last = self._authenticators
        for way in authenticators:
            try:
                return way.authenticate(authorization)
            except UnauthenticatedError:
                continue
        try:
            return last.authenticate(authorization)
        except UnauthenticatedError:
            AUTH_FAILURES.labels("unauthenticated").inc()
            raise


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenInfo:
    """API token without its secret."""

    name: str
    project: str
    role: Role
    expire_time: float | None
    """Seconds since the epoch; None means that it never expires."""


class TokenStore:
    """Stores API tokens in the database. Methods block."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def create(self, *, name: str, project: str, role: Role, life_s: float | None = None) -> str:
        """Creates a token; its text is available only from this call."""
        token = _PREFIX + secrets.token_urlsafe(32)
        self.accept(token, name=name, project=project, role=role, life_s=life_s)
        return token

    def derive(self, who: Principal, life_s: float) -> str:
        """Creates a token for a principal that expires no later than the token that authenticated it.

        If an API token authenticated the principal, revoking that token also revokes the new one. Deletes
        expired tokens, and all but the newest ``_MAX_DERIVED`` tokens derived from the same token.
        """
        token = _PREFIX + secrets.token_urlsafe(32)
        if who.expire_time is not None:
            life_s = min(life_s, who.expire_time - time.time())
        self.accept(
            token,
            name=who.name,
            project=who.project,
            role=who.role,
            life_s=life_s,
            parent_digest=who.root_digest,
        )
        self._delete_old(who.root_digest)
        return token

    def _delete_old(self, root_digest: str | None) -> None:
        """Deletes expired tokens, and all but the newest ``_MAX_DERIVED`` tokens derived from one token."""
        derived = API_TOKENS.c.parent_digest == root_digest
        newest = (
            sa.select(API_TOKENS.c.digest)
            .where(derived)
            .order_by(API_TOKENS.c.create_time.desc())
            .limit(_MAX_DERIVED)
        )
        with self._database.write_unfenced() as connection:
            connection.execute(API_TOKENS.delete().where(API_TOKENS.c.expire_time < time.time()))
            if root_digest is not None:
                connection.execute(
                    API_TOKENS.delete().where(derived, API_TOKENS.c.digest.not_in(newest))
                )

    def accept(
        self,
        token: str,
        *,
        name: str,
        project: str,
        role: Role,
        life_s: float | None = None,
        parent_digest: str | None = None,
    ) -> None:
        """Accepts a token that was created elsewhere; repeated calls only renew its lifetime."""
        digest = _digest(token)
        now = time.time()
        with self._database.write_unfenced() as connection:
            connection.execute(API_TOKENS.delete().where(API_TOKENS.c.digest == digest))
            connection.execute(
                API_TOKENS.insert().values(
                    digest=digest,
                    prefix=digest[:16],
                    name=name,
                    project=project,
                    role=role,
                    create_time=now,
                    expire_time=None if life_s is None else now + life_s,
                    parent_digest=parent_digest,
                )
            )

    def list_tokens(self) -> list[TokenInfo]:
        columns = [API_TOKENS.c[field.name] for field in fields(TokenInfo)]
        query = sa.select(*columns).order_by(API_TOKENS.c.name, API_TOKENS.c.create_time)
        with self._database.read() as connection:
            return [TokenInfo(**row) for row in connection.execute(query).mappings()]

    def revoke(self, name: str) -> int:
        """Revokes all tokens with a name, and all derived from them; returns how many have the name."""
        with self._database.write_unfenced() as connection:
            result = connection.execute(API_TOKENS.delete().where(API_TOKENS.c.name == name))
            connection.execute(API_TOKENS.delete().where(_IS_ORPHAN))
            return result.rowcount

    def authenticate(self, authorization: str) -> Principal:
        """Returns the principal of an ``Authorization`` header.

        Raises:
            UnauthenticatedError: If the token is missing, unknown, expired or orphaned.
        """
        token = bearer_token(authorization)
        query = sa.select(API_TOKENS).where(API_TOKENS.c.digest == _digest(token), ~_IS_ORPHAN)
        with self._database.read() as connection:
            row = connection.execute(query).first()
        if row is None or (row.expire_time is not None and row.expire_time < time.time()):
            raise UnauthenticatedError("the API token is unknown or has expired; create a new one")
        return Principal(
            name=row.name,
            project=row.project,
            role=row.role,
            expire_time=row.expire_time,
            root_digest=row.parent_digest or row.digest,
        )


def bearer_token(authorization: str) -> str:
    """Returns the token in an ``Authorization`` header.

    Raises:
        UnauthenticatedError: If it contains no bearer token.
    """
    scheme, _, token = authorization.partition(" ")
    if scheme.lower() != "bearer" or not token:
        raise UnauthenticatedError("the API token is missing; send 'Authorization: Bearer slp_...'")
    return token.strip()


def _digest(token: str) -> str:
    # Tokens have 256 random bits, so a plain hash resists search; the digest allows lookup by
    # index.
    return hashlib.sha256(token.encode()).hexdigest()


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
        for segment in self._roles_claim.split("."):
            entries = entries.get(segment, {}) if isinstance(entries, Mapping) else {}
        roles: dict[str, Role] = {}
        for entry in entries if isinstance(entries, list) else []:
            project, _, role = str(entry).rpartition(":")
            if project and role in get_args(Role):
                claim = cast("Role", role)
                # If the claim lists several roles in a project, the highest one applies.
                roles[project] = max(claim, roles.get(project, claim), key=get_args(Role).index)
        if len(roles) != 1:
            raise PermissionDeniedError(
                f"the token's claim {self._roles_claim!r} must contain a role in one project, such as "
                f"'blue:operator', got {len(roles)}: {', '.join(sorted(roles)) or 'none'}"
            )
        return next(iter(roles.items()))
