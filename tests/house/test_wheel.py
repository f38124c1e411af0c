"""The built wheel contains all files that a node reads at run time: presets, the dashboard and the type marker."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_wheel_contains_every_file_that_a_node_needs(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("node", "configs", "dashboard"):
        unwanted = shutil.ignore_patterns("__pycache__", "node_modules")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=unwanted)
    # This stands in for a dashboard that was not built.
    assets = source / "node" / "api" / "static" / "assets"
    assets.mkdir(parents=True, exist_ok=True)
    (assets / "stand-in-1a2b3c.js.gz").write_bytes(b"")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    command += ["-w", str(tmp_path), "."]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("diloco_node-*.whl")
    with zipfile.ZipFile(wheel) as packed:
        names = set(packed.namelist())
    wanted = {f"node/presets/{path.name}" for path in (ROOT / "configs").glob("*.toml")}
    wanted |= {str(path.relative_to(ROOT)) for path in (ROOT / "node").rglob("*.py")}
    static = [path for path in (source / "node" / "api" / "static").rglob("*") if path.is_file()]
    wanted |= {"node/py.typed", *(str(path.relative_to(source)) for path in static)}
    assert wanted <= names
    assert not [name for name in names if name.startswith(("tests", "dashboard")) or name.endswith((".ts", ".tsx"))]
