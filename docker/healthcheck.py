"""Health check of the container: requests the node's /livez and exits with 0 or 1.

A node in phase `error` answers, but does nothing until its owner acts, so it counts as unhealthy. The engine shows that
and restarts nothing. Uses only the standard library, because it runs every 15 s. The address is in api.json in the data
folder.
"""

from __future__ import annotations

import http.client
import json
import os
import ssl
import sys
from pathlib import Path
from urllib.parse import urlsplit

BODY_BYTES_MAX = 500
TIMEOUT_S = 4.0
"""Shorter than the engine's timeout, so that this program can still print the reason."""


def main() -> int:
    folder = Path(os.environ.get("DILOCO_NODE__DATA_DIR", "/data"))
    try:
        address = urlsplit(json.loads((folder / "api.json").read_text(encoding="utf-8"))["url"])
        connection = http.client.HTTPConnection(address.netloc, timeout=TIMEOUT_S)
        if address.scheme == "https":
            trust = ssl.create_default_context()
            # The request goes to loopback and has no secret, so the name in the certificate does not matter.
            trust.check_hostname, trust.verify_mode = False, ssl.CERT_NONE
            connection = http.client.HTTPSConnection(address.netloc, timeout=TIMEOUT_S, context=trust)
        connection.request("GET", "/livez")
        answer = connection.getresponse()
        body = answer.read(BODY_BYTES_MAX)
        sys.stdout.write(body.decode(errors="replace"))
        is_in_error = json.loads(body)["phase"] == "error"
    except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException) as exc:
        sys.stdout.write(f"The node of {folder} does not answer: {exc}")
        return 1
    return 0 if answer.status == http.client.OK and not is_in_error else 1


if __name__ == "__main__":
    sys.exit(main())
