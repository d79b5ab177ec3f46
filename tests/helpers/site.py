"""The documentation as a site of HTML files."""

import os
import subprocess
import sys
from pathlib import Path

from tests.helpers.cli import REPOSITORY


def build_site(folder: Path) -> None:
    """Builds the site into ``folder``; a warning, such as a dead link, is an error."""
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder],
        cwd=REPOSITORY,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        check=True,
    )
