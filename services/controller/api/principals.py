"""Who asks: principals, and API tokens, stored by their SHA-256, with a project and a role."""

import hashlib
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Protocol

import sqlalchemy as sa

from services.common.errors import NotFoundError, PermissionDeniedError, UnauthenticatedError
from services.common.security.access import AUTH_FAILURES
from services.controller.models import Role, covers
from services.controller.store.database import Database
from services.controller.store.records import Run
from services.controller.store.tables import API_TOKENS

_PREFIX = "slp_"
_PARENTS = API_TOKENS.alias("parents")
# Tokens that were made for the bearer of one that is not known any more.
_IS_ORPHAN = API_TOKENS.c.parent_digest.is_not(None) & API_TOKENS.c.parent_digest.not_in(
    sa.select(_PARENTS.c.digest)
)
DEFAULT_PROJECT = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """A user or a program that calls the API."""

    name: str
    project: str
    role: Role
    expire_time: float | None = field(default=None, compare=False)
    """When its token ends, in seconds since the epoch; None never does."""
    root_digest: str | None = field(default=None, compare=False)
    """Digest of the API token that its token is, or was made for; None for another way to be known."""
    authorization: str = field(default="", repr=False, compare=False)
    """The header that it is known by, to see later whether it still is."""

    def demand(self, role: Role) -> None:
        """See that the principal has at least a role.

        Raises:
            PermissionDeniedError: If it does not.
        """
        if not covers(self.role, role):
            raise PermissionDeniedError(
                f"this needs the role {role}, and {self.name} has {self.role}; ask an admin of "
                f"project {self.project}"
            )

    def demand_run(self, run: Run) -> Run:
        """See that a run is of the principal's project; a foreign one does not exist for it.

        Raises:
            NotFoundError: If it is not.
        """
        if run.project != self.project:
            raise NotFoundError(
                f"run {run.run_id!r} does not exist; list the runs there are", run_id=run.run_id
            )
        return run


class Authenticator(Protocol):
    """Knows principals. Methods block."""

    def authenticate(self, authorization: str) -> Principal:
        """The principal of an ``Authorization`` header.

        Raises:
            UnauthenticatedError: If there is none.
        """


class Authenticators:
    """Several ways to know a principal; the first that does is right.

    Args:
        ways: At least one.
    """

    def __init__(self, ways: Sequence[Authenticator]) -> None:
        self._ways = ways

    def authenticate(self, authorization: str) -> Principal:
        """The principal of an ``Authorization`` header.

        Raises:
            UnauthenticatedError: If nobody knows it; says what the last way says.
        """
        *others, last = self._ways
        for way in others:
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
class KnownToken:
    """A token, without what is secret of it."""

    name: str
    project: str
    role: Role
    expire_time: float | None
    """Seconds since the epoch; None ends never."""


class TokenStore:
    """API tokens in the database. Methods block.

    Args:
        database: Where they are kept.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def create(self, *, name: str, project: str, role: Role, life_s: float | None = None) -> str:
        """Make a token; this is the only time that it is seen."""
        token = _PREFIX + secrets.token_urlsafe(32)
        self.remember(token, name=name, project=project, role=role, life_s=life_s)
        return token

    def derive(self, who: Principal, life_s: float) -> str:
        """Make a token for a principal that ends with the one that it is known by, whatever that is."""
        token = _PREFIX + secrets.token_urlsafe(32)
        if who.expire_time is not None:
            life_s = min(life_s, who.expire_time - time.time())
        self.remember(
            token,
            name=who.name,
            project=who.project,
            role=who.role,
            life_s=life_s,
            parent_digest=who.root_digest,
        )
        return token

    def remember(
        self,
        token: str,
        *,
        name: str,
        project: str,
        role: Role,
        life_s: float | None = None,
        parent_digest: str | None = None,
    ) -> None:
        """Accept a token that was made elsewhere; repeating it changes nothing."""
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

    def known(self) -> list[KnownToken]:
        """The tokens that there are, by name."""
        columns = [API_TOKENS.c[field.name] for field in fields(KnownToken)]
        query = sa.select(*columns).order_by(API_TOKENS.c.name, API_TOKENS.c.create_time)
        with self._database.read() as connection:
            return [KnownToken(**row) for row in connection.execute(query).mappings()]

    def revoke(self, name: str) -> int:
        """Forget all tokens of a name; returns how many there were."""
        with self._database.write_unfenced() as connection:
            found = connection.execute(API_TOKENS.delete().where(API_TOKENS.c.name == name))
            connection.execute(API_TOKENS.delete().where(_IS_ORPHAN))
            return found.rowcount

    def authenticate(self, authorization: str) -> Principal:
        """The principal of an ``Authorization`` header.

        Raises:
            UnauthenticatedError: If there is none.
        """
        token = bearer_token(authorization)
        query = sa.select(API_TOKENS).where(API_TOKENS.c.digest == _digest(token), ~_IS_ORPHAN)
        with self._database.read() as connection:
            row = connection.execute(query).first()
        if row is None or (row.expire_time is not None and row.expire_time < time.time()):
            raise UnauthenticatedError("the API token is not known or has expired; take a new one")
        return Principal(
            name=row.name,
            project=row.project,
            role=row.role,
            expire_time=row.expire_time,
            root_digest=row.parent_digest or row.digest,
        )


def bearer_token(authorization: str) -> str:
    """The token in an ``Authorization`` header.

    Raises:
        UnauthenticatedError: If there is none.
    """
    scheme, _, token = authorization.partition(" ")
    if scheme.lower() != "bearer" or not token:
        raise UnauthenticatedError("an API token is needed: send 'Authorization: Bearer slp_...'")
    return token.strip()


def _digest(token: str) -> str:
    # Tokens are 256 random bits, so a plain hash cannot be searched; equal digests are found by index.
    return hashlib.sha256(token.encode()).hexdigest()
