"""MkDocs hooks: add folders of pages to the navigation and resolve links out of ``docs``."""

import re
from pathlib import Path
from typing import Any

_FOLDERS = {"Decisions": "adr", "Runbooks": "runbooks"}
_LINK_OUT = re.compile(r"\[([^\]]+)\]\((?:\.\./)+([^)#]+)(?:#[^)]*)?\)")


def on_config(config: Any) -> Any:
    """Adds a section for each folder of similar pages, so that a new page needs no entry."""
    root = Path(config["docs_dir"])
    for title, folder in _FOLDERS.items():
        pages = sorted(path.relative_to(root) for path in (root / folder).glob("*.md"))
        config["nav"].append({title: [str(page) for page in pages]})
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replaces links to files that are not pages of the site by their paths in the repository."""
    in_folder = "/" in page.file.src_path

    def path(match: re.Match[str]) -> str:
        is_page = in_folder and match.group(0).count("../") == 1
        return match.group(0) if is_page else f"{match.group(1)} (`{match.group(2)}`)"

    return _LINK_OUT.sub(path, markdown)


def on_post_build(config: Any, **_: Any) -> None:
    """Removes the theme's page for unknown addresses: its links are absolute, and no server shows it."""
    Path(config["site_dir"], "404.html").unlink(missing_ok=True)
