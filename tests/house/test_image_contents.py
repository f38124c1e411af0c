"""What the image's build removes from the Python packages, and which modules it compiles."""

from __future__ import annotations

import ast
import re
import runpy
import sys
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
import transformers

from node.training.pretrained import MODEL_TYPES

ROOT = Path(__file__).parents[2]
SLIM = runpy.run_path(str(ROOT / "docker" / "slim.py"))
EXTRAS = {
    "tensorboard",
    "trackio",
    "wandb",
    "opentelemetry",
    "lm_eval",
    "triton",
    "pynvml",
    "_typeshed",
    "gguf",
}
"""Packages of extras, of the CUDA image, and of type checkers."""

pytestmark = pytest.mark.timeout(60)


def make_environment(root: Path, *files: str) -> Path:
    packages = root / "lib" / "python3.11" / "site-packages"
    for file in files:
        path = packages / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x = 1\n")
    return packages


def test_build_removes_model_code_but_keeps_tokenizers_and_configurations(tmp_path: Path) -> None:
    models = "transformers/models"
    kept = [f"{models}/__init__.py", f"{models}/auto/modeling_auto.py"]
    kept += [f"{models}/{name}/modeling_{name}.py" for name in MODEL_TYPES]
    kept += [
        f"{models}/gpt2/__init__.py",
        f"{models}/gpt2/configuration_gpt2.py",
        f"{models}/gpt2/tokenization_gpt2.py",
    ]
    gone = [f"{models}/gpt2/modeling_gpt2.py", f"{models}/clip/image_processing_clip.py"]
    packages = make_environment(tmp_path, *kept, *gone)
    SLIM["main"](tmp_path)
    assert [file for file in kept if not (packages / file).exists()] == []
    assert [file for file in gone if (packages / file).exists()] == []


def test_kept_model_files_import_no_file_beside_them_that_is_removed() -> None:
    models = Path(transformers.__file__).parent / "models"
    files = [file for pattern in ("tokenization_*.py", "configuration_*.py") for file in models.glob(f"*/{pattern}")]
    beside = {
        file.with_name(f"{name}.py")
        for file in files
        for name in re.findall(r"^from \.(\w+) import", file.read_text(encoding="utf-8"), re.MULTILINE)
    }
    beside = {file for file in beside if file.exists() and file.parent.name not in SLIM["MODELS_KEPT"]}
    assert len(beside) > 2
    assert {file.name for file in beside if not any(map(file.match, SLIM["MODEL_FILES_KEPT"]))} == set()


def test_build_removes_tests_headers_compiled_modules_and_cloud_parts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = ["torch/nn/functional.py", "pyarrow/libarrow.so.2600", "pyarrow/_parquet.so", "scipy/optimize/a.py"]
    gone = ["torch/include/a.h", "torch/nn/__pycache__/functional.pyc", "pyarrow/libarrow_s3.so.2600"]
    gone += ["pyarrow/_flight.so", "scipy/optimize/tests/a.py", "numpy/libnpy.a"]
    packages = make_environment(tmp_path, *kept, *gone)
    SLIM["main"](tmp_path)
    assert [file for file in kept if not (packages / file).exists()] == []
    assert [file for file in gone if (packages / file).exists()] == []
    assert capsys.readouterr().out == "0 MB of unused files removed.\n"


def imported_packages(folder: Path) -> set[str]:
    """The packages that the code in a folder imports, without the standard library's and ours."""
    found: set[str] = set()
    for file in folder.rglob("*.py"):
        for one in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(one, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in one.names}
            elif isinstance(one, ast.ImportFrom) and one.module and not one.level:
                found.add(one.module.partition(".")[0])
    return found - set(sys.stdlib_module_names) - {"node"}


def test_build_compiles_modules_of_every_package_that_a_node_imports() -> None:
    tree = ast.parse((ROOT / "docker" / "warm_up.py").read_text(encoding="utf-8"))
    named: Any = [one.value for one in ast.walk(tree) if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    warmed = {name.partition(".")[0] for name in named} | {
        "torch",
        "transformers",
        "numpy",
        "pydantic",
        "pydantic_core",
        "starlette",
        "google",
    }
    assert imported_packages(ROOT / "node") - warmed - EXTRAS == set()


def test_modules_that_the_build_compiles_are_in_packages_that_the_image_has() -> None:
    locks = "".join((ROOT / file).read_text(encoding="utf-8") for file in ("requirements.lock", ".ci/datasets.lock"))
    locked = {line.partition("==")[0] for line in locks.splitlines() if "==" in line} | {"torch"}
    warm_up = runpy.run_path(str(ROOT / "docker" / "warm_up.py"))
    named = {name.partition(".")[0] for name in (*warm_up["MODULES"], *warm_up["DATASETS"])}
    homes = packages_distributions()
    assert {name for name in named if not {home.lower().replace("_", "-") for home in homes[name]} & locked} == set()


def test_build_tries_each_type_of_model_that_a_run_may_have() -> None:
    assert runpy.run_path(str(ROOT / "docker" / "warm_up.py"))["MODEL_TYPES"] == MODEL_TYPES
