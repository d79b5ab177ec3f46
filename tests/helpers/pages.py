"""Examples of the documentation, as a reader would copy them."""

import re
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).parents[2]


def example(page: str, name: str, folder: Path) -> Path:
    """Writes the block that begins with the comment ``# name`` to a file with that name."""
    text = (ROOT / "docs" / page).read_text()
    blocks = map(dedent, re.findall(r"```(?:python|py|yaml|toml)\n(.*?)```", text, re.DOTALL))
    (example_block,) = (block for block in blocks if block.startswith(f"# {name}\n"))
    file = folder / name
    file.write_text(example_block)
    return file


def recipes(folder: Path) -> dict[str, Path]:
    """Writes the blocks of ``docs/recipes.md`` to a copy of that folder; returns specifications by name."""
    page = (ROOT / "docs" / "recipes.md").read_text()
    (folder / "examples").symlink_to(ROOT / "examples")
    docs = folder / "docs"
    docs.mkdir()
    for block in re.findall(r"```python\n(# (\S+)\n.*?)```", page, re.DOTALL):
        (docs / block[1]).write_text(block[0])
    result = {}
    for text, name in re.findall(r"```yaml\n(name: (\S+)\n.*?)```", page, re.DOTALL):
        result[name] = docs / f"{name}.yaml"
        result[name].write_text(text)
    return result
