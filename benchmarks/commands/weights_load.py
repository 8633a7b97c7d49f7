"""`python -m benchmarks weights-load`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.commands import options
from benchmarks.commands.load_options import check_model
from benchmarks.commands.output import Output, say, workplace

if TYPE_CHECKING:
    from rich.table import Table

    from benchmarks.pool.weights_load.measure import Limits, LoadFigures


def weights_load(
    model: Annotated[
        Path, typer.Option(help="Model directory; `pdserve model demo --size medium` makes one of 1 GB.")
    ],
    sources: Annotated[
        str,
        typer.Option(
            help="Where weights come from: disk, cached, memory, tcp, nodes, ssd, object; commas between."
        ),
    ] = "disk,cached,memory,tcp,nodes,ssd,object",
    rounds: Annotated[int, typer.Option(min=1, help="Loads from each source; results are medians.")] = 5,
    capacity: options.NodeCapacity = "3GiB",
    directory: Annotated[
        Path | None, typer.Option(help="Directory for the SSD tier, on the disk to measure; none: temporary.")
    ] = None,
    object_url: Annotated[
        str,
        typer.Option(help="Bucket and prefix of the object store; none: a local directory."),
    ] = "",
    as_json: options.AsJson = False,
) -> None:
    """Time until a model's weights are loaded: from disk by SGLang's own loaders, and from the pool.

    Each load is a process of its own, which copies every tensor into memory as a model's parameters are. The
    page cache is emptied of the model's files before a load from disk.
    """
    from benchmarks.pool.weights_load.measure import SOURCES, measure

    check_model(model)
    chosen = options.choices("sources", sources, SOURCES)
    output = Output(as_json, load=f"weights of {model.name}")
    with workplace(directory) as place:
        figures, limits = measure(model, chosen, rounds, capacity, place, say, object_url)
    for row in figures:
        output.row(row)
    output.row(limits)
    output.show(*_shown(figures, limits))


def _shown(figures: list[LoadFigures], limits: Limits) -> list[Table | str]:
    from benchmarks.tables import table

    plain = next((one.seconds for one in figures if (one.source, one.loader) == ("disk", "auto")), None)
    rows = [
        (
            *(one.source, one.loader, f"{one.seconds:.2f}", f"{one.first_s:.3f}", f"{one.gbps:.2f}"),
            *(
                f"{one.gbps / limit:.2f}"
                for limit in (
                    limits.memcpy_gbps,
                    limits.memcpy_fresh_gbps,
                    one.disk_gbps or limits.disk_gbps,
                )
            ),
            f"{plain / one.seconds:.1f}" if plain else "-",
        )
        for one in figures
    ]
    columns = (
        *("source", "loader", "s", "first tensor s", "GB/s"),
        *("of memcpy", "of memcpy, fresh", "of disk", "x disk, auto"),
    )
    size = f"{figures[0].size_bytes / 1e9:.2f} GB" if figures else ""
    said = (
        f"memcpy {limits.memcpy_gbps:.2f} GB/s, into fresh memory {limits.memcpy_fresh_gbps:.2f} GB/s; "
        f"direct reads of the disk {limits.disk_gbps:.2f} GB/s"
    )
    return [table(f"Loading {size} of weights", columns, rows), said]
