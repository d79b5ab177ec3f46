"""The documentation's site: folders of pages join its navigation, links out of ``docs`` name the file."""

import re
from pathlib import Path
from typing import Any

_FOLDERS = {"Decisions": "adr", "Runbooks": "runbooks"}
_LINK_OUT = re.compile(r"\[([^\]]+)\]\((?:\.\./)+([^)#]+)(?:#[^)]*)?\)")


def on_config(config: Any) -> Any:
    """Add a section for each folder of pages that are alike, so that a new page needs no line of its own."""
    root = Path(config["docs_dir"])
    for title, folder in _FOLDERS.items():
        pages = sorted(path.relative_to(root) for path in (root / folder).glob("*.md"))
        config["nav"].append({title: [str(page) for page in pages]})
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links to files that are not pages of the site become their paths in the repository."""
    in_folder = "/" in page.file.src_path

    def path(match: re.Match[str]) -> str:
        is_page = in_folder and match.group(0).count("../") == 1
        return match.group(0) if is_page else f"{match.group(1)} (`{match.group(2)}`)"

    return _LINK_OUT.sub(path, markdown)
