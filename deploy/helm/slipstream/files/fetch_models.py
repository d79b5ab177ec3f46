"""Downloads models and data sets from Hugging Face: NAME, NAME@REVISION, or datasets/NAME."""
# ruff: noqa: INP001, T201  a script that prints to the log of its Job

import sys

from huggingface_hub import snapshot_download

for argument in sys.argv[1:]:
    name, _, revision = argument.partition("@")
    kind = "dataset" if name.startswith("datasets/") else "model"
    folder = snapshot_download(
        name.removeprefix("datasets/"), repo_type=kind, revision=revision or None
    )
    print(f"{argument} is in {folder}", flush=True)
