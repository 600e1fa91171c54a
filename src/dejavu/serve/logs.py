"""Logs as one JSON object a line, on stderr, without what people wrote."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

from dejavu.errors import InputError

_PLAIN = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message"}


class JsonLines(logging.Formatter):
    """time, level, event, then whatever `extra` holds."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
        }
        entry |= {k: v for k, v in vars(record).items() if k not in _PLAIN}
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False, default=str)


def log_to_stderr(level: str) -> None:
    """Send this package's and uvicorn's logs there, from `level` on.

    Raises InputError for a level that `logging` does not know.
    """
    known = logging.getLevelNamesMapping()
    if level.upper() not in known:
        names = ", ".join(name.lower() for name in known if name not in ("NOTSET", "WARN", "FATAL"))
        raise InputError(f"unknown --log-level {level!r}; known are {names}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    for name in ("dejavu.serve", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level.upper())
