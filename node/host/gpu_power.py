"""Limits the power of an NVIDIA GPU and restores the previous limit.

The previous limit is written to the data folder before a new one is set. The supervisor restores it after each worker
and at its own start. If the supervisor itself is killed, the new limit stays until the supervisor's next start or a
reboot.
"""

from __future__ import annotations

import importlib
import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from node.host.files import write_whole

FILE = "gpu-power.json"
MILLI = 1000

logger = logging.getLogger(__name__)


class NotCapped(Exception):
    """The power limit was not set as asked; the message is one sentence with the remedy."""


def cap(folder: Path, uuid: str, watts: float, nvml: Any = None) -> None:
    """Set the power limit of the GPU `uuid` (NVML's form, `GPU-...`). Raises NotCapped.

    An empty `uuid` means that this kind of GPU has no such id. `nvml` replaces the library in tests.
    """
    if not uuid:
        raise NotCapped("limits.gpu_power_watts is not applied: it works only with NVIDIA GPUs. Set it to 0.")
    with _open_nvml(nvml) as library:
        try:
            handle = library.nvmlDeviceGetHandleByUUID(uuid)
            before = int(library.nvmlDeviceGetPowerManagementLimit(handle))
            least, most = (int(mw) for mw in library.nvmlDeviceGetPowerManagementLimitConstraints(handle))
            wanted = min(most, max(least, round(watts * MILLI)))
            if wanted == before:
                return
            earlier = _read(folder)
            _write(folder, {uuid: before, **earlier})  # an earlier entry is the original limit
            try:
                library.nvmlDeviceSetPowerManagementLimit(handle, wanted)
            except library.NVMLError:
                _write(folder, earlier)
                raise
        except OSError as exc:
            raise NotCapped(
                f"limits.gpu_power_watts is not applied, because {folder / FILE} could not be written "
                f"({exc.strerror}) and the previous limit would be lost: free some space on that disk."
            ) from exc
        except library.NVMLError as exc:
            raise NotCapped(
                f"limits.gpu_power_watts is not applied, because the driver does not let this user change it ({exc}): "
                f"run the node with that permission, or call `sudo nvidia-smi -pl {watts:g}` yourself."
            ) from exc
    if wanted != round(watts * MILLI):
        raise NotCapped(
            f"limits.gpu_power_watts {watts:g} is outside of this GPU's range of {least / MILLI:g} to "
            f"{most / MILLI:g} W: {wanted / MILLI:g} W are set."
        )
    logger.info("The GPU's power limit is now %g W; it was %g W.", wanted / MILLI, before / MILLI)


def restore(folder: Path, nvml: Any = None) -> None:
    """Restore the limits from before a cap, if there are any. One that cannot be restored stays in the file."""
    before = _read(folder)
    if not before:
        return
    remaining = dict(before)
    try:
        with _open_nvml(nvml) as library:
            for uuid, milliwatts in before.items():
                try:
                    handle = library.nvmlDeviceGetHandleByUUID(uuid)
                    library.nvmlDeviceSetPowerManagementLimit(handle, milliwatts)
                    del remaining[uuid]
                except library.NVMLError as exc:
                    logger.warning("The power limit of GPU %s could not be restored: %s", uuid, exc)
    except NotCapped as exc:
        logger.warning("The GPU's power limit could not be restored: %s", exc)
    try:
        _write(folder, remaining)
    except OSError as exc:
        logger.warning("The file %s could not be updated (%s). Delete it.", folder / FILE, exc.strerror)


@contextmanager
def _open_nvml(nvml: Any) -> Iterator[Any]:
    """Initialise NVML for the block. Raises NotCapped if there is none."""
    try:
        library: Any = nvml or importlib.import_module("pynvml")
    except ImportError as exc:
        raise NotCapped("limits.gpu_power_watts needs the package nvidia-ml-py: install it.") from exc
    try:
        library.nvmlInit()
    except library.NVMLError as exc:
        raise NotCapped(
            f"limits.gpu_power_watts needs NVIDIA's driver, which does not answer ({exc}): install or restart it."
        ) from exc
    try:
        yield library
    finally:
        with suppress(library.NVMLError):
            library.nvmlShutdown()


def _read(folder: Path) -> dict[str, int]:
    try:
        stored = json.loads((folder / FILE).read_bytes())
    except (OSError, ValueError):
        return {}
    if not isinstance(stored, dict):
        return {}
    return {str(uuid): mw for uuid, mw in stored.items() if isinstance(mw, int) and mw > 0}


def _write(folder: Path, limits: Mapping[str, int]) -> None:
    if limits:
        write_whole(folder / FILE, json.dumps(dict(limits)))
    else:
        (folder / FILE).unlink(missing_ok=True)
