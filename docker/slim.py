"""Removes headers, test suites and static libraries, which a node never reads, from a Python environment.

Runs once while the image is built, and prints how much it removed.
"""

from __future__ import annotations

import shutil
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
)
FILES = ("**/*.a", "torch/bin/*_test", "torch/bin/test_*", "torch/bin/protoc*", "**/*.pxd")


def main(environment: Path) -> None:
    (packages,) = environment.glob("lib/python3.*/site-packages")
    removed_bytes = 0
    for pattern in FOLDERS:
        for folder in sorted(packages.glob(pattern)):
            removed_bytes += sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())
            shutil.rmtree(folder)
    for pattern in FILES:
        for path in packages.glob(pattern):
            removed_bytes += path.lstat().st_size
            path.unlink()
    sys.stdout.write(f"{removed_bytes / 1e6:.0f} MB of unused files removed.\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
