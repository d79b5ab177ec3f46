"""Command line of a server of a fleet."""

from pathlib import Path

import pytest

from services.extras.fleets.serve import as_options, server_command, token_option


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


def test_workers_of_a_further_host_have_the_options_of_the_server() -> None:
    group = ["--nnodes", "2", "--tensor-parallel-size", "2"]
    server = server_command(["--model", "m", *group], is_cpu=True)
    further = server_command(["--model", "m", *group, "--headless"], is_cpu=True)
    assert further[2] == "services.extras.fleets.headless" != server[2]
    assert [*server[3:], "--headless"] == further[3:]


def test_a_server_with_images_starts_as_one_without_but_for_their_limits() -> None:
    limits = ["--max-images", "4", "--max-image-tokens", "128"]
    text = server_command(["--model", "m"], is_cpu=True)
    images = server_command(["--model", "m", *limits], is_cpu=True)
    assert images[2] == "services.extras.fleets.image_server" != text[2]
    start = images.index("--max-images")
    assert images[start : start + 3] == ["--max-images", "4", "128"]
    # The user's options come last, so that they take precedence.
    assert images[3:start] + images[start + 3 :] == text[3:]


def test_one_limit_of_images_without_the_other_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        server_command(["--model", "m", "--max-images", "4"], is_cpu=True)
    assert "--max-images and --max-image-tokens belong together" in capsys.readouterr().err


def test_arguments_of_an_engine_are_options_of_a_command_line() -> None:
    arguments = {"skip_mm_profiling": True, "mm_normalize": False, "limit": {"image": 4}, "size": 2}
    assert as_options(arguments) == [
        *("--skip-mm-profiling", "--no-mm-normalize"),
        *("--limit", '{"image": 4}', "--size", "2"),
    ]


@pytest.mark.parametrize(
    ("options", "executor"),
    [
        ([], "uni"),
        (["--tensor-parallel-size=2"], "mp"),
        (["-tp", "2"], "mp"),
        (["-n", "2"], "mp"),
        (["--nnodes", "2", "--distributed-executor-backend", "ray"], "ray"),
    ],
)
def test_a_cpu_build_has_the_executor_that_its_workers_need(
    options: list[str], executor: str
) -> None:
    command = server_command(["--model", "m", *options], is_cpu=True)
    positions = [i for i, option in enumerate(command) if option.endswith("executor-backend")]
    assert command[positions[-1] + 1] == executor  # the last one is vLLM's choice
