"""The settings of a run that continues a publication: those of the publication, and those that its founder changes."""

from __future__ import annotations

from pydantic import ValidationError

from node.config.amendments import rewound_tokens, schedule_of
from node.config.loader import set_value, value_of
from node.config.manifest import ModelConfig, RunConfig
from node.config.publish_address import parse_publish_address
from node.config.schema import Config
from node.errors import ConfigError
from node.publication.model_folder import Publication
from node.publication.stores import revision_of
from node.training.algorithm import optimizer_of
from node.worker_protocol import FoundFrom

START = "run.model.start"


def continued_run(publication: Publication, own: RunConfig, origin: FoundFrom) -> RunConfig:
    """Return the settings, with the publication as `model.start`. Raises ConfigError if they do not fit its state.

    They are those of the round after the publication, so they include its amendments.
    """
    record = publication.record
    before = schedule_of(publication.manifest.run, publication.state.amendments).at(record.round + 1).run
    if START in origin.own_keys:
        raise ConfigError(f"{START} names other parameters than --from: set one of them.")
    tree = {"run": before.model_dump()}
    holder = Config(run=own)
    for key in origin.own_keys:
        set_value(tree, key, value_of(holder, key))
    tree["run"]["model"]["start"] = _start_of(origin, revision_of(record.round, record.state_digest))
    try:
        run = RunConfig.model_validate(tree["run"])
    except ValidationError as exc:
        reason = exc.errors()[0]["msg"].removeprefix("Value error, ")
        raise ConfigError(f"Your settings do not fit those of the publication: {reason}.") from exc
    _check(run, before, publication)
    return run


def _start_of(origin: FoundFrom, revision: str) -> str:
    """The name of the publication, without folders of this machine."""
    address = parse_publish_address(origin.address, may_have_revision=True)
    return revision if address.kind == "folder" else f"{str(address).partition('@')[0]}@{revision}"


def _check(run: RunConfig, before: RunConfig, publication: Publication) -> None:
    changed = [
        f"run.model.{name}"
        for name in ModelConfig.model_fields
        if name != "start" and getattr(run.model, name) != getattr(before.model, name)
    ]
    if changed:
        raise ConfigError(f"The publication has another model than {', '.join(changed)} says: leave that out.")
    moments = publication.state.moments
    if optimizer_of(run.outer).moments != moments:
        raise ConfigError(
            f"The publication has {moments} moments of its outer optimizer {before.outer.optimizer}, which "
            f"run.outer.optimizer {run.outer.optimizer} cannot continue: choose {before.outer.optimizer}."
        )
    amendments = publication.state.amendments
    tokens = publication.state.tokens - publication.manifest.rewound_tokens - rewound_tokens(amendments)
    if tokens >= run.total_tokens:
        raise ConfigError(
            f"The run of the publication is complete, with {tokens:,} of {run.total_tokens:,} tokens: set "
            "--run.total_tokens to a larger number."
        )
