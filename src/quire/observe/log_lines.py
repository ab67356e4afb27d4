"""Lines on standard error: text, or with --log-format json one JSON object each. No line holds a prompt or an answer.

{"time": "2026-11-30T03:04:05.678Z", "level": "info", "process": "http", "message": "...", ...}

`process`: http, http 1, ..., core, router. Knows nothing of what is logged.
"""

import logging
from datetime import UTC, datetime

import msgspec

JSON = "json"


def json_line(message: str, level: str, process: str, **fields: object) -> str:
    """Return a line of the log. fields: further ones, behind the first three"""
    now = datetime.now(UTC).isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"
    line = {"time": now, "level": level, "process": process, **fields, "message": message}
    return msgspec.json.encode(line).decode()


def notice(message: str, level: str, log_format: str) -> str:
    """Return a line for the user. level: note, warning or error"""
    if log_format == JSON:
        return json_line(message, "info" if level == "note" else level, "http")
    return f"quire: {level}: {message}"


def lost_lines(number: int, log_format: str) -> str:
    """Return the line about lines that were dropped, in their place."""
    what = "1 line of the log is" if number == 1 else f"{number} lines of the log are"
    return notice(f"{what} lost: standard error was not read, or could not be written.", "warning", log_format)


class JsonFormatter(logging.Formatter):
    """Formats the records of Python's loggers in a process of this name. A call with `extra={"fields": {...}}` adds
    fields to its line."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Override a method of `logging.Formatter`."""
        fault = {"exception": self.formatException(record.exc_info)} if record.exc_info else {}
        fields = {**record.__dict__.get("fields", {}), **fault}
        return json_line(record.getMessage(), record.levelname.lower(), self._process, **fields)


class NoticeFormatter(logging.Formatter):
    """Formats the records of Python's loggers as notices for the user."""

    def format(self, record: logging.LogRecord) -> str:
        """Override a method of `logging.Formatter`."""
        level = record.levelname.lower()
        return notice(super().format(record), "note" if level == "info" else level, "text")


PLAIN = logging.Formatter()


def set_up_logging(log_format: str, process: str, text: logging.Formatter = PLAIN) -> None:
    """Send warnings of all loggers to standard error. text: formatter of their lines if they are text"""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter(process) if log_format == JSON else text)
    logging.basicConfig(handlers=[handler])
