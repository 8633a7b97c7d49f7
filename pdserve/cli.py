"""The `pdserve` command: finds the sub-command's module, and only then imports it.

A sub-command is a Typer app named by an import string, so `pdserve --help` needs neither torch nor SGLang.
Every `PdserveError` ends here as one line on stderr and an exit status: 2 for a configuration that cannot be
used, else 1.
"""

from __future__ import annotations

import importlib
import io
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Final, NamedTuple, NoReturn

import typer

from pdserve import __version__
from pdserve.errors import ConfigError, PdserveError
from pdserve.extras import how_to_install, is_installed
from pdserve.security.log_text import printable


class SubCommand(NamedTuple):
    """Where a sub-command lives (`module:attribute`, a `typer.Typer`), what it does, and the extra of
    pyproject.toml that it does not run without.
    """

    target: str
    help: str
    extra: str = ""


SUB_COMMANDS: Mapping[str, SubCommand] = {
    "up": SubCommand("pdserve.up.cli:app", "Start and supervise a whole cluster from one TOML file."),
    "router": SubCommand("pdserve.router.cli:command", "Run the router: OpenAI's API before the workers."),
    "key": SubCommand("pdserve.router.tenants.api_keys:app", "Make an API key of a tenant."),
    "prefill": SubCommand("pdserve.workers:prefill", "Run a prefill worker.", "sglang"),
    "decode": SubCommand("pdserve.workers:decode", "Run a decode worker.", "sglang"),
    "agg": SubCommand("pdserve.workers:agg", "Run an aggregated worker: both roles in one.", "sglang"),
    "elastic": SubCommand(
        "pdserve.workers:elastic",
        "Run an elastic worker: prefill or decode, request by request.",
        "sglang",
    ),
    "dynamo": SubCommand(
        "pdserve.integrations.dynamo.cli:app", "Run a worker of NVIDIA Dynamo with its pages in the pool."
    ),
    "pool": SubCommand("pdserve.kvpool.admin.cli:app", "Run a pool node, or ask one how it is."),
    "weights": SubCommand("pdserve.kvpool.weights.cli:app", "Store models' weights in the pool."),
    "top": SubCommand("pdserve.router.admin.top_cli:app", "Show what a cluster does, in the terminal."),
    "doctor": SubCommand("pdserve.doctor.cli:app", "Check this machine or a cluster; say what to change."),
}

TWO_WORDS: Final[Mapping[tuple[str, ...], str]] = {
    ("pool", "serve"): "pdserve.kvpool.node.cli:command",
    ("up", "scale"): "pdserve.up.cli:scale_app",
    ("up", "restart"): "pdserve.up.cli:restart_app",
    ("up", "status"): "pdserve.up.cli:status_app",
}
"""Sub-commands that are loaded by their first two words: a pool node starts faster without the rest of
`pool`, and `up` takes a file in the second word's place.
"""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run `pdserve` with these arguments (the process's own by default) and exit."""
    escape_what_the_terminal_lacks()
    words = list(sys.argv[1:] if arguments is None else arguments)
    name = words[0] if words else ""
    try:
        if target := TWO_WORDS.get(tuple(words[:2])):
            _run(load(target), words[2:], f"pdserve {' '.join(words[:2])}")
        if name in SUB_COMMANDS:
            _run(load(SUB_COMMANDS[name].target), words[1:], f"pdserve {name}")
        _run(_overview(), words or ["--help"], "pdserve")
    except PdserveError as error:
        lines = f"pdserve {name}: error: {error}".split("\n")  # of a log, where a process did not start
        print("\n".join(map(printable, lines)), file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except ModuleNotFoundError as error:
        extra = SUB_COMMANDS[name].extra if name in SUB_COMMANDS else ""
        if not extra or is_installed(extra):
            raise
        print(f"pdserve {name}: error: {error}: {how_to_install(extra)}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def escape_what_the_terminal_lacks() -> None:
    """Have standard output show letters that its encoding lacks as escapes, as standard error does."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def load(target: str) -> typer.Typer:
    """The Typer app that an import string names."""
    module_name, _, attribute = target.partition(":")
    found = getattr(importlib.import_module(module_name), attribute)
    if not isinstance(found, typer.Typer):
        raise TypeError(f"{target} is not a typer.Typer but {type(found).__name__}")
    return found


def _run(app: typer.Typer, words: Sequence[str], program: str) -> NoReturn:
    typer.main.get_command(app)(args=list(words), prog_name=program)
    sys.exit(0)


def _overview() -> typer.Typer:
    """The app behind `pdserve --help`, `--version` and mistyped commands: it names the sub-commands, no
    more.
    """
    app = typer.Typer(
        add_completion=False,
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        help="Many SGLang workers, one distributed KV cache. `pdserve COMMAND --help` tells more of each.",
    )

    @app.callback(invoke_without_command=True)
    def overview(
        version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    ) -> None:
        if version:
            typer.echo(f"pdserve {__version__}")
            raise typer.Exit

    for name, sub in SUB_COMMANDS.items():
        app.command(name, help=sub.help)(_never)
    return app


def _never() -> None:
    raise AssertionError("main runs a known sub-command itself")
