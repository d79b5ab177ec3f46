"""Every link of the built site leads to a file of it, and to an anchor of that file."""

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.helpers.site import build_site

pytest.importorskip("mkdocs")


class _Page(HTMLParser):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.anchors: set[str] = {""}
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value is not None:
                self.links.add(value)
            elif name in ("id", "name") and value is not None:
                self.anchors.add(value)


def test_no_link_of_the_site_is_dead(tmp_path: Path) -> None:
    build_site(tmp_path)
    pages = {path: _Page(path) for path in tmp_path.rglob("*.html")}
    dead = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            linked_page = pages.get(target)
            is_there = target.is_file() and (
                linked_page is None or unquote(parts.fragment) in linked_page.anchors
            )
            if not is_there:
                dead.append(f"{path.relative_to(tmp_path)}: {link}")
    assert len(pages) > 40
    assert dead == []
