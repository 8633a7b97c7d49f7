from __future__ import annotations

import asyncio
import json
import logging
import re

import pytest

from pdserve.logs import TextFormatter, ThrottledLog, configure_logs, served_request

pytestmark = pytest.mark.usefixtures("logs_as_before")


def test_a_json_line_has_the_process_fields_and_the_records_own(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("json", "info", node="n7")
    logger = logging.getLogger("pdserve.x")
    logger.debug("not this")
    logger.info("took %d pages\nin two lines", 5, extra={"pages": 5, "path": {1}})
    try:
        raise ValueError("broken")
    except ValueError:
        logger.exception("failed")
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first.pop("time"))
    assert first == {
        "level": "info",
        "logger": "pdserve.x",
        "message": "took 5 pages\nin two lines",
        "node": "n7",
        "pages": 5,
        "path": [1],
    }
    assert second["level"] == "error"
    assert second["exception"].endswith("ValueError: broken")


def test_a_line_for_people_ends_with_what_the_record_brought_along(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure_logs("text", "warning", node="n7")
    logging.getLogger("pdserve.x").info("not this")
    logging.getLogger("pdserve.x").warning("late", extra={"seconds": 2})
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith(" WARNING late seconds=2")


@pytest.mark.parametrize("form", ["text", "json"])
def test_lines_have_the_id_of_the_request_that_is_served(
    form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async def serve(name: bytes) -> None:
        served_request.set(name)
        await asyncio.sleep(0)
        logging.getLogger("pdserve.x").warning("late")

    async def main() -> None:
        await asyncio.gather(serve(b"r-1"), serve(b"r-2"))
        logging.getLogger("pdserve.x").warning("idle")

    configure_logs(form, "warning", text_format="%(name)s: %(message)s")  # type: ignore[arg-type]
    asyncio.run(main())
    lines = capsys.readouterr().err.splitlines()
    if form == "json":
        assert [json.loads(line).get("request") for line in lines] == ["r-1", "r-2", None]
    else:
        assert lines == ["pdserve.x: late request=r-1", "pdserve.x: late request=r-2", "pdserve.x: idle"]


def test_a_throttled_log_writes_so_many_lines_an_interval_and_says_how_many_it_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = ThrottledLog(logging.getLogger("throttled"), interval_s=1.0, most=2)
    for now_s in (0.0, 0.1, 0.2, 0.9, 1.0, 1.1, 1.2, 5.0):
        log.warning("key", "said %s", now_s, now_s=now_s)
    log.log(logging.ERROR, "other", "too", now_s=1.2)
    said = [
        "said 0.0",
        "said 0.1",
        "said 1.0 (2 more like it)",
        "said 1.1",
        "said 5.0 (1 more like it)",
        "too",
    ]
    assert [record.getMessage() for record in caplog.records] == said


def test_text_of_strangers_writes_no_line_of_its_own_and_turns_no_colour_on() -> None:
    record = logging.makeLogRecord(
        {"msg": "who: %s", "args": ("x\n2026 ERROR \x1b[31mlies\u202e",), "levelname": "INFO", "name": "n\r"}
    )
    line = TextFormatter("%(levelname)s %(message)s").format(record)
    assert line == "INFO who: x\\n2026 ERROR \\x1b[31mlies\\u202e"
