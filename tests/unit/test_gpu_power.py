"""Setting and restoring a GPU's power limit, with a fake driver."""

# ruff: noqa: N802

from __future__ import annotations

from pathlib import Path

import pytest

from node.host.gpu_power import FILE, NotCapped, cap, restore
from tests.unit.disk import disk_that_takes

GPU = "GPU-1"


class Driver:
    """A fake driver in place of pynvml."""

    class NVMLError(Exception):
        pass

    def __init__(self, *, allows: bool = True, starts: bool = True) -> None:
        self.allows, self.starts, self.milliwatts = allows, starts, 450_000

    def nvmlInit(self) -> None:
        if not self.starts:
            raise self.NVMLError("Driver Not Loaded")

    def nvmlShutdown(self) -> None: ...

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != GPU:
            raise self.NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetPowerManagementLimit(self, _: str) -> int:
        return self.milliwatts

    def nvmlDeviceGetPowerManagementLimitConstraints(self, _: str) -> tuple[int, int]:
        return 150_000, 600_000

    def nvmlDeviceSetPowerManagementLimit(self, _: str, milliwatts: int) -> None:
        if not self.allows:
            raise self.NVMLError("Insufficient Permissions")
        self.milliwatts = milliwatts


def test_power_limit_of_a_gpu_is_set_and_the_original_limit_is_restored(tmp_path: Path) -> None:
    driver = Driver()
    cap(tmp_path, GPU, 300, driver)
    assert driver.milliwatts == 300_000
    # A restarted worker sets a limit again, but the original limit is restored.
    cap(tmp_path, GPU, 200, driver)
    assert driver.milliwatts == 200_000
    restore(tmp_path, driver)
    assert driver.milliwatts == 450_000
    assert not (tmp_path / FILE).exists()
    driver.milliwatts = 1
    restore(tmp_path, driver)
    assert driver.milliwatts == 1, "nothing was left to restore"


def test_refusal_of_a_power_limit_by_the_driver_is_reported_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(NotCapped, match=r"nvidia-smi -pl 300"):
        cap(tmp_path, GPU, 300, Driver(allows=False))
    assert not (tmp_path / FILE).exists(), "an old limit that was never changed is not restored later"
    with pytest.raises(NotCapped, match="driver"):
        cap(tmp_path, GPU, 300, Driver(starts=False))
    driver = Driver()
    with pytest.raises(NotCapped, match="150 to 600 W: 150 W are set"):
        cap(tmp_path, GPU, 20, driver)
    assert driver.milliwatts == 150_000
    with pytest.raises(NotCapped, match=r"nvidia-ml-py|driver"):
        cap(tmp_path, GPU, 300)


def test_power_limit_is_not_changed_if_the_previous_one_cannot_be_stored(tmp_path: Path) -> None:
    driver = Driver()
    with disk_that_takes(3), pytest.raises(NotCapped, match=r"could not be written.*free some space"):
        cap(tmp_path, GPU, 300, driver)
    assert driver.milliwatts == 450_000


def test_power_limits_that_cannot_be_restored_are_logged_and_kept_for_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    driver = Driver()
    cap(tmp_path, GPU, 300, driver)
    for broken in (Driver(starts=False), Driver(allows=False)):
        caplog.clear()
        restore(tmp_path, broken)
        assert (tmp_path / FILE).exists()
        assert "could not be restored" in caplog.text
    restore(tmp_path, driver)
    assert driver.milliwatts == 450_000


@pytest.mark.parametrize("text", ["", "[]", "{", '{"GPU-1": "x"}'])
def test_damaged_file_of_previous_power_limits_is_ignored(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    driver = Driver()
    restore(tmp_path, driver)
    assert driver.milliwatts == 450_000
