"""The image for arm64 trains, agrees with this machine in all bits, and passes the unit tests, emulated by qemu: hours.

It needs a registered emulator (Debian's package qemu-user-static). `DILOCO_TEST_ARM64` is the version of torch: that of
`.ci/torch.lock`, or an older one where PyTorch's index of builds without CUDA cannot be reached, as pip's default index
has such builds for arm64 only up to 2.9.1.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from ipaddress import IPv4Network
from pathlib import Path

import pytest

from tests.docker.container import SMALL, THREAD, Container
from tests.docker.engine import ROOT, Engine, build, engine, why_not
from tests.swarm.harness import Swarm, tiny

ASKED_FOR = "DILOCO_TEST_ARM64"
EMULATOR = Path("/proc/sys/fs/binfmt_misc/qemu-aarch64")
IMAGE = "diloco-node:cpu-arm64"
BUILD_S, TRAIN_S, TESTS_S = 5400.0, 600.0, 7200.0
WHEELS = [
    f"--platform={name}"
    for name in ("manylinux_2_28_aarch64", "manylinux_2_17_aarch64", "manylinux2014_aarch64", "any")
]
NOT_IN_THE_IMAGE = re.compile(
    r"^(ast-serialize|contourpy|cycler|fonttools|grimp|import-linter|kiwisolver|librt|matplotlib|mypy|mypy-extensions|"
    r"pillow|playwright|ruff)=="
)
"""Packages that only checks, plots and the browser's tests need."""
LEFT_OUT = (
    "--ignore=tests/unit/test_update.py",  # The image has no pip.
    "--deselect=tests/unit/test_revision.py::test_revision_of_a_git_checkout_is_its_commit",  # It has no git.
    "--deselect=tests/unit/test_text.py::test_no_document_repeats_before_all_are_read",  # Its Python has equal files.
    # torch 2.9.1 has other functions for Intel's GPUs.
    "--deselect=tests/unit/test_accelerators.py::test_intel_gpu_reports_what_this_user_may_read",
    # The emulator gives each thread a start of its own, has a thread of its own, and is too slow.
    "--deselect=tests/unit/test_process_meter.py::test_change_of_the_clock_counts_no_processor_time_twice",
    "--deselect=tests/unit/test_serve.py::test_the_server_has_a_low_priority_and_serves_a_newer_round_soon",
    "--deselect=tests/unit/test_text.py::test_a_file_on_which_the_tokenizer_panics_is_left_out",
)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tracked files of this checkout with the page that is built in it, and with the chosen version of torch."""
    torch = os.environ.get(ASKED_FOR, "")
    if reason := why_not() or ("" if torch else f"{ASKED_FOR} names no version of torch, and this takes an hour"):
        pytest.skip(reason)
    if not EMULATOR.exists():
        pytest.skip("the kernel has no emulator for arm64: install qemu-user-static and register it")
    tree = tmp_path_factory.mktemp("arm64") / "tree"
    subprocess.run(["git", "clone", "--quiet", ROOT, tree], check=True, timeout=300)
    subprocess.run(["cp", "-r", ROOT / "node/api/static", tree / "node/api"], check=True, timeout=60)
    lock = tree / ".ci/torch.lock"
    lock.write_text(re.sub(r"(?m)^torch==\S+", f"torch=={torch}", lock.read_text()))
    return tree


@pytest.fixture(scope="module")
def image(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine that has built the image."""
    with engine() as docker:
        build(docker, tmp_path_factory.mktemp("build"), "arm64", tree, IMAGE, BUILD_S)
        yield docker


def test_image_is_for_arm64_and_trains(image: Engine) -> None:
    assert image("inspect", "--format", "{{.Architecture}}", IMAGE) == "arm64"
    node = Container(image, "arm64", image=IMAGE)
    try:
        node.run("run", THREAD, *SMALL, "--run.round.inner_steps=20", engine_words=("--platform", "linux/arm64"))
        status = node.until(lambda s: s["run"]["round"] >= 3, TRAIN_S, "three rounds")
        assert status["training"]["loss"] < 6
    finally:
        node.purge()


@pytest.mark.parametrize(
    "sync",
    [{"codec": "fp16"}, {"codec": "int4", "feedback": "loco"}, {"codec": "topk", "feedback": "classic"}],
    ids=lambda sync: sync["codec"],
)
def test_arm64_and_this_machine_hold_the_same_bits(image: Engine, tmp_path: Path, sync: dict[str, str]) -> None:
    """The two processors, with different versions of torch, average and step together."""
    subnet = image("network", "inspect", "bridge", "--format", "{{(index .IPAM.Config 0).Subnet}}")
    member = Container(image, "arm64", image=IMAGE)
    run = tiny(round={"policy": "time", "inner_steps": 200, "min_peers": 2}, sync=sync)
    with Swarm(tmp_path / "swarm", run) as swarm:
        founder = swarm.node("here")
        founder.listen = f"/ip4/{IPv4Network(subnet)[1]}/tcp/0"
        founder.start()
        try:
            member.run("run", "--join", founder.invite(), THREAD, engine_words=("--platform", "linux/arm64"))
            member.until(lambda s: s["contribution"]["rounds_joined"] >= 10, TRAIN_S, "ten rounds together")
            ours, theirs = founder.digests(), member.digests()
        finally:
            member.purge()
    both = ours.keys() & theirs.keys()
    print(f"{len(both)} rounds")
    assert len(both) >= 9
    assert {number: ours[number] for number in both} == {number: theirs[number] for number in both}


def test_unit_tests_pass_in_the_image(image: Engine, tree: Path, tmp_path: Path) -> None:
    """With the image's own packages, beside which only the tools of the tests are mounted."""
    lines = (ROOT / ".ci/dev.lock").read_text(encoding="utf-8").splitlines()
    wanted = [
        line.split()[0] for line in lines if "==" in line and line[0].isalpha() and not NOT_IN_THE_IMAGE.match(line)
    ]
    words = ["--no-deps", "--only-binary=:all:", "--python-version=3.11", *WHEELS, "--target", str(tmp_path / "tools")]
    pip = ["python3", "-m", "pip", "install", "--quiet", *words, *wanted]
    subprocess.run(pip, check=True, timeout=900)
    mounts = [f"--volume={tree}:/checkout", f"--volume={tmp_path / 'tools'}:/tools:ro"]
    tests = [
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "not slow",
        "--timeout=1200",
        *LEFT_OUT,
        "tests/unit",
    ]
    said = image(
        "run", "--rm", "--platform=linux/arm64", "--network=host", *mounts, "--env=PYTHONPATH=/tools:/checkout",
        "--workdir=/checkout", "--user=0", "--entrypoint=python3", IMAGE, *tests,
        timeout_s=TESTS_S, check=False, both=True,
    )  # fmt: skip
    print(said[-2000:])
    assert re.search(r"^\d+ passed", said.splitlines()[-1]), said[-6000:]
