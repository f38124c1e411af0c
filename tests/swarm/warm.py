"""Workers that start in a second: forked from a process that has imported torch, transformers and hivemind already.

    python -m tests.swarm.warm node.worker FOLDER     the server, one for each process of pytest

A worker's imports take 6 s of processor time, more than most tests need for all else. The supervisor of a node under
test is a process of its own as always; in place of `exec` it asks the server to fork. The worker then runs the same
`main` with the same arguments, environment and files. It is in a session of its own, is killed when the supervisor's
connection closes, as the kernel would kill it, and its exit status goes back over that connection.

`FOLDER/MARK/PID` is there while a worker lives, where MARK is the node's mark in its environment: the environment and
the command line that the kernel shows for a forked process are the server's.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

WARM = "SWARM_TEST_WARM"
"""Environment variable: the server's folder, where there is one."""
SOCKET = "server"
MARK = "SWARM_TEST_MARK"
CLONE_NEWNET = 0x40000000
MAX_REQUEST_BYTES = 1 << 20


@contextmanager
def server() -> Iterator[None]:
    """A server while this lasts, known to the nodes that are started meanwhile."""
    with tempfile.TemporaryDirectory(prefix="warm-") as folder:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.swarm.warm", "node.worker", folder],
            env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "THP_MEM_ALLOC_ENABLE": "1"},
            stdin=subprocess.DEVNULL,
        )
        os.environ[WARM] = folder
        try:
            yield
        finally:
            del os.environ[WARM]
            process.kill()
            process.wait(10)


def workers(mark: str) -> list[int]:
    """Process ids of the living warm workers of the node with this mark."""
    folder = os.environ.get(WARM)
    return [int(path.name) for path in (Path(folder) / mark).glob("*")] if folder else []


# in the server


def serve(folder: Path) -> None:
    """Fork a worker for each connection, until killed."""
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: F401

    import node.worker.work  # noqa: F401
    from node.worker import __main__
    from node.worker.parent import die_with_parent

    die_with_parent(os.getppid())
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(folder / SOCKET))
    listener.listen(64)
    gc.freeze()
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    children: dict[int, tuple[socket.socket, int, Path]] = {}
    """By the file descriptor that tells of its end, and by its connection's: connection, process id, file."""
    while True:
        for key, _ in selector.select():
            if key.fileobj is listener:
                connection, _ = listener.accept()
                request, fds = _receive(connection)
                ready_fd, leads_fd = os.pipe()
                pid = os.fork()
                if pid == 0:
                    os.close(ready_fd)
                    selector.close()
                    listener.close()
                    connection.close()
                    for other, _pid, _file in children.values():
                        other.close()
                    _be_worker(request, fds, leads_fd, __main__)
                os.close(leads_fd)
                os.read(ready_fd, 1)  # Until it leads a session: a signal to its group would reach nobody before.
                for fd in (*fds, ready_fd):
                    os.close(fd)
                file = folder / request["env"].get(MARK, "unmarked") / str(pid)
                file.parent.mkdir(exist_ok=True)
                file.touch()
                end_fd = os.pidfd_open(pid)
                children[end_fd] = (connection, pid, file)
                selector.register(end_fd, selectors.EVENT_READ, data="end")
                selector.register(connection, selectors.EVENT_READ, data=end_fd)
                connection.sendall(f"{pid}\n".encode())
            elif key.data == "end":
                connection, pid, file = children.pop(key.fd)
                _, status = os.waitpid(pid, 0)
                file.unlink()
                selector.unregister(key.fd)
                os.close(key.fd)
                with suppress(KeyError):
                    selector.unregister(connection)
                with suppress(OSError):
                    connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
                connection.close()
            elif key.data in children:
                # The supervisor is gone.
                connection, pid, _ = children[key.data]
                selector.unregister(connection)
                os.kill(pid, signal.SIGKILL)


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    text, fds, _, _ = socket.recv_fds(connection, MAX_REQUEST_BYTES, 2)
    while not text.endswith(b"\n"):
        text += connection.recv(MAX_REQUEST_BYTES)
    return json.loads(text), fds


def _be_worker(request: dict[str, Any], fds: list[int], leads_fd: int, module: Any) -> None:
    """What `exec` would have done, and then the worker's `main`."""
    link_fd, output_fd = fds
    status = 70
    try:
        os.setsid()
        os.close(leads_fd)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        _enter_network(request["network"])
        os.dup2(output_fd, 1)
        os.dup2(output_fd, 2)
        os.close(output_fd)
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(request["env"])
        sys.argv = ["node.worker", "--fd", str(link_fd)]
        status = module.main()
    except SystemExit as exc:
        status = exc.code if isinstance(exc.code, int) else 1
    except Exception:  # noqa: BLE001 - the process root
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _enter_network(path: str) -> None:
    """The network namespace of the supervisor, where that has one of its own."""
    if Path(path).samefile("/proc/self/ns/net"):
        return
    with Path(path).open("rb") as network:
        if ctypes.CDLL(None, use_errno=True).setns(network.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "the network namespace cannot be entered")


# in the supervisor


class WarmProcess:
    """What the supervisor needs of `asyncio.subprocess.Process`."""

    def __init__(self, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.pid = pid
        self._reader, self._writer = reader, writer

    async def wait(self) -> int:
        """The exit code, negative for a signal."""
        line = await self._reader.readline()
        self._writer.close()
        return int(line) if line else -signal.SIGKILL


def install() -> None:
    """From now on this process starts its workers warm."""
    folder = Path(os.environ[WARM])

    async def start(*command: str, env: dict[str, str], pass_fds: tuple[int], stdout: Any, **_: Any) -> WarmProcess:
        assert command[1:4] == ("-m", "node.worker", "--fd"), command
        request = {"env": env, "folder": str(Path.cwd()), "network": f"/proc/{os.getpid()}/ns/net"}
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + 60.0
        while True:
            try:
                await loop.sock_connect(connection, str(folder / SOCKET))
                break
            except (FileNotFoundError, ConnectionRefusedError):
                # It is importing still.
                assert loop.time() < deadline_s, "there is no server of warm workers"
                await asyncio.sleep(0.05)
        text = json.dumps(request).encode() + b"\n"
        sent = socket.send_fds(connection, [text], [pass_fds[0], stdout.fileno()])
        await loop.sock_sendall(connection, text[sent:])
        reader, writer = await asyncio.open_connection(sock=connection)
        return WarmProcess(int(await reader.readline()), reader, writer)

    asyncio.create_subprocess_exec = start  # type: ignore[assignment]


if __name__ == "__main__":
    serve(Path(sys.argv[2]))
