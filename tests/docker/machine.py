"""A machine for one test: a container of Debian 12 whose first process is systemd, with a user and rootless Podman."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from uuid import uuid4

from tests.docker.engine import Engine, make_base, own_architecture
from tests.swarm.harness import wait_for

IMAGE = "diloco-test-machine"
USER = "guest"
DOCKERFILE = f"""\
ARG BASE_IMAGE
FROM ${{BASE_IMAGE}}
RUN apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \\
        systemd systemd-sysv dbus-user-session libpam-systemd polkitd procps sudo python3-venv \\
        podman crun uidmap slirp4netns
RUN useradd --create-home {USER}
CMD ["/sbin/init"]
"""
BUILD_S = 600.0
START_S = 120.0
COMMAND_S = 300.0


def make_image(docker: Engine, folder: Path) -> None:
    """Build the image IMAGE. `folder` is for the Dockerfile."""
    (folder / "Dockerfile").write_text(DOCKERFILE)
    base = make_base(docker, own_architecture())
    words = ["--network", "host", "--build-arg", f"BASE_IMAGE={base}", "--tag", IMAGE, str(folder)]
    docker("build", "--quiet", *words, timeout_s=BUILD_S)


class Machine:
    """A running container of an image that has systemd. It finds `files` in its root folder."""

    def __init__(self, docker: Engine, image: str = IMAGE, files: Sequence[Path] = ()) -> None:
        self.docker, self.name = docker, f"diloco-test-machine-{uuid4().hex[:6]}"
        # systemd must be able to write to its own hierarchy of control groups, or to the one of version 2.
        groups = next(folder for folder in ("/sys/fs/cgroup/systemd", "/sys/fs/cgroup") if Path(folder).exists())
        self.docker(
            "run", "--detach", "--name", self.name, "--env", "container=docker", "--stop-signal", "SIGRTMIN+3",
            "--cap-add", "SYS_ADMIN", "--security-opt", "seccomp=unconfined", "--tmpfs", "/run", "--tmpfs", "/run/lock",
            "--cgroupns", "host", "--volume", f"{groups}:{groups}",
            # Rootless Podman mounts /proc, and has a network of its own.
            "--security-opt", "systempaths=unconfined", "--device", "/dev/net/tun",
            *(f"--volume={file}:/{file.name}:ro" for file in files), image,
        )  # fmt: skip
        try:
            self("chmod", "666", "/dev/net/tun")  # As on every Debian.
            self.wait_for_start()
        except BaseException:
            self.purge()
            raise

    def wait_for_start(self) -> None:
        wait_for(
            lambda: self("systemctl", "is-system-running", check=False) in ("running", "degraded"), START_S, "systemd"
        )

    def reboot(self) -> None:
        self.docker("restart", self.name)
        self.wait_for_start()

    def __call__(self, *words: str, user: str = "root", check: bool = True) -> str:
        """Run a command as in a session of the user. Returns its output of both kinds."""
        login = () if user == "root" else ("su", "--login", user, "--command", shlex.join(words))
        return self.docker("exec", self.name, *(login or words), check=check, both=True, timeout_s=COMMAND_S)

    def fails(self, *words: str, code: int) -> str:
        """Run a command as root that must end with this exit code. Returns its output."""
        return self("sh", "-c", 'code=$0; "$@"; test $? = $code', str(code), *words)

    def purge(self) -> None:
        self.docker("rm", "--force", "--volumes", self.name, check=False)
