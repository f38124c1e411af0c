"""The dashboard's TypeScript types are generated from the OpenAPI document and must match it.

After a change of the API, `UPDATE_TYPES=1 python -m pytest tests/api/test_dashboard_types.py` writes the new types.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.api.conftest import ClientMaker

TYPES = Path(__file__).parents[2] / "dashboard" / "src" / "api" / "schema.ts"
HEADER = "/** Generated from /openapi.json by tests/api/test_dashboard_types.py. Do not edit. */\n"
PRIMITIVES = {"string": "string", "number": "number", "integer": "number", "boolean": "boolean", "null": "null"}


def typescript(document: dict[str, Any]) -> str:
    """One exported type for each schema of the document. Fields are optional only in requests."""
    requests = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(list(find_values(document, "requestBody")))))
    parts = [HEADER]
    for name, schema in sorted(document["components"]["schemas"].items()):
        body = type_of(schema, optional=name in requests)
        parts.append(f"export interface {name} {body}\n" if body.startswith("{") else f"export type {name} = {body};\n")
    return "\n".join(parts)


def find_values(node: Any, key: str) -> Iterator[Any]:
    if isinstance(node, dict):
        for name, value in node.items():
            yield from [value] if name == key else find_values(value, key)


def type_of(schema: dict[str, Any], *, optional: bool = False) -> str:
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "const" in schema:
        return json.dumps(schema["const"])
    if "enum" in schema:
        return " | ".join(json.dumps(value) for value in schema["enum"])
    if "anyOf" in schema:
        return " | ".join(dict.fromkeys(type_of(one) for one in schema["anyOf"]))
    if schema.get("type") == "array":
        item = type_of(schema["items"])
        return f"({item})[]" if " | " in item else f"{item}[]"
    if "properties" in schema:
        mark = "?" if optional else ""
        lines = [f"  {key}{mark}: {type_of(one)};" for key, one in schema["properties"].items()]
        return "\n".join(["{", *lines, "}"])
    if schema.get("type") == "object":
        values = schema.get("additionalProperties")
        return f"Record<string, {type_of(values) if isinstance(values, dict) else 'unknown'}>"
    return PRIMITIVES.get(schema.get("type", ""), "unknown")


def test_typescript_types_of_the_dashboard_match_the_openapi_document(client: ClientMaker) -> None:
    wanted = typescript(client().get("/openapi.json").json())
    if os.environ.get("UPDATE_TYPES"):
        TYPES.write_text(wanted, encoding="utf-8")
    assert TYPES.read_text(encoding="utf-8") == wanted, "run this test with UPDATE_TYPES=1 and commit the file"
