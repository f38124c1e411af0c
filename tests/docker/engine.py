"""A container engine for tests, and the image that it builds. The engine is a running one or a dockerd started here.

No image registry is used. debootstrap makes the base image of Debian 12; the cache folder keeps it and the layers.
"""

from __future__ import annotations

import http.server
import json
import os
import platform
import shutil
import subprocess
import tempfile
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest

from tests.swarm.harness import wait_for

ROOT = Path(__file__).parents[2]
CACHE = Path(tempfile.gettempdir()) / f"diloco-test-docker-{os.getuid()}"
BASE = "diloco-test-base:bookworm-"
"""Its tag ends with the architecture."""
IMAGE = "diloco-node:cpu"
BUILD_S = 1500.0
START_S = 60.0
ASKED_FOR = "DILOCO_TEST_DOCKER"
NEEDED = ("dockerd", "debootstrap", "containerd", "iptables")


def why_not() -> str:
    """The reason why the container tests cannot run on this machine. Empty if they can."""
    if not os.environ.get(ASKED_FOR):
        return "containers are tested by `make test-docker`, as building the image takes minutes"
    missing = [name for name in NEEDED if not shutil.which(name)]
    if os.getuid() != 0 or missing:
        return f"a container engine needs root, and these, which are not installed: {', '.join(missing) or 'none'}"
    return ""


class Engine:
    """Runs the docker command line against one engine."""

    def __init__(self, host: str, client: str) -> None:
        self.host, self.client = host, client
        self.environment = {**os.environ, "DOCKER_HOST": host, "DOCKER_BUILDKIT": "1"}

    def __call__(self, *words: str, timeout_s: float = 120.0, check: bool = True, both: bool = False) -> str:
        """Run a docker command and return its standard output. If `both` is true, standard error is included."""
        done = subprocess.run(
            [self.client, *words], env=self.environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if both else subprocess.PIPE, text=True, timeout=timeout_s, check=False,
        )  # fmt: skip
        assert not check or done.returncode == 0, f"docker {' '.join(words)}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def inspect(self, what: str) -> dict[str, object]:
        return dict(json.loads(self("inspect", what))[0])


def client() -> str:
    """The path of a docker client that supports BuildKit, by itself or through the plugin buildx."""
    for candidate in (shutil.which("docker"), "/usr/bin/docker"):
        if candidate and Path(candidate).exists():
            words = [candidate, "version", "--format", "{{.Client.Version}}"]
            told = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False).stdout.strip()
            plugin = subprocess.run([candidate, "buildx", "version"], capture_output=True, timeout=30, check=False)
            if plugin.returncode == 0 or (told and int(told.split(".")[0]) < 23):
                return candidate
    pytest.skip("no docker command line here can build with BuildKit")


