"""`docker/sbom.py` writes a document of SPDX, which its official tool accepts."""

from __future__ import annotations

import json
import os
import re
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
    static = tmp_path / "node" / "api" / "static"
    static.mkdir(parents=True)
    (tmp_path / "node" / "__init__.py").touch()
    (static / "THIRD_PARTY_LICENSES.txt").write_text("## @preact/signals 2.11.4 (MIT)\n\nText.\n")
    done = subprocess.run(
        [sys.executable, str(ROOT / "docker" / "sbom.py")],
        env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
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
    signals = packages["@preact/signals"]
    assert signals["externalRefs"][0]["referenceLocator"] == "pkg:npm/%40preact/signals@2.11.4"
    assert (signals["versionInfo"], signals["licenseComments"]) == ("2.11.4", "MIT")
    assert all(one["versionInfo"] and one["licenseComments"] for one in found["packages"])
    assert found["documentDescribes"] == [one["SPDXID"] for one in found["packages"]]


def test_built_page_comes_with_the_licences_of_its_packages() -> None:
    static = ROOT / "node" / "api" / "static"
    if not static.exists():
        pytest.skip("the page is not built: make dashboard")
    text = (static / "THIRD_PARTY_LICENSES.txt").read_text(encoding="utf-8")
    names = re.findall(r"^## (\S+) \d\S* \(MIT\)$", text, re.MULTILINE)
    assert names == ["@preact/signals", "@preact/signals-core", "preact", "uplot"]
    assert text.count("Permission is hereby granted") == len(names)


def test_official_tool_accepts_the_document(document: Path) -> None:
    tool = shutil.which("pyspdxtools", path=str(Path(sys.executable).parent)) or shutil.which("pyspdxtools")
    if tool is None:
        pytest.skip("pyspdxtools is not installed: pip install spdx-tools")
    done = subprocess.run([tool, "--infile", str(document)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
