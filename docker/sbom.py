"""Prints the installed packages as tab-separated lines: kind, name, version, licence. Used by `make sbom`.

Runs inside the image from standard input, with the standard library only. Python packages are read from their metadata,
Debian packages from dpkg and their copyright files.
"""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

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
    return sorted(found)  # type: ignore[arg-type]


if __name__ == "__main__":
    sys.stdout.write("kind\tname\tversion\tlicence\n" + "".join("\t".join(row) + "\n" for row in rows()))
