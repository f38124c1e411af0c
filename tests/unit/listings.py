"""Listings of runs for tests."""

from __future__ import annotations

import warnings
from hashlib import sha256
from typing import Any

from node.config.manifest import Manifest, RunConfig
from node.swarm.identity import new_identity
from node.training.model import unit_elements
from tests.swarm.harness import tiny

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from node.swarm.membership.directory import Listing

ADDRESS = f"/ip4/203.0.113.5/tcp/31337/p2p/{new_identity().peer_id}"


def manifest_of(name: str, **tables: Any) -> Manifest:
    run = RunConfig.model_validate(tiny(name=name, **tables))
    digest = sha256(name.encode()).hexdigest()
    parameters = sum(unit_elements(run.model))
    return Manifest(run_id=digest[:32], initial_digest=digest, parameters=parameters, run=run)


def listing_of(name: str, *, addresses: tuple[str, ...] = (ADDRESS,), members: int = 2, **tables: Any) -> Listing:
    text = manifest_of(name, **tables).canonical().decode()
    return Listing(manifest=text, addresses=addresses, members=members, round=3, tokens=1000)
