"""Removes what a node never reads from a Python environment: headers, test suites, debug symbols, unused model code.

Runs once while the image is built, and prints how much it removed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

FOLDERS = (
    "torch/include",
    "torch/share",
    "torch/test",
    "numpy/_core/include",
    "numpy/**/tests",
    "pandas/tests",
    "pyarrow/include",
    "pyarrow/src",
    "pyarrow/tests",
    "scipy/**/tests",
    "sympy/**/tests",
    "networkx/**/tests",
    "**/__pycache__",  # `warm_up.py` compiles what a node imports.
)
FILES = (
    "**/*.a",
    "torch/bin/*_test",
    "torch/bin/test_*",
    "torch/bin/protoc*",
    "**/*.pxd",
    # Arrow's access to clouds and services. `datasets` reads local files with it.
    "pyarrow/libarrow*_flight*",
    "pyarrow/_flight*",
    "pyarrow/libarrow_s3*",
    "pyarrow/_s3fs*",
)
MODELS_KEPT = ("auto", "llama", "mistral", "qwen2", "qwen3")
"""Models of `transformers` whose code is kept. Of the others, a node needs the tokenizer and the configuration only."""
MODEL_FILES_KEPT = ("__init__.py", "configuration_*.py", "tokenization_*.py", "*_normalizer.py")
"""Some tokenizers import a normalizer beside them."""
STRIPPED = ("torch/lib/libtorch*.so",)


def main(environment: Path) -> None:
    (packages,) = environment.glob("lib/python3.*/site-packages")
    before_bytes = size_bytes(packages)
    for pattern in FOLDERS:
        for folder in sorted(packages.glob(pattern)):
            shutil.rmtree(folder, ignore_errors=True)  # It may be inside one that was removed.
    for pattern in FILES:
        for path in packages.glob(pattern):
            path.unlink()
    remove_models(packages / "transformers" / "models")
    libraries = [path for pattern in STRIPPED for path in packages.glob(pattern)]
    if libraries:
        subprocess.run(["strip", "--strip-unneeded", *libraries], check=True)
    removed_bytes = before_bytes - size_bytes(packages)
    sys.stdout.write(f"{removed_bytes / 1e6:.0f} MB of unused files removed.\n")


def remove_models(models: Path) -> None:
    for path in models.glob("*/**/*.py"):
        is_kept = path.relative_to(models).parts[0] in MODELS_KEPT or any(map(path.match, MODEL_FILES_KEPT))
        if not is_kept:
            path.unlink()


def size_bytes(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
