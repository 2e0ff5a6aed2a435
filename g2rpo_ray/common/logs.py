"""Structured logs: every line says which role and rank wrote it, in which iteration, on what.

Roles write JSON lines into their Ray worker's log, the driver into ``<run_dir>/log.jsonl``; both
have the keys ``asctime``, ``levelname``, ``message``, ``role``, ``rank`` and whatever was given to
``log_context``. Only ``logging`` of the standard library is used to write a line.
"""

import json
import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar, copy_context
from pathlib import Path
from typing import Any

from g2rpo_ray.common.files import disk_fault
from g2rpo_ray.common.secrets import redacted

logger = logging.getLogger(__name__)

HEARTBEAT_S = 30.0
_fields: ContextVar[dict[str, Any]] = ContextVar("log_fields", default={})  # noqa: B039
_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime"}


def log_as(role: str, rank: int | str = 0) -> None:
    """Name this process: all of its records, those of libraries included, carry role and rank.

    This package's information is logged, and the warnings of everything else.
    """
    record_of = logging.LogRecord

    def named_record(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = record_of(*args, **kwargs)
        record.__dict__.update({"role": role, "rank": rank} | _fields.get())
        return record

    logging.setLogRecordFactory(named_record)
    logging.getLogger().setLevel(logging.WARNING)
    logging.getLogger("g2rpo_ray").setLevel(logging.INFO)


@contextmanager
def log_context(**fields: Any) -> Iterator[None]:
    """Records made inside carry these fields, such as ``iteration`` and ``prompt_id``."""
    token = _fields.set(_fields.get() | fields)
    try:
        yield
    finally:
        _fields.reset(token)


@contextmanager
def logged(phase: str) -> Iterator[None]:
    """A line when a phase ends, with the traceback where it failed, and one every
    ``HEARTBEAT_S`` while it goes on."""
    started_s, ended = time.monotonic(), threading.Event()

    def beat() -> None:
        while not ended.wait(HEARTBEAT_S):
            logger.info("%s: goes on for %.0f s", phase, time.monotonic() - started_s)

    # In this thread's context: its lines carry the same fields.
    watcher = threading.Thread(target=copy_context().run, args=(beat,), daemon=True)
    watcher.start()
    failed = True
    try:
        yield
        failed = False
    finally:
        ended.set()
        watcher.join()
        level, how = (logging.ERROR, "failed") if failed else (logging.INFO, "done")
        seconds = time.monotonic() - started_s
        logger.log(level, "%s: %s after %.2f s", phase, how, seconds, exc_info=failed)


@contextmanager
def log_file(path: Path) -> Iterator[None]:
    """Append what this process logs to ``path``, the error that ends it included."""
    handler = _LogFile(path, encoding="utf-8")
    handler.setFormatter(JsonFormatter())
    # On the root: what libraries warn of belongs in the file, too.
    root = logging.getLogger()
    for other in [h for h in root.handlers if type(h) is logging.StreamHandler]:
        # Set up by a library's logging.info(): the terminal would show all that the file gets.
        root.removeHandler(other)
    root.addHandler(handler)
    try:
        yield
    except BaseException as error:
        logging.getLogger(__name__).error("%s: %s", type(error).__name__, error, exc_info=True)
        raise
    finally:
        root.removeHandler(handler)
        with suppress(OSError):
            handler.close()


class _LogFile(logging.FileHandler):
    """Leaves out what a full disk does not take: a traceback for each line would bury the rest."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  (logging's name)
        if disk_fault(sys.exception()) is None:
            super().handleError(record)


class JsonFormatter(logging.Formatter):
    """One JSON object a line, with the keys of Ray's own JSON logs."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "asctime": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(record.created)),
            "levelname": record.levelname,
            "message": redacted(record.getMessage()),
            "filename": record.filename,
            "lineno": record.lineno,
            "process": record.process,
        }
        line |= {k: v for k, v in record.__dict__.items() if k not in _STANDARD}
        if record.exc_info:
            line["exc_text"] = redacted(self.formatException(record.exc_info))
        return json.dumps(line, default=str, ensure_ascii=False)
