"""Tests of the import contract against circles of files."""

from pathlib import Path

import grimp
import pytest

from deploy.import_contracts import NoCircles


@pytest.mark.parametrize(
    ("files", "circles"),
    [
        ({"a": "import shop.b", "b": "import shop.c", "c": ""}, []),
        ({"a": "import shop.b", "b": "import shop.a"}, [["shop.a", "shop.b"]]),
        (
            {
                "a": "from shop import b",
                "b": "def work():\n    from shop import c",
                "c": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import shop.a",
            },
            [["shop.a", "shop.b", "shop.c"]],
        ),
    ],
)
def test_files_that_import_each_other_break_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], circles: list[list[str]]
) -> None:
    package = tmp_path / "shop"
    package.mkdir()
    for name, text in {"__init__": "", **files}.items():
        (package / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    contract = NoCircles(name="No circle", session_options={}, contract_options={"package": "shop"})
    check = contract.check(grimp.build_graph("shop", cache_dir=None), verbose=False)
    assert (check.kept, check.metadata["circles"]) == (not circles, circles)
