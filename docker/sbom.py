"""Prints the installed packages, with their licences, as a document of SPDX 2.3 in JSON. Used by `make sbom`.

Runs inside the image from standard input, with the standard library only. Python packages are read from their metadata,
Debian packages from dpkg and their copyright files, those of the page from its file of licences. Many state their
licence as a text, not as an expression of SPDX. So it is in the field `licenseComments`, and `licenseDeclared` makes no
assertion.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import uuid
from datetime import UTC, datetime
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import quote

UNKNOWN = "unknown"
DEBIAN_FORMAT = "${Package}\t${Version}\n"
IN_PROSE = {
    r"python\s+software\s+foundation": "PSF-2.0",
    r"lesser\s+general\s+public": "LGPL",
    r"gnu\s+general\s+public": "GPL",
    r"public\s+domain": "public-domain",
}
"""Patterns for licences that Debian's older copyright files only mention, and the names to print for them."""
NAME_LENGTH_MAX = 80
"""A longer `License` field holds the full text of the licence instead of its name."""


def python_licence(about: metadata.PackageMetadata) -> str:
    """Return the SPDX expression if there is one, else the classifiers, else the free text."""
    if expression := about.get("License-Expression"):
        return str(expression)
    classifiers = [c.rpartition(" :: ")[2] for c in about.get_all("Classifier", []) if c.startswith("License :: ")]
    named = [name for name in classifiers if name != "OSI Approved"]
    declared = str(about.get("License") or "").strip().partition("\n")[0]
    return "; ".join(named) or (declared if len(declared) <= NAME_LENGTH_MAX else "") or _from_files(about) or UNKNOWN


def _from_files(about: metadata.PackageMetadata) -> str:
    for file in about.get_all("License-File", []):
        found = metadata.distribution(str(about["Name"])).locate_file("")
        text = next((p.read_text(errors="replace") for p in Path(str(found)).glob(f"*.dist-info/**/{file}")), "")
        if title := next((line.strip() for line in text.splitlines() if line.strip()), ""):
            return title
    return ""


def debian_licence(package: str) -> str:
    """Return the short names in a machine-readable copyright file, else the licences that the text mentions."""
    path = Path("/usr/share/doc", package, "copyright")
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return UNKNOWN
    if re.search(r"^Format:", text, re.MULTILINE):
        declared = re.findall(r"^License: *([A-Za-z0-9][^\n]*)$", text, re.MULTILINE)
        if found := sorted({name.strip() for name in declared if len(name) <= NAME_LENGTH_MAX}):
            return "; ".join(found)
    found = set(re.findall(r"/usr/share/common-licenses/([A-Za-z0-9.-]*[A-Za-z0-9])", text))
    found |= {short for words, short in IN_PROSE.items() if re.search(words, text, re.IGNORECASE)}
    return "; ".join(sorted(found)) or f"see {path}"


def rows() -> list[tuple[str, str, str, str]]:
    listed = subprocess.run(
        ["dpkg-query", "-W", "-f", DEBIAN_FORMAT], capture_output=True, text=True, check=True
    ).stdout
    found = [("debian", *line.split("\t"), debian_licence(line.split("\t")[0])) for line in listed.splitlines()]
    for package in metadata.distributions():
        about = package.metadata
        found.append(("python", str(about["Name"]), package.version, python_licence(about)))
    # hivemind's wheel contains the Go daemon of libp2p, which is built from another repository.
    p2pd = [file for package in metadata.distributions() for file in package.files or () if file.name == "p2pd"]
    if p2pd:
        version = metadata.version("hivemind")
        found.append(("bundled", "go-libp2p-daemon (p2pd)", f"as in hivemind {version}", "MIT; Apache-2.0"))
    return sorted([*found, *page_packages()])  # type: ignore[arg-type]


def page_packages() -> list[tuple[str, str, str, str]]:
    """The packages whose code the page contains; none if the page was not built."""
    found = find_spec("node")
    for folder in (found.submodule_search_locations or ()) if found is not None else ():
        file = Path(folder, "api", "static", "THIRD_PARTY_LICENSES.txt")
        if file.exists():
            headings = re.findall(r"^## (\S+) (\S+) \((.+)\)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            return [("npm", *heading) for heading in headings]
    return []


PURL_TYPES = {"debian": "deb/debian", "python": "pypi", "npm": "npm"}


def spdx_package(number: int, kind: str, name: str, version: str, licence: str) -> dict[str, Any]:
    """The `packages` entry (SPDX 2.3, section 7). Its package URL names a package of Debian, PyPI or npm."""
    package: dict[str, Any] = {
        "SPDXID": f"SPDXRef-Package-{number}",
        "name": name,
        "versionInfo": version,
        "downloadLocation": "NOASSERTION",
        "filesAnalyzed": False,
        "licenseConcluded": "NOASSERTION",
        "licenseDeclared": "NOASSERTION",
        "licenseComments": licence,
        "copyrightText": "NOASSERTION",
        "comment": kind,
    }
    if kind in PURL_TYPES:
        normal = re.sub(r"[-_.]+", "-", name).lower() if kind == "python" else name
        url = f"pkg:{PURL_TYPES[kind]}/{quote(normal)}@{quote(version, safe='')}"
        package["externalRefs"] = [
            {"referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl", "referenceLocator": url}
        ]
    return package


def document() -> dict[str, Any]:
    packages = [spdx_package(number, *row) for number, row in enumerate(rows(), 1)]
    return {
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": "SPDXRef-DOCUMENT",
        "name": "diloco-node image",
        "documentNamespace": f"urn:uuid:{uuid.uuid4()}",
        "creationInfo": {
            "created": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "creators": ["Tool: diloco-node docker/sbom.py"],
        },
        "packages": packages,
        "documentDescribes": [package["SPDXID"] for package in packages],
    }


if __name__ == "__main__":
    json.dump(document(), sys.stdout, indent=1)
