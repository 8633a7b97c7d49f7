"""`python -m benchmarks gpu-check`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.commands import load_options as options
from benchmarks.commands.output import say, workplace


def gpu_check(
    out: Annotated[
        Path, typer.Option(help="Directory for report.md, report.jsonl, logs and configuration.")
    ] = Path("logs/gpu-check"),
    model: Annotated[Path, typer.Option(help="Model directory: pdserve model demo makes one.")] = Path(
        options.DEMO_MODEL
    ),
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="A group of checks: machine, sglang, tensors, transports, serving, gaps. Repeat it."
        ),
    ] = None,
    on_cpu: Annotated[
        bool, typer.Option(help="Let the CPU stand for the GPU: a trial of the check itself.")
    ] = False,
) -> None:
    """Check a machine with a GPU in a quarter of an hour at most, without a network.

    Without a GPU its checks are skipped. Fails when any check did.
    """
    import tempfile

    from benchmarks.gpu_check.checks import Group, chosen, is_good
    from benchmarks.gpu_check.place import Place
    from benchmarks.gpu_check.report import json_lines, markdown
    from benchmarks.gpu_check.run import run_check
    from benchmarks.node_processes import memory_dir
    from benchmarks.origin import in_words, provenance
    from pdserve.engine.device import choose_device
    from pdserve.errors import ConfigError

    try:
        groups = chosen(only or ())
    except ValueError as error:
        raise ConfigError(f"--only: {error}") from None
    device = choose_device("cpu" if on_cpu else "auto")
    checks_all = on_cpu or device == "cuda"
    if checks_all and any(group.name in ("serving", "gaps") for group in groups):
        options.check_model(model)
    origin = provenance()
    say(in_words(origin))
    with workplace(out), tempfile.TemporaryDirectory(dir=memory_dir()) as memory:

        def place_of(group: Group) -> Place:
            return Place(
                group=group.name,
                directory=str(out.resolve()),
                memory=memory,
                model=str(model.resolve()),
                device=device,
                checks_all=checks_all,
            )

        results = run_check(
            groups, place_of, lambda one: say(f"{one.outcome:8}{one.check} ({one.seconds:.0f} s): {one.says}")
        )
        (out / "report.md").write_text(markdown(origin, results))
        (out / "report.jsonl").write_bytes(json_lines(origin, results))
    say(f"the report is {out / 'report.md'}")
    if not is_good(results):
        raise typer.Exit(1)
