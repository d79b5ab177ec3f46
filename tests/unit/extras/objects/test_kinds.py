"""The door of stores names objects that exist."""

from dataclasses import fields
from pkgutil import resolve_name

import pytest

from services.extras.objects.kinds import CLOUD


@pytest.mark.parametrize("name", [field.name for field in fields(CLOUD) if field.name != "extra"])
def test_each_part_of_the_door_of_stores_can_be_loaded(name: str) -> None:
    assert callable(resolve_name(getattr(CLOUD, name)))
