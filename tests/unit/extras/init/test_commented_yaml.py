"""Tests of YAML with comments."""

import yaml
from hypothesis import given
from hypothesis import strategies as st

from services.common.runspec import loader
from services.extras.init.commented_yaml import commented_yaml

_VALUES = st.text(st.characters(exclude_categories=["Cs"])) | st.from_regex(
    r"[\w+.:'\"#&*!|>%@`{}\[\],~\n -]{0,12}", fullmatch=True
)


@given(_VALUES, st.lists(_VALUES), st.lists(_VALUES, min_size=1))
def test_no_text_becomes_a_key_or_another_value(text, texts, comments):
    document = {
        "name": text,
        "data": {"train": {"path": text, "columns": texts}, "column": text, "last": 1},
    }
    keys = ("", "name", "data", "data.train", "data.column")
    written = commented_yaml(document, dict.fromkeys(keys, comments))
    assert yaml.safe_load(written) == document
    assert loader.load_yaml(written) == document


def test_numbers_and_other_values_are_unchanged():
    document = {"seed": 0, "trainer": {"rate": 1e-6, "compile": True, "lora": {}, "column": None}}
    assert yaml.safe_load(commented_yaml(document, {})) == document
