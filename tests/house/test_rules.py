"""Rules of this repository that no linter checks: layers at run time, names promised, words that must not appear."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from node import errors

ROOT = Path(__file__).parents[2]
MODULES = sorted((ROOT / "node").rglob("*.py"))
MAX_FUNCTION_LINES = 50


def tracked_texts() -> list[Path]:
    """Text files of the checkout, also those not committed yet; ignored ones are left out."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT, capture_output=True, check=True, timeout=30,
    ).stdout.decode()  # fmt: skip
    paths = [ROOT / name for name in listed.split("\0") if name]
    return [path for path in paths if path.is_file() and b"\0" not in path.read_bytes()[:8192]]


def test_import_contracts() -> None:
    lint = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([lint, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_module_has_a_docstring_and_short_functions(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    assert ast.get_docstring(tree), "a module starts with a docstring"
    for item in ast.walk(tree):
        if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (item.end_lineno or item.lineno) - item.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{item.name} has {length} lines"


@pytest.mark.parametrize(
    "package", ["cli", "daemon", "api", "config", "settings", "link", "status", "client", "live", "logs", "manifest"]
)
def test_torch_is_not_reached(package: str) -> None:
    """Imports the room with all its modules in a fresh interpreter; also what they import lazily at import."""
    code = f"""
import importlib, pkgutil, sys
room = importlib.import_module("node.{package}")
for found in pkgutil.walk_packages(getattr(room, "__path__", []), "node.{package}."):
    importlib.import_module(found.name)
print(sorted({{"torch", "transformers", "hivemind"}} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_nothing_here_names_this_machine_or_a_registry() -> None:
    """A clone works anywhere: no path of a checkout, no host of a package registry."""
    registries = ["pypi" + ".org", "python" + "hosted.org", "registry.npm" + "js.org", "deb.deb" + "ian.org"]
    # Where this is developed, and where this clone stands; a folder right under the root, as /app, says nothing.
    folders = ["/".join(("", "work", name)) for name in ("main", "shared")]
    folders += [str(ROOT)] if len(ROOT.parts) > 2 else []
    pattern = re.compile("|".join([*map(re.escape, registries), *(re.escape(name) + r"\b" for name in folders)]))
    faults = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for path in tracked_texts()
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1)
        if pattern.search(line)
    ]
    assert faults == []


def test_lock_pins_every_dependency_exactly() -> None:
    lines = [line for line in (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines() if line[:1] != "#"]
    assert [line for line in lines if not re.fullmatch(r"[A-Za-z0-9_.-]+==[A-Za-z0-9_.]+", line)] == []
    locked = {re.sub(r"[-_.]+", "-", line.partition("==")[0]).lower() for line in lines}
    asked = re.findall(
        r'^    "([A-Za-z0-9-]+)[=>]=', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert len(asked) > 10
    assert {name.lower() for name in asked} <= locked
    assert "torch==2.13.0" in lines


def test_installed_packages_fit_together() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "check"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", ["README.md", "CHANGELOG.md", "DECISIONS.md", "CONTRIBUTING.md", "LICENSE"])
def test_papers_are_there(name: str) -> None:
    assert len((ROOT / name).read_text(encoding="utf-8").split()) > 20


def test_exit_codes_are_as_promised() -> None:
    promised = {
        errors.UsageError: 2, errors.ConfigError: 2, errors.InviteError: 2, errors.DataFolderError: 2,
        errors.MachineError: 3, errors.RefusedError: 4, errors.ManifestError: 4, errors.ProtocolError: 10,
        errors.NodeError: 70,
    }  # fmt: skip
    assert {kind: kind.exit_code for kind in promised} == promised
