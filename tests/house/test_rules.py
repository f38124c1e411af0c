"""Rules of this repository that no linter checks, such as import circles, exit codes and forbidden words."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from node import errors

ROOT = Path(__file__).parents[2]
MODULES = sorted((ROOT / "node").rglob("*.py"))
NAMES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in MODULES}
"""The file of each module, by the module's dotted name."""
MAX_FUNCTION_LINES = 50


def tracked_texts() -> list[Path]:
    """Text files of the checkout, including files that are not committed yet. Files that git ignores are left out."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT, capture_output=True, check=True, timeout=30,
    ).stdout.decode()  # fmt: skip
    paths = [ROOT / name for name in listed.split("\0") if name]
    return [path for path in paths if path.is_file() and b"\0" not in path.read_bytes()[:8192]]


def test_imports_obey_the_import_contracts() -> None:
    lint = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([lint, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def imports_of(path: Path) -> set[str]:
    """Modules of node that this file imports, including imports in functions and under TYPE_CHECKING."""
    found: set[str] = set()
    for item in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(item, ast.Import):
            found |= {alias.name for alias in item.names}
        elif isinstance(item, ast.ImportFrom) and item.module:
            names = {f"{item.module}.{alias.name}" for alias in item.names}
            submodules = names & NAMES.keys()
            found |= submodules
            if submodules != names:
                found.add(item.module)
    return found & NAMES.keys()


def test_modules_do_not_import_each_other_in_circles() -> None:
    graph = {name: imports_of(path) for name, path in NAMES.items()}
    assert sum(map(len, graph.values())) > len(graph)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as exc:
        pytest.fail(" -> ".join(exc.args[1]))


def test_no_module_has_imports_for_type_checking_only() -> None:
    """Such imports hide a circle of imports from the interpreter."""
    assert [name for name, path in NAMES.items() if "TYPE_CHECKING" in path.read_text(encoding="utf-8")] == []


def test_each_class_name_is_defined_in_one_module_only() -> None:
    """Nested classes are exempt, because the outer class qualifies their names."""
    homes: dict[str, list[str]] = {}
    for module, path in NAMES.items():
        for item in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(item, ast.ClassDef):
                homes.setdefault(item.name, []).append(module)
    assert len(homes) > 100
    assert {name: modules for name, modules in homes.items() if len(modules) > 1} == {}


CUDA_WORDS = re.compile(r"torch\.cuda|nccl|nvml|nvidia-smi|[\"']cuda", re.IGNORECASE)
CUDA_MODULES = {
    "node.training.cuda", "node.training.accelerator", "node.host.gpu_power", "node.config.schema", "node.api.examples",
    "node.host.priority",
}  # fmt: skip
"""Modules that may name CUDA: the device itself, the table of devices, the power limit, names that users write, and
processes that use none."""


def test_only_a_few_modules_know_cuda() -> None:
    assert {name for name, path in NAMES.items() if CUDA_WORDS.search(path.read_text(encoding="utf-8"))} == CUDA_MODULES


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_each_module_has_a_docstring_and_short_functions(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    assert ast.get_docstring(tree), "a module starts with a docstring"
    for item in ast.walk(tree):
        if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (item.end_lineno or item.lineno) - item.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{item.name} has {length} lines"


@pytest.mark.parametrize("package", ["cli", "daemon", "api", "config", "host", "worker.publisher"])
def test_package_does_not_import_torch(package: str) -> None:
    """The test imports the package with all its modules in a fresh interpreter."""
    code = f"""
import importlib, pkgutil, sys
package = importlib.import_module("node.{package}")
for found in pkgutil.walk_packages(getattr(package, "__path__", []), "node.{package}."):
    importlib.import_module(found.name)
print(sorted({{"torch", "transformers", "hivemind"}} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_no_file_names_a_folder_of_its_developers_or_a_package_registry() -> None:
    registries = ["pypi" + ".org", "python" + "hosted.org", "registry.npm" + "js.org", "deb.deb" + "ian.org"]
    # Folders of the developers, and this checkout's folder unless that is directly under the root, such as /app.
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


def test_installed_packages_are_compatible() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "check"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", ["README.md", "CHANGELOG.md", "DECISIONS.md", "CONTRIBUTING.md", "LICENSE"])
def test_no_documentation_file_is_empty(name: str) -> None:
    assert len((ROOT / name).read_text(encoding="utf-8").split()) > 20


def test_error_classes_have_the_documented_exit_codes() -> None:
    promised = {
        errors.UsageError: 2, errors.ConfigError: 2, errors.InviteError: 2, errors.DataFolderError: 2,
        errors.MachineError: 3, errors.ManifestError: 4, errors.ProtocolError: 10,
        errors.NodeError: 70,
    }  # fmt: skip
    assert {kind: kind.exit_code for kind in promised} == promised
