"""`docker/sbom.py` writes a document of SPDX, which its official tool accepts."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def document(tmp_path: Path) -> Path:
    if shutil.which("dpkg-query") is None:
        pytest.skip("the packages of Debian are listed by dpkg-query, which this machine lacks")
    done = subprocess.run(
        [sys.executable, str(ROOT / "docker" / "sbom.py")], capture_output=True, text=True, timeout=120, check=True
    )
    file = tmp_path / "sbom.spdx.json"
    file.write_text(done.stdout)
    return file


def test_each_package_has_a_version_a_licence_and_an_address(document: Path) -> None:
    found = json.loads(document.read_text())
    assert found["spdxVersion"] == "SPDX-2.3"
    packages = {one["name"]: one for one in found["packages"]}
    assert {"torch", "hivemind", "libc6", "go-libp2p-daemon (p2pd)"} <= packages.keys()
    assert packages["libc6"]["externalRefs"][0]["referenceLocator"].startswith("pkg:deb/debian/libc6@")
    assert packages["torch"]["externalRefs"][0]["referenceLocator"].startswith("pkg:pypi/torch@")
    assert all(one["versionInfo"] and one["licenseComments"] for one in found["packages"])
    assert found["documentDescribes"] == [one["SPDXID"] for one in found["packages"]]


def test_official_tool_accepts_the_document(document: Path) -> None:
    tool = shutil.which("pyspdxtools", path=str(Path(sys.executable).parent)) or shutil.which("pyspdxtools")
    if tool is None:
        pytest.skip("pyspdxtools is not installed: pip install spdx-tools")
    done = subprocess.run([tool, "--infile", str(document)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
