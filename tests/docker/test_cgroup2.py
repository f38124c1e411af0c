"""A node in the image refuses a run that does not fit into its memory limit under control groups of version 2.

Most machines have only one version, so this boots a kernel in an emulated machine, with the files of the image as its
root: `DILOCO_TEST_KERNEL` is the file of a Linux kernel (Debian's `linux-image-cloud-amd64` has one as `vmlinuz`). It
needs qemu-system-x86 and cpio, and takes minutes.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.docker.engine import IMAGE, Engine, why_not

ASKED_FOR = "DILOCO_TEST_KERNEL"
BOOT_S = 900.0
INIT = """#!/bin/sh
export PATH=/opt/node/bin:/opt/diloco/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/data TMPDIR=/data/tmp NO_COLOR=1
export DILOCO_NODE__DATA_DIR=/data DILOCO_NODE__PERSIST=true DILOCO_LIMITS__CPU_THREADS=1
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mkdir /dev/shm
mount -t tmpfs shm /dev/shm
mount -t cgroup2 cgroup2 /sys/fs/cgroup
exec > /dev/console 2>&1 < /dev/null
python3 -c 'import fcntl, socket, struct
fcntl.ioctl(socket.socket(), 0x8914, struct.pack("16sh", b"lo", 0x41))  # ip link set lo up'
echo +memory > /sys/fs/cgroup/cgroup.subtree_control
mkdir /sys/fs/cgroup/node
echo 512M > /sys/fs/cgroup/node/memory.max
limited() {
    sh -c 'echo $$ > /sys/fs/cgroup/node/cgroup.procs
        exec setpriv --reuid 31337 --regid 31337 --clear-groups diloco-node "$@"' - "$@"
}
limited run > /tmp/log 2>&1 &
tries=0
until limited status > /tmp/status 2>&1; grep -q '^error' /tmp/status || [ $tries -gt 60 ]; do
    tries=$((tries + 1))
    sleep 4
done
cat /tmp/status /tmp/log
limited doctor
cat /sys/fs/cgroup/node/memory.events
echo o > /proc/sysrq-trigger
sleep 60
"""


@pytest.fixture(scope="module")  # Each test runs without DILOCO_ variables.
def kernel() -> Path:
    file = os.environ.get(ASKED_FOR, "")
    missing = [name for name in ("qemu-system-x86_64", "cpio") if not shutil.which(name)]
    if reason := why_not() or ("" if file else f"{ASKED_FOR} names no kernel"):
        pytest.skip(reason)
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    return Path(file)


@pytest.mark.timeout(int(BOOT_S) + 300)
def test_node_refuses_with_the_figures_under_version_2(kernel: Path, docker: Engine, tmp_path: Path) -> None:
    root, packed, container = tmp_path / "root", tmp_path / "root.cpio", docker("create", IMAGE)
    root.mkdir()
    try:
        docker("export", "--output", str(tmp_path / "root.tar"), container, timeout_s=300)
    finally:
        docker("rm", container)
    subprocess.run(["tar", "-xf", tmp_path / "root.tar", "-C", root], check=True, timeout=300)
    (root / "init").write_text(INIT)
    (root / "init").chmod(0o755)
    with packed.open("wb") as file:
        names = subprocess.run(["find", "."], cwd=root, capture_output=True, check=True, timeout=60).stdout
        subprocess.run(
            ["cpio", "-o", "-H", "newc", "--quiet"], cwd=root, input=names, stdout=file, check=True, timeout=300
        )
    words = ["qemu-system-x86_64", "-cpu", "max", "-m", "6G", "-nographic", "-no-reboot", "-kernel", str(kernel)]
    words += ["-initrd", str(packed), "-append", "console=ttyS0 panic=-1 quiet"]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=BOOT_S, check=False)
    said = done.stdout.replace("\r", "")
    assert re.search(r"error since .*This run needs 0\.\d+ GB of memory here, and 0\.\d+ GB are free: raise", said), (
        said
    )
    assert "which is 0.537 GB (memory.max)" in said
    assert "memory     at most 0.537 GB" in said  # In `status`.
    assert "limits memory to 0.537 GB (memory.max)" in said  # In `doctor`.
    assert re.search(r"^oom_kill 0$", said, re.M), said
