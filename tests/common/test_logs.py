"""Structured logs: who wrote a line, in which iteration, and the error that ended a run."""

import io
import json
import logging
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from g2rpo_ray.common import logs
from g2rpo_ray.common.logs import log_as, log_context, log_file, logged

logger = logging.getLogger("g2rpo_ray.test")


@pytest.fixture(autouse=True)
def _own_record_factory() -> Iterator[None]:
    factory = logging.getLogRecordFactory()
    yield
    logging.setLogRecordFactory(factory)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_says_who_wrote_it_and_in_which_iteration(tmp_path: Path) -> None:
    log_as("rollout", 3)
    with log_file(tmp_path / "log.jsonl"):
        with log_context(iteration=7), log_context(prompt_id=41):
            logger.info("drew %d pictures", 12, extra={"evaluations": 96})
        logger.info("idle")
    inside, outside = lines(tmp_path / "log.jsonl")
    assert inside["message"] == "drew 12 pictures"
    expected = {"role": "rollout", "rank": 3, "iteration": 7, "prompt_id": 41, "evaluations": 96}
    assert inside.items() >= expected.items()
    assert "iteration" not in outside


def test_a_library_warning_is_labelled_and_its_chatter_left_out(tmp_path: Path) -> None:
    log_as("learner", 1)
    with log_file(tmp_path / "log.jsonl"):
        logging.getLogger("some.library").info("chatter")
        logging.getLogger("some.library").warning("deprecated")
    (line,) = lines(tmp_path / "log.jsonl")
    assert (line["message"], line["role"], line["rank"]) == ("deprecated", "learner", 1)


def test_a_phase_says_that_it_goes_on_and_how_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_as("learner", 1)
    monkeypatch.setattr(logs, "HEARTBEAT_S", 0.05)
    path, give_up_s = tmp_path / "log.jsonl", time.monotonic() + 300
    with log_file(path):
        with log_context(iteration=7), logged("update"):
            while not path.read_text() and time.monotonic() < give_up_s:
                time.sleep(0.01)
        with pytest.raises(ValueError, match="broken"), logged("gather"):
            raise ValueError("broken")
    beat, *more, done, failed = lines(path)
    for line in (beat, *more, done):
        assert (line["role"], line["rank"], line["iteration"]) == ("learner", 1, 7)
    assert re.fullmatch(r"update: goes on for \d+ s", beat["message"])
    assert re.fullmatch(r"update: done after \d+\.\d\d s", done["message"])
    assert re.fullmatch(r"gather: failed after \d+\.\d\d s", failed["message"])
    assert failed["levelname"] == "ERROR"
    assert 'raise ValueError("broken")' in failed["exc_text"]


def test_the_error_that_ends_a_run_is_the_last_line(tmp_path: Path) -> None:
    log_as("driver")
    with pytest.raises(ValueError, match="broken"), log_file(tmp_path / "log.jsonl"):
        raise ValueError("broken at 9")
    (line,) = lines(tmp_path / "log.jsonl")
    assert line["levelname"] == "ERROR"
    assert line["message"] == "ValueError: broken at 9"
    assert "Traceback" in line["exc_text"]


def test_a_resumed_run_goes_on_in_the_same_file(tmp_path: Path) -> None:
    log_as("driver")
    before = list(logging.getLogger().handlers)
    for life in (1, 2):
        with log_file(tmp_path / "log.jsonl"):
            logger.info("life %d", life)
    assert [line["message"] for line in lines(tmp_path / "log.jsonl")] == ["life 1", "life 2"]
    assert logging.getLogger().handlers == before


def test_a_handler_that_a_library_set_up_does_not_show_the_file_on_the_terminal(
    tmp_path: Path,
) -> None:
    root, printed = logging.getLogger(), io.StringIO()
    root.addHandler(logging.StreamHandler(printed))  # as logging.info() does in open_clip
    with pytest.raises(ValueError, match="bad"), log_file(tmp_path / "log.jsonl"):
        raise ValueError("bad")
    assert printed.getvalue() == ""
    assert "bad" in (tmp_path / "log.jsonl").read_text()
