"""SGLang's child processes outlive a signal to the whole group: the parent decides when they end."""

from __future__ import annotations

import logging
import subprocess
import sys
import traceback

import pytest

from pdserve.errors import StartupError

ASKED = """
import signal, sys
from types import ModuleType

def say(*args, **kwargs):
    print(args, kwargs, *(signal.getsignal(n) is signal.SIG_IGN for n in (signal.SIGTERM, signal.SIGINT)))

for package in ("sglang", "sglang.srt", "sglang.srt.managers", "sglang.srt.entrypoints"):
    sys.modules[package] = ModuleType(package)
controller = ModuleType("sglang.srt.managers.data_parallel_controller")
server_args = ModuleType("sglang.srt.server_args")
controller.run_data_parallel_controller_process = say
controller.bind_port = server_args.get_free_port_below_ephemeral = None  # nobody chooses a port here
engine = ModuleType("sglang.srt.entrypoints.engine")
engine.run_data_parallel_controller_process = say
sys.modules[controller.__name__] = controller
sys.modules[server_args.__name__] = server_args
sys.modules["sglang.srt.entrypoints"].engine = sys.modules[engine.__name__] = engine

from pdserve.engine.sglang import prepare
from pdserve.engine.sglang.children import entry
prepare.after_sglang = lambda: None  # it needs more of SGLang than there is here
entry.install()
engine.run_data_parallel_controller_process(1, pipe_writer=2)
"""


def test_the_data_parallel_controller_does_not_end_by_a_signal_to_the_group() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ASKED], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.strip() == "(1,) {'pipe_writer': 2} True True", done.stderr


@pytest.mark.parametrize(
    "name",
    [
        "run_scheduler_process",
        "run_scheduler_process_with_init_pipe",
        "run_data_parallel_controller_process",
    ],
)
def test_a_function_that_sglang_spawns_is_found_by_its_name(name: str) -> None:
    """A spawned process imports its target by module and name."""
    from pdserve.engine.sglang.children import entry

    found = getattr(entry, name)
    assert (found.__module__, found.__qualname__) == (entry.__name__, name)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (StartupError("pages never fit: set page_bytes"), "pages never fit: set page_bytes"),
        (ValueError("x"), ""),
    ],
)
def test_what_is_the_users_to_mend_is_one_line_and_a_bug_keeps_its_traceback(
    error: Exception, said: str
) -> None:
    from pdserve.engine.sglang.children import entry

    trace = "Traceback:\n" + "".join(traceback.format_exception(error))
    raised = logging.LogRecord(
        "s", logging.ERROR, "", 0, "attaching failed", None, (type(error), error, None)
    )
    caught = logging.LogRecord("s", logging.ERROR, "", 0, f"Scheduler hit an exception: {trace}", None, None)
    assert entry._without_traceback(raised)
    assert entry._without_traceback(caught)
    assert (raised.exc_info is None) == bool(said)
    assert (caught.getMessage() == said) == bool(said)
