"""Servers that fork the processes of nodes under test. The servers have already imported the modules that nodes need.

Each process of pytest starts two servers with `python -m tests.swarm.fork_server MODULE FOLDER`.

One server forks supervisors for the harness, the other forks workers for supervisors. The imports take 1 s of processor
time in a supervisor and 6 s in a worker, most of it for torch. A forked process runs the same `main` with the same
arguments, environment and files, in its own session. The process that asked for it keeps a connection to the server. If
that connection closes, the server kills the forked process. If the process ends, the server sends its exit status.

Nodes would train all the time, so tests that run at the same time would wait for processor time that nobody needs.
A forked worker therefore rests after each inner step, three times as long as the step took. Rounds in tests have few
inner steps, so they are still short.

The file `FOLDER/MARK/PID` exists while a forked process lives. MARK identifies the node. The file is needed because the
kernel shows the server's environment and command line for a forked process.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import gc
import importlib
import json
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from node.host.parent_death import die_with_parent

FOLDER_VARIABLE = "SWARM_TEST_FORK_SERVER"
"""Environment variable with the servers' folder. It is set while the servers run."""
SUPERVISOR = "tests.swarm.node_main"
WORKER = "node.worker"
"""SUPERVISOR and WORKER are the modules that forked processes run. A server's command line contains its module."""
CONNECT_S = 60.0
MARK = "SWARM_TEST_MARK"
CLONE_NEWNET = 0x40000000
REST = 3.0
"""How long a forked worker rests after an inner step, as a multiple of the time that the step took."""
LONGEST_REST_S = 0.5
MAX_REQUEST_BYTES = 1 << 20


@contextmanager
def servers() -> Iterator[None]:
    """Run both servers. Nodes find them through the environment variable."""
    with tempfile.TemporaryDirectory(prefix="fork-server-") as folder:
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.swarm.fork_server", module, folder],
                env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "THP_MEM_ALLOC_ENABLE": "1"},
                stdin=subprocess.DEVNULL,
            )
            for module in (SUPERVISOR, WORKER)
        ]
        os.environ[FOLDER_VARIABLE] = folder
        try:
            yield
        finally:
            del os.environ[FOLDER_VARIABLE]
            for process in processes:
                process.kill()
                process.wait(10)


def forked(mark: str) -> list[int]:
    """The process ids of the live forked processes of the node with this mark."""
    folder = os.environ.get(FOLDER_VARIABLE)
    return [int(path.name) for path in (Path(folder) / mark).glob("*")] if folder else []


# in the server

P = ParamSpec("P")
T = TypeVar("T")


def _import(module: str) -> Callable[[], int]:
    """Import all modules that a process of `module` needs. Returns the `main` function of `module`."""
    if module == SUPERVISOR:
        import node.commands.terminal
        import node.daemon.app
        from tests.swarm import node_main

        return node_main.main
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: F401

    import node.worker.bootstrap  # noqa: F401
    from node.training.inner import InnerLoop
    from node.worker import __main__

    InnerLoop.step = rested(InnerLoop.step)  # type: ignore[method-assign]
    return __main__.main


def rested(step: Callable[P, T]) -> Callable[P, T]:
    """Make the thread rest after each call of `step`. The rest counts as step time."""

    @functools.wraps(step)
    def step_and_rest(*args: P.args, **kwargs: P.kwargs) -> T:
        began_at_s = time.perf_counter()
        result = step(*args, **kwargs)
        took_s = time.perf_counter() - began_at_s
        time.sleep(min(REST * took_s, LONGEST_REST_S))
        return result

    return step_and_rest


def serve(module: str, folder: Path) -> None:
    """Fork a process that runs `module` for each connection. The server runs until it is killed."""
    die_with_parent(os.getppid())
    main = _import(module)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(folder / module))
    listener.listen(64)
    gc.freeze()
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    children: dict[int, tuple[socket.socket, int, Path]] = {}
    """Connection, process id and file of each process, by the descriptors of its connection and of its process."""
    while True:
        for key, _ in selector.select():
            if key.fileobj is listener:
                connection, _ = listener.accept()
                try:
                    request, fds = _receive(connection)
                except EOFError:  # The process that asked for a fork has ended.
                    connection.close()
                    continue
                ready_fd, leads_fd = os.pipe()
                pid = os.fork()
                if pid == 0:
                    os.close(ready_fd)
                    selector.close()
                    listener.close()
                    connection.close()
                    for other, _pid, _file in children.values():
                        other.close()
                    _be_process(request, fds, leads_fd, main)
                os.close(leads_fd)
                os.read(ready_fd, 1)  # Wait until the child leads a session, so that its group can get signals.
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
                # The process that asked for this one has ended.
                connection, pid, _ = children[key.data]
                selector.unregister(connection)
                os.kill(pid, signal.SIGKILL)


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    text, fds, _, _ = socket.recv_fds(connection, MAX_REQUEST_BYTES, 2)
    while not text.endswith(b"\n"):
        if not (more := connection.recv(MAX_REQUEST_BYTES)):
            raise EOFError
        text += more
    return json.loads(text), fds


