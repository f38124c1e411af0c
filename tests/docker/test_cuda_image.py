"""The image for NVIDIA GPUs: it is built, trains without a GPU, and has what compiled layers need on one. Gigabytes.

`DILOCO_TEST_CUDA_IMAGE=1` asks for it, beside `DILOCO_TEST_DOCKER=1`. pip's default index must have torch with CUDA.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.docker.container import SMALL, THREAD, Container
from tests.docker.engine import Engine, build, engine, why_not

ASKED_FOR = "DILOCO_TEST_CUDA_IMAGE"
IMAGE = "diloco-node:cuda"
BUILD_S = 3000.0
SIZE_BYTES_MAX = 6e9
MODULE = r"""
import importlib.util, pathlib, subprocess, sysconfig, tempfile
folder = pathlib.Path(tempfile.mkdtemp())
(folder / "built.c").write_text('''#include <Python.h>
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "built", NULL, -1, NULL};
PyMODINIT_FUNC PyInit_built(void) { return PyModule_Create(&module); }''')
include = sysconfig.get_path("include")
subprocess.run(["gcc", "-shared", "-fPIC", f"-I{include}", "-o", folder / "built.so", folder / "built.c"], check=True)
spec = importlib.util.spec_from_file_location("built", folder / "built.so")
print(importlib.util.module_from_spec(spec).__name__)
"""
"""Builds and loads a C module for Python, as triton does before it starts its first kernel."""


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine that has built the image."""
    asked = os.environ.get(ASKED_FOR)
    if reason := why_not() or ("" if asked else f"set {ASKED_FOR}=1: the image takes gigabytes of packages"):
        pytest.skip(reason)
    with engine() as docker:
        build(docker, tmp_path_factory.mktemp("build"), image=IMAGE, timeout_s=BUILD_S, target="cuda")
        yield docker


@pytest.fixture
def node(image: Engine) -> Iterator[Container]:
    made = Container(image, "cuda", image=IMAGE)
    yield made
    made.purge()


def test_image_is_smaller_than_its_size_limit(image: Engine) -> None:
    size_bytes = int(image("inspect", "--format", "{{.Size}}", IMAGE))
    print(f"{size_bytes / 1e9:.2f} GB")
    assert size_bytes < SIZE_BYTES_MAX


def test_node_trains_on_the_processor_without_a_gpu(node: Container) -> None:
    status = node.run("run", THREAD, *SMALL).until_round(3)
    assert status["training"]["loss"] < 6
    assert node.execute("python3", "-W", "ignore", "-c", "import torch; print(torch.version.cuda)").startswith("13.")


def test_image_has_what_compiled_layers_need(node: Container) -> None:
    node.run("run", THREAD, *SMALL).until_round(1)
    assert node.execute("python3", "-c", MODULE) == "built"
    can = "from node.training.cuda import has_c_compiler; import triton; print(has_c_compiler())"
    assert node.execute("python3", "-W", "ignore", "-c", can) == "True"
    assert "libc.so.6" in node.execute("/sbin/ldconfig", "-p")  # Triton looks for the driver's library with it.
