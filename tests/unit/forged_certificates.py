"""Makes false certificates out of a valid one: by changes of the file, and by a member who signs another content."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

from node.swarm.chain.certificate import PURPOSE
from node.swarm.identity import Identity

ORDER = 2**252 + 27742317777372353535851937790883648493
"""The order of Ed25519's group. A signature with a greater number may be accepted by careless programs."""
INTEGERS = ("tokens", "rounds", "first_round", "streak_round", "last_round")

Data = dict[str, Any]


def as_written(data: Any) -> bytes:
    """The JSON text as `certificate` writes it."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode()


def resigned(data: Data, identity: Identity) -> Data:
    """The same content with a new signature of a member, who can sign anything."""
    content = {key: value for key, value in data.items() if key != "signature"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return {**content, "signature": identity.sign(PURPOSE, text.encode()).hex()}


def tables_in(data: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The paths of all JSON objects in the certificate."""
    if isinstance(data, dict):
        yield path
    pairs = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in pairs:
        yield from tables_in(value, (*path, key))


def at(data: Any, path: tuple[str | int, ...]) -> Any:
    for key in path:
        data = data[key]
    return data


def rewritten_files(valid: Data, seed: int = 0) -> Iterator[tuple[str, bytes]]:
    """Files with the same or a similar content that nobody has written so. Yields a name and the file's bytes."""
    text, rng = as_written(valid), random.Random(seed)
    yield "an indented file", json.dumps(valid, indent=2).encode()
    yield "a byte order mark", b"\xef\xbb\xbf" + text
    yield "bytes that are no text", b"\xff" + text
    yield "an escaped letter", text.replace(b'"round"', b'"\\u0072ound"', 1)
    yield "two certificates", text + text
    yield "a long number", text.replace(b'"tokens":', b'"tokens":' + b"9" * 5000, 1)
    yield "deep nesting", b"[" * 100_000
    for other in (b"", b"{}", b"[]", b"null", b"NaN", b'"text"', b"<html></html>"):
        yield f"the file {other!r}", other
    for part in range(40):
        yield f"cut at {part}/40", text[: len(text) * part // 40]
    for path in tables_in(valid):
        for key, value in at(valid, path).items():
            less, more = copy.deepcopy(valid), copy.deepcopy(valid)
            del at(less, path)[key]
            yield f"without {key} at {path}", as_written(less)
            at(more, path)["KEY"] = value
            quoted = json.dumps(key).encode()
            yield f"{key} twice at {path}", as_written(more).replace(b'"KEY"', quoted)
        more = copy.deepcopy(valid)
        at(more, path)["more"] = 1
        yield f"another key at {path}", as_written(more)
    for name in INTEGERS:
        before = f'"{name}":{valid["entry"][name]}'.encode()
        for after in (b".0", b"e0", b"E+0", b"0", b"_0"):
            yield f"{name}{after.decode()}", text.replace(before, before + after)
        yield f"{name} with a sign", text.replace(before, before.replace(b":", b":-"))
        yield f"{name} as text", text.replace(before, before.replace(b":", b':"') + b'"')
        yield f"{name} as a list", text.replace(before, before.replace(b":", b":[") + b"]")
    for number in range(150):
        place = rng.randrange(len(text))
        new = bytes([rng.choice([one for one in range(32, 127) if one != text[place]])])
        yield f"character {place} of {number}", text[:place] + new + text[place + 1 :]


def changed_signatures(valid: Data, other: str) -> Iterator[tuple[str, bytes]]:
    """Other spellings of the member's signature, and signatures of something else."""
    signature = str(valid["signature"])
    number = int.from_bytes(bytes.fromhex(signature[64:]), "little")
    for name, false in {
        "capitals": signature.upper(),
        "a space": f"{signature[:2]} {signature[2:]}",
        "a greater number": signature[:64] + (number + ORDER).to_bytes(32, "little").hex(),
        "zeros": "0" * 128,
        "nothing": "",
        "one byte less": signature[:-2],
        "one byte more": signature + "00",
        "another certificate's": other,
        "a join's": valid["evidence"]["joins"][0]["signature"],
        "no text": None,
    }.items():
        yield f"signature: {name}", as_written({**valid, "signature": false})


def changed(valid: Data, *path: str, **values: Any) -> Data:
    """A copy with other values in the object at this path."""
    data = copy.deepcopy(valid)
    at(data, path).update(values)
    return data


def dishonest_contents(valid: Data, other_member: Data, other_run: Data, later: Data) -> Iterator[tuple[str, Data]]:
    """Contents for which the others' signatures do not stand. The caller signs them as the member.

    The others are certificates of another member of the same state, of the same member in another run, and of the same
    member after another round of the same run.
    """
    for name in INTEGERS:
        for value in (valid["entry"][name] + 1, bool(valid["entry"][name]), float(valid["entry"][name]), -1, 2**64):
            yield f"entry.{name} = {value!r}", changed(valid, "entry", **{name: value})
    for source, content in (("member", other_member), ("run", other_run), ("round", later)):
        for key in ("entry", "path", "evidence"):
            if content[key] != valid[key]:
                yield f"{key} of another {source}", {**valid, key: content[key]}
        for key, value in content["evidence"].items():
            if value != valid["evidence"][key]:
                yield (
                    f"{key} of another {source}",
                    changed(valid, "evidence", **{key: value}),
                )
    yield "other peer id", changed(valid, "entry", member=other_member["entry"]["member"])
    yield from _dishonest_paths(valid)
    yield from _dishonest_votes(valid)
    yield from _dishonest_joins(valid)
    for key, value in (("round", True), ("tokens", True), ("round", 5.0), ("tokens", -1), ("leaves", "00" * 32)):
        yield f"{key} = {value!r}", changed(valid, "evidence", **{key: value})
    fewer = valid["evidence"]["manifest"].replace('"min_peers":3', '"min_peers":1')
    yield "manifest with other rules", changed(valid, "evidence", manifest=fewer)
    for text in ("[]", "{}", "x", '[{"signed":{"text":"{}"}}]'):
        yield f"amendments {text}", changed(valid, "evidence", amendments=text)


def _dishonest_paths(valid: Data) -> Iterator[tuple[str, Data]]:
    path = valid["path"]
    for place, (is_left, sibling) in enumerate(path):
        turned, without = copy.deepcopy(path), path[:place] + path[place + 1 :]
        turned[place] = [not is_left, sibling]
        other = copy.deepcopy(path)
        other[place] = [is_left, "00" * 32]
        for name, false in (("turned", turned), ("left out", without), ("replaced", other)):
            yield f"step {place} of the path {name}", {**valid, "path": false}
    for name, false in (("empty", []), ("reversed", path[::-1]), ("longer", [*path, path[0]]), ("no list", None)):
        yield f"path {name}", {**valid, "path": false}


def _dishonest_votes(valid: Data) -> Iterator[tuple[str, Data]]:
    def proof(**values: Any) -> Data:
        return changed(valid, "evidence", "proof", **values)

    original = valid["evidence"]["proof"]
    accepts, group, outcome = original["accepts"], original["group"], original["outcome"]
    one, two = list(accepts)[:2]
    yield "one vote only", proof(accepts={one: accepts[one]})
    yield "no vote", proof(accepts={})
    yield "a vote of another member", proof(accepts={**accepts, one: accepts[two]})
    yield "a join's signature as a vote", proof(accepts={**accepts, one: outcome["signature"]})
    yield "one member three times", proof(group=[one] * 3, accepts={one: accepts[one]})
    names = [one, f"{one} ", f"{one}\n"]
    yield "one member in three spellings", proof(group=names, accepts=dict.fromkeys(names, accepts[one]))
    yield "a group of two", proof(group=group[:2])
    yield "no group", proof(group=[])
    yield "a group of numbers", proof(group=[1, 2, 3])
    yield "another attempt", proof(attempt=original["attempt"] + 1)
    yield (
        "another signer of the outcome",
        proof(outcome={**outcome, "signer": two if outcome["signer"] == one else one}),
    )
    yield "an outcome with a signature of a vote", proof(outcome={**outcome, "signature": accepts[one]})
    text = outcome["text"].replace('"round":5', '"round":6')
    yield "an outcome of another round", proof(outcome={**outcome, "text": text})
    yield "an outcome with a space", proof(outcome={**outcome, "text": outcome["text"] + " "})


def _dishonest_joins(valid: Data) -> Iterator[tuple[str, Data]]:
    original = valid["evidence"]["joins"]
    first, second = original[:2]
    false_joins = {
        "no join": [],
        "one join": [first],
        "one join three times": [first] * 3,
        "a join with another's signature": [{**first, "signature": second["signature"]}, *original[1:]],
        "a join with another's text": [{**first, "text": second["text"]}, *original[1:]],
        "a join of another signer": [{**first, "signer": second["signer"]}, *original[1:]],
        "joins that are no list": 1,
    }
    for name, joins in false_joins.items():
        yield name, changed(valid, "evidence", joins=joins)
