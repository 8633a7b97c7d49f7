"""The load that the commands for serving have in common: as options, and as what they mean."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import typer

from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from benchmarks.serving.contenders import Setting
    from benchmarks.serving.load.plan import Load, Shape
    from benchmarks.serving.load.words import Api

APIS: Final[tuple[Api, ...]] = ("completions", "chat")
DEMO_MODEL: Final = "models/demo-small"

Preset: TypeAlias = Annotated[
    str, typer.Option(help="A load by name: eic, long-input-short-output, shared-prefix, no-reuse.")
]
Scale: TypeAlias = Annotated[
    float, typer.Option(min=1e-6, help="Factor of all lengths of the preset or trace.")
]
Users: TypeAlias = Annotated[
    int | None,
    typer.Option(
        min=1, help="Number of conversations. This and the next options replace values of the preset."
    ),
]
Rounds: TypeAlias = Annotated[int | None, typer.Option(min=1, help="Turns of each conversation.")]
System: TypeAlias = Annotated[int | None, typer.Option(min=0, help="Tokens of the common system prompt.")]
History: TypeAlias = Annotated[
    int | None, typer.Option(min=0, help="Tokens of history that a user's first turn adds.")
]
New: TypeAlias = Annotated[int | None, typer.Option(min=1, help="New tokens of every turn.")]
Output: TypeAlias = Annotated[int | None, typer.Option(min=1, help="Tokens of every answer.")]
Spread: TypeAlias = Annotated[
    float | None, typer.Option(min=0, max=0.99, help="Variation of lengths: 0.5 is ± 50 %.")
]
Seed: TypeAlias = Annotated[int, typer.Option(min=0, help="Seed of lengths, texts and arrivals.")]
Concurrency: TypeAlias = Annotated[
    int, typer.Option(min=0, help="Closed loop: requests at the same time; 0: one for each user.")
]
Rate: TypeAlias = Annotated[
    float | None, typer.Option(min=1e-6, help="Open loop: requests per second. Default: closed loop.")
]
Trace: TypeAlias = Annotated[
    Path | None, typer.Option(help="Replay this trace instead of a preset: JSON lines in Mooncake's format.")
]
Requests: TypeAlias = Annotated[int, typer.Option(min=1, help="Number of requests of the trace.")]
Speed: TypeAlias = Annotated[float, typer.Option(min=1e-6, help="Factor of the trace's speed.")]
MaxTokens: TypeAlias = Annotated[
    int, typer.Option(min=0, help="Leave out longer requests of the trace; 0: leave out none.")
]
TheApi: TypeAlias = Annotated[
    str,
    typer.Option(
        "--api", help="completions: prompts of token ids, with exact lengths; chat: messages of words."
    ),
]
ModelName: TypeAlias = Annotated[
    str, typer.Option("--model", help="Model to request; empty: the first one that the server lists.")
]
ApiKey: TypeAlias = Annotated[
    str, typer.Option(envvar="OPENAI_API_KEY", help="API key, sent as a bearer token.")
]
DeviceTokens: TypeAlias = Annotated[
    int, typer.Option(min=1, help="Tokens in the device KV cache of each started worker.")
]
Minutes: TypeAlias = Annotated[
    float, typer.Option(min=0, help="Time limit: a part that would end later is not started; 0: no limit.")
]
Silence: TypeAlias = Annotated[float, typer.Option(min=0.1, help="Longest silence of a server, in seconds.")]


def shape_of(preset: str, scale: float, given: dict[str, Any]) -> Shape:
    """A preset, scaled, with what was given in place of its own (not scaled). Raises ConfigError."""
    from msgspec.structs import replace

    from benchmarks.serving.load.plan import PRESETS

    if preset not in PRESETS:
        raise ConfigError(f"--preset: '{preset}' is not one of {', '.join(PRESETS)}")
    own = {name: value for name, value in given.items() if value is not None}
    return replace(PRESETS[preset].scaled(scale), **own)


def load_title(preset: str, scale: float, shape: Shape, rate_s: float | None = None) -> str:
    """A scaled preset for people."""
    title = f"{preset}, scale {scale:g}, {shape.users} users, {shape.rounds} rounds"
    return title if rate_s is None else f"{title}, {rate_s:g} requests/s"


def loads_of(
    texts: list[str], preset: str, scale: float, given: dict[str, Any], rate_s: float | None = None
) -> dict[str, Shape]:
    """Loads by title: `PRESET,scale=0.1,users=4,rounds=3`, where what a text leaves out is as the others say;
    without texts the one of the others. Raises ConfigError.
    """
    found = {}
    for text in texts or [preset]:
        name, *settings = text.split(",")
        own, its_scale = dict(given), scale
        for setting in settings:
            key, _, value = setting.partition("=")
            try:
                if key == "scale" and (number := float(value)) > 0:
                    its_scale = number
                elif key in ("users", "rounds") and (count := int(value)) > 0:
                    own[key] = count
                else:
                    raise ValueError
            except ValueError:
                raise ConfigError(f"--load {text}: '{setting}' is not scale=S, users=N or rounds=N") from None
        shape = shape_of(name, its_scale, own)
        found[load_title(name, its_scale, shape, rate_s)] = shape
    return found


def trace_load(path: Path, requests: int, scale: float, speed: float, max_tokens: int, seed: int) -> Load:
    """The first requests of a trace; those longer than `max_tokens` (0: none) once scaled are left out.
    Raises ConfigError.
    """
    from benchmarks.pool.traces import trace_lines
    from benchmarks.serving.load.plan import replay_load

    lines = [
        line
        for line in trace_lines(path)
        if not max_tokens or (line.input_length + line.output_length) * scale <= max_tokens
    ][:requests]
    if not lines:
        raise ConfigError(
            f"--trace {path}: no request of it has at most {max_tokens} tokens: --scale it down"
        )
    if not all(line.input_length for line in lines):
        raise ConfigError(f"--trace {path}: a line without input_length")
    begin_ms = lines[0].timestamp
    asked = (
        ((line.timestamp - begin_ms) / 1000, line.input_length, line.output_length, line.hash_ids)
        for line in lines
    )
    return replay_load(asked, scale=scale, speed=speed, seed=seed)


def check_model(path: Path) -> None:
    """Raises ConfigError where there is none."""
    if not (path / "config.json").is_file():
        raise ConfigError(f"--model {path}: no model there; pdserve model demo --size small --out {path}")


@contextmanager
def clusters(
    model: Path, device_tokens: int, extra: list[str] | None, out: Path | None = None, **more: Any
) -> Iterator[Setting]:
    """What the clusters of a benchmark have in common (`more`: other fields), in directories of their own
    until the block ends; `out` stays. SIGTERM ends the block. Raises ConfigError where there is no model.
    """
    from benchmarks.processes import stopped_cleanly
    from benchmarks.serving.cluster import workplace
    from benchmarks.serving.contenders import Setting

    check_model(model)
    with stopped_cleanly(), workplace(out) as (directory, memory):
        yield Setting(
            model_path=str(model.resolve()),
            directory=directory,
            device_tokens=device_tokens,
            arena_directory=memory,
            extra_args=tuple(extra or ()),
            **more,
        )