def _be_process(request: dict[str, Any], fds: list[int], leads_fd: int, main: Callable[[], int]) -> None:
    """Prepare the process as `exec` would, then run `main`. `fds` are its output and, for a worker, its channel."""
    output_fd, *channel_fds = fds
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
        _read_hub_settings()
        sys.argv = [*request["words"], *map(str, channel_fds)]
        status = main()
    except SystemExit as exc:
        status = exc.code if isinstance(exc.code, int) else 1
    except Exception:  # noqa: BLE001 - the process root
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _read_hub_settings() -> None:
    """Read the settings of the Hugging Face library again. It read them at import, from the server's environment."""
    if (hf_api := sys.modules.get("huggingface_hub.hf_api")) is not None:
        constants = importlib.reload(sys.modules["huggingface_hub.constants"])
        hf_api.api.endpoint = constants.ENDPOINT


def _enter_network(path: str) -> None:
    """Enter the supervisor's network namespace if it differs from the server's."""
    if Path(path).samefile("/proc/self/ns/net"):
        return
    with Path(path).open("rb") as network:
        if ctypes.CDLL(None, use_errno=True).setns(network.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "the network namespace cannot be entered")


# in the processes that ask for a fork


def _ask(module: str, words: Sequence[str], env: Mapping[str, str], network: str, fds: Sequence[int]) -> socket.socket:
    """Ask the server of `module` for a process. Returns the connection. Waits while the server starts."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    deadline_s = time.monotonic() + CONNECT_S
    while True:
        try:
            connection.connect(str(Path(os.environ[FOLDER_VARIABLE]) / module))
            break
        except (FileNotFoundError, ConnectionRefusedError):
            assert time.monotonic() < deadline_s, f"there is no server that forks {module}"
            time.sleep(0.05)
    request = {"words": list(words), "env": dict(env), "folder": str(Path.cwd()), "network": network}
    text = json.dumps(request).encode() + b"\n"
    sent = socket.send_fds(connection, [text], list(fds))
    connection.sendall(text[sent:])
    return connection


class ForkedSupervisor:
    """The part of `subprocess.Popen` that the harness uses. `network` is the path of a network namespace."""

    def __init__(self, words: Sequence[str], env: Mapping[str, str], network: str, output: int) -> None:
        self.args = words
        self.returncode: int | None = None
        self._connection = _ask(SUPERVISOR, words, env, network, [output])
        self._reader = self._connection.makefile("rb")
        self.pid = int(self._reader.readline())

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code, which is negative for a signal. Raises TimeoutExpired."""
        if self.returncode is None:
            ready, _, _ = select.select([self._connection], [], [], timeout)
            if not ready:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            line = self._reader.readline()
            self.returncode = int(line) if line else -signal.SIGKILL
            self._reader.close()
            self._connection.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # The process has ended, and the server has already reaped it.
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkedWorker:
    """The part of `asyncio.subprocess.Process` that the supervisor uses."""

    def __init__(self, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.pid = pid
        self._reader, self._writer = reader, writer

    async def wait(self) -> int:
        """Return the exit code, which is negative for a signal."""
        line = await self._reader.readline()
        self._writer.close()
        return int(line) if line else -signal.SIGKILL


def install() -> None:
    """Make this supervisor get its workers from the fork server instead of starting an interpreter for each."""

    async def start(*command: str, env: dict[str, str], pass_fds: tuple[int], stdout: Any, **_: Any) -> ForkedWorker:
        assert command[1:5] == ("-P", "-m", WORKER, "--fd"), command
        fds = [stdout.fileno(), pass_fds[0]]
        network = f"/proc/{os.getpid()}/ns/net"
        connection = await asyncio.to_thread(_ask, WORKER, [WORKER, "--fd"], env, network, fds)
        reader, writer = await asyncio.open_connection(sock=connection)
        return ForkedWorker(int(await reader.readline()), reader, writer)

    asyncio.create_subprocess_exec = start  # type: ignore[assignment]


if __name__ == "__main__":
    serve(sys.argv[1], Path(sys.argv[2]))
