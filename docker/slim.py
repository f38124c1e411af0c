"""Takes out of an installed environment what a node never reads: headers, test suites, static libraries.

Run once while the image is built. Knows site-packages; knows no engine. What is taken is told, so nothing goes unseen.
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
    taken = 0
    for pattern in FOLDERS:
        for folder in sorted(packages.glob(pattern)):
            taken += sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())
            shutil.rmtree(folder)
    for pattern in FILES:
        for path in packages.glob(pattern):
            taken += path.lstat().st_size
            path.unlink()
    sys.stdout.write(f"{taken / 1e6:.0f} MB that no node reads are taken out.\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
