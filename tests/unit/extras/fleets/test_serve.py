"""Command line of a server of a fleet."""

from pathlib import Path

import pytest

from services.extras.fleets.serve import server_command, token_option


@pytest.mark.parametrize(
    ("source", "option"),
    [
        ("force_no_detokenize=args.tokens_only", "--tokens-only"),
        ('getattr(args, "enable_scale_out", False)', "--enable-scale-out"),
    ],
)
def test_a_server_gets_the_option_for_token_ids_that_its_vllm_has(
    source: str, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "vllm" / "entrypoints" / "scale_out"
    folder.mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text("")
    (folder / "factories.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert token_option() == option
    assert option in server_command(["--model", "m"], is_cpu=False)
