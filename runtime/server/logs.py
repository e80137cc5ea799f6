"""What the server writes on stderr: lines of text or of JSON, among them one for each response (the access log)."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, TextIO

from qcompile.errors import UsageError
from qcompile.runtime.server.exchanges import POLLED, Exchange, Sink

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")
_OURS = "qcompile.server"
_LOGGERS = (_OURS, "uvicorn", "opentelemetry")
_MOST_SHOWN = 256
"""Most characters of a path or an id of the client's in a line."""


def configure(level: str = "warning", form: str = "text", stream: TextIO | None = None) -> None:
    """Write messages of at least this level to a stream, by default stderr. Raises UsageError for unknown names."""
    for option, given, known in (("--log-level", level, LEVELS), ("--log-format", form, FORMATS)):
        if given not in known:
            raise UsageError(f"{option} {given}: take one of {', '.join(known)}")
    handler = logging.StreamHandler(stream) if stream else _StderrHandler()
    handler.setFormatter(_JsonLines() if form == "json" else _TextLines())
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level.upper())
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, logging.getLogger(_OURS).level))


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to what stderr is at the time of the message: loggers outlive a command, and its stderr may be closed."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def sinks() -> list[Sink]:
    """What takes the records of requests for the access log; none if its level is not written."""
    return [log_exchange] if logging.getLogger(_OURS).isEnabledFor(logging.INFO) else []


def tell(text: str) -> None:
    """Write a line about the server that is of interest at any level."""
    logger = logging.getLogger(_OURS)
    logger.handle(logger.makeRecord(_OURS, logging.INFO, "", 0, text, (), None))


def log_exchange(exchange: Exchange) -> None:
    """Write a line about a response."""
    level = logging.DEBUG if exchange.path in POLLED else logging.INFO
    logger = logging.getLogger(_OURS)
    if not logger.isEnabledFor(level):
        return
    seconds = exchange.ended - exchange.started
    fields: dict[str, Any] = {
        "client": exchange.client,
        "method": exchange.method,
        "path": exchange.path[:_MOST_SHOWN],
        "status": exchange.status,
        "seconds": round(seconds, 6),
    }
    if exchange.outputs:
        fields |= {"prompt_tokens": exchange.prompt_tokens, "completion_tokens": exchange.generated_tokens}
    if not exchange.whole:
        fields["incomplete"] = True
    if asked := exchange.header("x-request-id"):
        fields["request_id"] = asked[:_MOST_SHOWN]
    logger.log(level, _sentence(fields), extra={"fields": fields})


def _sentence(fields: dict[str, Any]) -> str:
    """The line about a response as text. What the client chose is quoted: it may contain line ends."""
    asked = json.dumps(f"{fields['method']} {fields['path']}")
    line = f"{fields['client'] or '-'} {asked} {fields['status']} {fields['seconds']:.3f} s"
    if "prompt_tokens" in fields:
        line += f", {fields['prompt_tokens']} + {fields['completion_tokens']} tokens"
    if "incomplete" in fields:
        line += ", not sent to its end"
    if "request_id" in fields:
        line += f", id {json.dumps(fields['request_id'])}"
    return line


def _time(record: logging.LogRecord) -> str:
    """When something was logged, in UTC."""
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class _TextLines(logging.Formatter):
    """`2026-01-31T12:00:00.000Z info 127.0.0.1 "GET /v1/models" 200 0.001 s`, and tracebacks below."""

    def format(self, record: logging.LogRecord) -> str:
        line = f"{_time(record)} {record.levelname.lower()} {record.getMessage()}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class _JsonLines(logging.Formatter):
    """One JSON object a line: time, level, logger, message, the fields of a response, and the traceback of an error."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)
