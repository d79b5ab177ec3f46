"""What an operation of the run API is: the base of each one in ``operations``.

An operation is a class. Its name is the gRPC method, its docstring what the description says of it, its
fields are what is sent, with their defaults and ranges, and its parameter is what is answered.
"""

from collections.abc import Iterator
from http import HTTPStatus
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar

from pydantic import BaseModel, Field

from services.controller.models import Body, Role

Answer = TypeVar("Answer", covariant=True)
Place = Literal["path", "query", "header", "body", "document"]
"""Where REST has a field: ``body`` is one key of the body, ``document`` all of it."""

HEADER: Place = "header"
DOCUMENT: Place = "document"


class Operation(BaseModel, Generic[Answer]):
    """One thing that can be asked of the API, and what is said of it."""

    http: ClassVar[str]
    """Method and path; fields that the path names are part of it."""
    role: ClassVar[Role] = "viewer"
    """Who may ask; a handler may want more of some requests."""
    status: ClassVar[HTTPStatus] = HTTPStatus.OK
    location: ClassVar[str] = ""
    """Path of what was made, with the answer's fields."""
    rpc: ClassVar[str | None] = ""
    """The gRPC method, where its name is not that of the class; None if gRPC does not carry the answer."""
    form: ClassVar[Literal["json", "lines", "events"]] = "json"
    """One answer, one for each line, or one after the other as they come."""

    @classmethod
    def answer(cls) -> Any:
        """Type of what is answered; of one item if there are many."""
        found = (base.__pydantic_generic_metadata__["args"] for base in cls._bases())
        return next(args[0] for args in found if args)

    @classmethod
    def body(cls) -> type[Body] | None:
        """What REST has in its body, if that is more than one field."""
        found = (b for b in cls._bases() if issubclass(b, Body) and not issubclass(b, Operation))
        return next(found, None)

    @classmethod
    def place(cls, name: str) -> Place:
        """Where REST has a field."""
        for marker in (HEADER, DOCUMENT):
            if marker in cls.model_fields[name].metadata:
                return marker
        if f"{{{name}}}" in cls.http:
            return "path"
        body = cls.body()
        return "body" if body is not None and name in body.model_fields else "query"

    @classmethod
    def _bases(cls) -> Iterator[type[BaseModel]]:
        return (base for base in cls.__mro__ if issubclass(base, BaseModel))


class OfRun(Operation[Answer], Generic[Answer]):
    """What is asked of one run."""

    run_id: Annotated[str, Field(pattern="^run_[0-9a-f]{32}$")]
