"""Continues a text with the newest checkpoint, for the owner's page. Each request is a process of its own.

The process has low priority, computes on the CPU, and takes some seconds to load. So the node holds no second model in
memory, and nothing waits for it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

from node.api.node_interface import GeneratedText, GeneratorBusy, GeneratorFailed, TextRequest
from node.config.schema import Config
from node.daemon.worker_process import WORKER_ENVIRONMENT
from node.host.priority import helper_environment

COMMAND = (sys.executable, "-P", "-m", "node.commands.generate")
TIMEOUT_S = 180.0
UNKNOWN = "The process that samples ended without an answer: see whether this machine has enough memory."


class TextGenerator:
    """Implements `node_interface.ContinuesText`. One request at a time. Used by the supervisor's event loop only."""

    def __init__(
        self, config: Callable[[], Config], *, command: Sequence[str] = COMMAND, timeout_s: float = TIMEOUT_S
    ) -> None:
        self._config, self._command, self._timeout_s = config, command, timeout_s
        self._is_busy = False

    async def generate(self, request: TextRequest) -> GeneratedText:
        """Raises GeneratorBusy while another request is answered, and GeneratorFailed with the reason."""
        if self._is_busy:
            raise GeneratorBusy("The model continues another text now: try again in a moment.")
        self._is_busy = True
        try:
            return await self._run(request)
        finally:
            self._is_busy = False

    async def _run(self, request: TextRequest) -> GeneratedText:
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env=WORKER_ENVIRONMENT | helper_environment(),
                start_new_session=True,
            )
        except OSError as exc:
            raise GeneratorFailed(f"The process that samples cannot be started ({exc.strerror}).") from exc
        order = {"config": self._config().model_dump(mode="json"), "request": request.model_dump()}
        try:
            async with asyncio.timeout(self._timeout_s):
                output, _ = await process.communicate(json.dumps(order).encode() + b"\n")
        except TimeoutError as exc:
            raise GeneratorFailed(
                f"The model has not answered within {self._timeout_s:g} s: ask for fewer tokens, or try again when "
                "this machine has less to do."
            ) from exc
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        try:
            answer = json.loads(output.splitlines()[-1])
        except (ValueError, IndexError) as exc:
            raise GeneratorFailed(UNKNOWN) from exc
        if "problem" in answer:
            raise GeneratorFailed(answer["problem"])
        return GeneratedText.model_validate(answer)
