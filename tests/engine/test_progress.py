"""What a worker says while it starts."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

from pdserve.engine.progress import NO_NEWS, START, leave_out_no_news, show_start


@pytest.fixture
def written(logs_as_before: None) -> Iterator[io.StringIO]:
    """What this process logs at the level of warnings, as SGLang configures it."""
    text = io.StringIO()
    logging.basicConfig(level="WARNING", stream=text, force=True)
    yield text
    for name in NO_NEWS:
        logging.getLogger(name).filters.clear()


def test_the_steps_of_a_start_are_shown_whatever_level_sglang_sets(written: io.StringIO) -> None:
    show_start()
    START.info("warming up")
    logging.getLogger("pdserve.engine.launch").info("details")
    assert written.getvalue() == "INFO:pdserve.start:warming up\n"


@pytest.mark.parametrize("level", ["WARNING", "DEBUG"])
def test_sglangs_warnings_of_no_use_are_for_the_debug_level(written: io.StringIO, level: str) -> None:
    leave_out_no_news()
    logging.root.setLevel(level)
    for name, beginnings in NO_NEWS.items():
        for beginning in beginnings:
            logging.getLogger(name).warning("%s, since it is so", beginning)
        logging.getLogger(name).warning("something else of %s", name)
    assert written.getvalue().count("since it is so") == (len(NO_NEWS) if level == "DEBUG" else 0)
    assert written.getvalue().count("something else") == len(NO_NEWS)


def test_the_warnings_that_are_left_out_are_sglangs() -> None:
    """A next release may word them otherwise."""
    import importlib.util
    from pathlib import Path

    for name, beginnings in NO_NEWS.items():
        spec = importlib.util.find_spec(name.split(".")[0])
        assert spec is not None
        assert spec.origin is not None
        source = Path(spec.origin).parent.joinpath(*name.split(".")[1:]).with_suffix(".py").read_text()
        assert all(beginning in source for beginning in beginnings), name