@contextmanager
def engine() -> Iterator[Engine]:
    """The engine that DOCKER_HOST names or that already runs. Otherwise start one that ends with the tests."""
    command = client()
    running = Engine(os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock"), command)
    if running("info", check=False) and "Server Version" in running("info", check=False):
        yield running
        return
    CACHE.mkdir(mode=0o700, exist_ok=True)
    host = f"unix://{CACHE}/docker.sock"
    with (CACHE / "dockerd.log").open("wb") as log:
        process = subprocess.Popen(
            ["dockerd", "--data-root", str(CACHE / "engine"), "--exec-root", str(CACHE / "exec"), "--host", host,
             "--pidfile", str(CACHE / "docker.pid")],
            stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
    ours = Engine(host, command)
    try:
        wait_for(
            lambda: process.poll() is not None or "Server Version" in ours("info", check=False), START_S, "dockerd"
        )
        if process.poll() is not None:
            pytest.skip(f"dockerd does not start here: {(CACHE / 'dockerd.log').read_text()[-500:]}")
        yield ours
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
        # dockerd leaves a mount behind, which would prevent the removal of the cache folder.
        subprocess.run(["umount", CACHE / "exec" / "netns" / "default"], capture_output=True, timeout=30, check=False)


# The image


def own_architecture() -> str:
    """This machine's architecture as Debian and Docker call it."""
    return {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]


def make_base(docker: Engine, arch: str) -> str:
    """Make a base image of Debian 12 that is about as small as Debian's slim images. Returns its name."""
    name, folder = f"{BASE}{arch}", CACHE / f"base-{arch}"
    if docker("images", "--quiet", name):
        return name
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    packed = folder / "base.tar"
    if not packed.exists():
        root = CACHE / f"root-{arch}"
        words = [
            "debootstrap",
            f"--arch={arch}",
            "--variant=minbase",
            "--include=ca-certificates",
            "bookworm",
            str(root),
        ]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL, timeout=900)
        for useless in ("var/cache/apt", "var/lib/apt/lists", "usr/share/man", "usr/share/locale", "usr/share/info"):
            shutil.rmtree(root / useless)
        for file in (root / "usr/share/doc").rglob("*"):
            if not file.is_dir() and file.name != "copyright":
                file.unlink()
        subprocess.run(["tar", "-C", root, "-cf", packed.with_suffix(".new"), "."], check=True, timeout=300)
        packed.with_suffix(".new").rename(packed)
        shutil.rmtree(root)
    # `docker import` would give every image the architecture of this machine.
    (folder / "Dockerfile").write_text("FROM scratch\nADD base.tar /\n")
    docker("build", "--quiet", "--platform", f"linux/{arch}", "--tag", name, str(folder), timeout_s=300)
    return name


@contextmanager
def served(folder: str) -> Iterator[str]:
    """Serve a folder of this machine over HTTP, so that the build can read it."""
    handler = partial(_Quiet, directory=folder)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *words: object) -> None:
        pass


def pip_settings() -> Mapping[str, str]:
    """This machine's pip settings for index, wheel folders and certificates. The last value wins, as in pip."""
    listed = subprocess.run(
        ["python3", "-m", "pip", "config", "list"], capture_output=True, text=True, timeout=60, check=False
    ).stdout
    rows = [line.partition("=") for line in listed.splitlines()]
    return {name.rpartition(".")[2]: value.strip("'\"") for name, _, value in rows if "." in name}


@contextmanager
def secrets(folder: Path) -> Iterator[tuple[list[str], str]]:
    """Build arguments that pass this machine's pip settings as secrets, and a mark in them that no layer may have."""
    settings, mark = pip_settings(), f"secret-{uuid.uuid4().hex}"
    lines, words = ["[global]", f"# {mark}", "trusted-host = 127.0.0.1"], []
    with ExitStack() as stack:
        for name in ("index-url", "timeout", "proxy"):
            if name in settings:
                lines.append(f"{name} = {settings[name]}")
        if Path(settings.get("find-links", "")).is_dir() and settings.get("find-links"):
            lines.append(f"find-links = {stack.enter_context(served(settings['find-links']))}")
        if Path(settings.get("cert", "")).is_file():
            lines.append("cert = /run/secrets/ca")
            words += ["--secret", f"id=ca,src={settings['cert']}"]
        (folder / "pip.conf").write_text("\n".join(lines) + "\n")
        yield [*words, "--secret", f"id=pip,src={folder / 'pip.conf'}"], mark


def build(
    docker: Engine,
    folder: Path,
    arch: str = "",
    source: Path = ROOT,
    image: str = IMAGE,
    timeout_s: float = BUILD_S,
    target: str = "cpu",
) -> str:
    """Run `make image` in a checkout. Returns the mark in the secrets of the build.

    Args:
        folder: for the settings of pip.
        arch: the architecture, by default that of this machine.
        target: `cpu`, `cuda` or `rocm`.
    """
    arch = arch or own_architecture()
    arguments = f"--network host --build-arg BASE_IMAGE={make_base(docker, arch)} --build-arg TORCH_INDEX_URL="
    progress = "" if docker.client == "podman" else "--progress plain"
    with secrets(folder) as (words, mark):
        done = subprocess.run(
            ["make", "image", f"DOCKER={docker.client}", f"IMAGE={image}", f"TARGET={target}",
             "IMAGE_DASHBOARD=prebuilt",
             f"IMAGE_ARGS={arguments} --platform linux/{arch} {progress} {' '.join(words)}"],
            cwd=source, env=docker.environment, capture_output=True, text=True, timeout=timeout_s, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return mark
