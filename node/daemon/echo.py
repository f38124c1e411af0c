"""A worker's log record, given to this process' loggers, with its own time and round. Knows logging only."""

from __future__ import annotations

import logging
from datetime import datetime

from node.link import LogTold

logger = logging.getLogger(__name__)


def log_again(told: LogTold) -> None:
    """Give a worker's log record to this process' loggers, with its own time and round."""
    level = logging.getLevelNamesMapping().get(told.level.upper(), logging.INFO)
    source = logging.getLogger(told.logger)
    if not source.isEnabledFor(level):
        return
    extra = {"round": told.round}
    record = source.makeRecord(told.logger, level, "(worker)", 0, "%s", (told.message,), None, extra=extra)
    try:
        record.created = datetime.fromisoformat(told.at).timestamp()
    except ValueError:
        logger.debug("The worker's log record has no proper time: %r", told.at)
    source.handle(record)
