"""A cap on what a GPU draws, and the way back. Knows NVIDIA's management library and one file; no torch, no node.

Who sets a cap writes down first what was set before, in the data folder; whoever finds that file later, however the one
who wrote it has ended, puts it back. So the supervisor does after each worker, and at its own start: only if it is
killed itself does the cap outlive the node, until the next start or the next boot.
"""

from __future__ import annotations

import importlib
import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from node.files import write_whole

FILE = "gpu-power.json"
MILLI = 1000

logger = logging.getLogger(__name__)


class NotCapped(Exception):
    """Why the GPU draws what it likes: one sentence, with the mend."""


def cap(folder: Path, uuid: str, watts: float, nvml: Any = None) -> None:
    """`uuid` as NVML writes it, `GPU-...`. Raises NotCapped."""
    with _library(nvml) as library:
        try:
            handle = library.nvmlDeviceGetHandleByUUID(uuid)
            before = int(library.nvmlDeviceGetPowerManagementLimit(handle))
            least, most = (int(mw) for mw in library.nvmlDeviceGetPowerManagementLimitConstraints(handle))
            wanted = min(most, max(least, round(watts * MILLI)))
            if wanted == before:
                return
            _write(folder, {uuid: before, **_read(folder)})  # What was first is what comes back.
            library.nvmlDeviceSetPowerManagementLimit(handle, wanted)
        except OSError as exc:
            raise NotCapped(
                f"limits.gpu_power_watts is not kept, as {folder / FILE} could not be written ({exc.strerror}), and "
                "nobody would know what to put back: free some space on that disk."
            ) from exc
        except library.NVMLError as exc:
            raise NotCapped(
                f"limits.gpu_power_watts is not kept, as the driver does not let this user say so ({exc}): run the "
                f"node with the right to, or call `sudo nvidia-smi -pl {watts:g}` yourself."
            ) from exc
    if wanted != round(watts * MILLI):
        raise NotCapped(
            f"limits.gpu_power_watts {watts:g} is outside of what this GPU takes, {least / MILLI:g} to "
            f"{most / MILLI:g} W: {wanted / MILLI:g} W are set."
        )
    logger.info("The GPU draws at most %g W; before it were %g.", wanted / MILLI, before / MILLI)


def restore(folder: Path, nvml: Any = None) -> None:
    """Put back what was set before a cap, if one was left. What cannot be put back now is kept for later."""
    before = _read(folder)
    if not before:
        return
    left = dict(before)
    try:
        with _library(nvml) as library:
            for uuid, milliwatts in before.items():
                with suppress(library.NVMLError):
                    handle = library.nvmlDeviceGetHandleByUUID(uuid)
                    library.nvmlDeviceSetPowerManagementLimit(handle, milliwatts)
                    del left[uuid]
    except NotCapped as exc:
        logger.warning("The GPU's power limit could not be put back: %s", exc)
    try:
        _write(folder, left)
    except OSError as exc:
        logger.warning("%s could not be changed (%s): remove it.", folder / FILE, exc.strerror)


@contextmanager
def _library(nvml: Any) -> Iterator[Any]:
    """NVML, started, and ended after. Raises NotCapped where there is none."""
    try:
        library: Any = nvml or importlib.import_module("pynvml")
    except ImportError as exc:
        raise NotCapped("limits.gpu_power_watts needs the package nvidia-ml-py: install it.") from exc
    try:
        library.nvmlInit()
    except library.NVMLError as exc:
        raise NotCapped(f"limits.gpu_power_watts needs NVIDIA's driver, which does not answer ({exc}).") from exc
    try:
        yield library
    finally:
        with suppress(library.NVMLError):
            library.nvmlShutdown()


def _read(folder: Path) -> dict[str, int]:
    try:
        found = json.loads((folder / FILE).read_bytes())
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {str(uuid): mw for uuid, mw in found.items() if isinstance(mw, int) and mw > 0}


def _write(folder: Path, before: Mapping[str, int]) -> None:
    file = folder / FILE
    if not before:
        file.unlink(missing_ok=True)
        return
    write_whole(file, json.dumps(dict(before)))
