"""Log lines for people or for machines; both name the object that they are about."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime

PLAIN = "%(asctime)s %(levelname)s %(name)s %(message)s"


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, and `object` where the line is about one."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        about = getattr(record, "object", None)
        if isinstance(about, str):
            entry["object"] = about
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)


class Named(logging.LoggerAdapter[logging.Logger]):
    """Logs about one object: its name leads a plain line and is a field of its own for machines."""

    def __init__(self, logger: logging.Logger, name: str) -> None:
        super().__init__(logger, {"object": f"InferenceService/{name}"})
        self._name = name

    def process(self, msg: object, kwargs: object) -> tuple[object, object]:  # type: ignore[override]
        """Put the name in."""
        return f"{self._name}: {msg}", {**kwargs, "extra": self.extra}  # type: ignore[dict-item]


def configure(level: str, style: str) -> None:
    """Set the root logger up: `style` is plain or json."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if style == "json" else logging.Formatter(PLAIN))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    if level != "debug":
        logging.getLogger("kopf.objects").setLevel(logging.WARNING)  # a line for every event of every object
        logging.getLogger("kopf._core.reactor.running").setLevel(logging.ERROR)  # warns of the thread that it is given
