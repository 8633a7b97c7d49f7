"""Configuration: file, flags over it, and one line that says what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
import pytest
import typer
from msgspec import Meta
from typer.testing import CliRunner

from pdserve.errors import ConfigError
from pdserve.security.tokens import Secret, given_secret, reveal
from pdserve.settings.command_line import config_command
from pdserve.settings.config_file import load_config, options


class Place(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    address: str
    """Where
    it is.
    """


class Node(Place, frozen=True, kw_only=True, forbid_unknown_fields=True):
    token: Secret = Secret("")
    """Its token."""


class Pool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    nodes: list[Node] = []
    """Nodes."""
    data_path: Literal["auto", "shm"] = "auto"
    """How bytes travel."""
    key: Secret = Secret("")
    """Key of pages."""


class Engine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model_path: Path
    """Model directory."""
    page_size: Annotated[int, Meta(ge=1)] = 64
    """Tokens a page."""
    cpu: bool | None = None
    """Force the CPU."""
    extra_args: list[str] = []
    """SGLang's."""


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    port: int = 8000
    """Port | to listen on."""
    engine: Engine
    pool: Pool = Pool()
    tags: tuple[str, ...] = ("a",)
    """Tags."""
    kinds: tuple[Literal["one", "two"], ...] = ("one",)
    """Kinds."""
    env: dict[str, str] = {}
    """Environment."""

    def __post_init__(self) -> None:
        if self.port == 13:
            raise ValueError("port 13 brings bad luck")


GOOD = '[engine]\nmodel_path = "m"\n'


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "c.toml"
    path.write_text(text)
    return path


def test_flags_win_over_the_file_and_defaults_fill_in(tmp_path: Path) -> None:
    path = write(tmp_path, f"port = 1\n{GOOD}page_size = 2\n[[pool.nodes]]\naddress = 'x'")
    config = load_config(Config, path, {"engine.page_size": 3, "pool.data_path": "shm", "port": None})
    assert config == Config(
        port=1,
        engine=Engine(model_path=Path("m"), page_size=3),
        pool=Pool(nodes=[Node(address="x")], data_path="shm"),
    )


def test_a_home_directory_in_a_path_is_expanded() -> None:
    config = load_config(Config, None, {"engine.model_path": "~/m"})
    assert config.engine.model_path == Path.home() / "m"


@pytest.mark.parametrize("by_flag", [False, True])
def test_a_secret_is_in_the_file_that_file_or_flag_names_and_read_by_who_needs_it(
    tmp_path: Path, by_flag: bool
) -> None:
    (tmp_path / "key").write_text("k\n")
    files = f"[pool]\nkey_file = '{tmp_path}/key'\n[[pool.nodes]]\naddress = 'x'\ntoken_file = '/nowhere'"
    path = write(tmp_path, GOOD + files.replace("/key'", "/old'") if by_flag else GOOD + files)
    config = load_config(Config, path, {"pool.key_file": f"{tmp_path}/key"} if by_flag else {})
    assert given_secret(config.pool.key, "X", {}) == "k"
    with pytest.raises(ConfigError, match="/nowhere cannot be read"):
        given_secret(config.pool.nodes[0].token, "X", {})
    with pytest.raises(TypeError):
        reveal(config.pool.key)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"prot = 1\n{GOOD}", "unknown key 'prot' (did you mean 'port'?)"),
        (f"{GOOD}pagesize = 1", "unknown key 'engine.pagesize' (did you mean 'engine.page_size'?)"),
        (f"zzz = 1\n{GOOD}", "unknown key 'zzz'"),
        (
            f"prot = 1\n{GOOD}cpus = true",
            "unknown key 'prot' (did you mean 'port'?); unknown key 'engine.cpus'",
        ),
        (
            f"{GOOD}[[pool.nodes]]\nadress = 'x'",
            "'pool.nodes[0].adress' (did you mean 'pool.nodes[0].address'?)",
        ),
        (f"port = 'x'\n{GOOD}", "'port' must be int, found 'x' (str)"),
        (f"{GOOD}page_size = 0", "'engine.page_size' must be int >= 1, found 0 (int)"),
        (f"{GOOD}[pool]\ndata_path = 'udp'", "'pool.data_path' must be 'auto' or 'shm', found 'udp' (str)"),
        ("engine = 1", "'engine' must be table, found 1 (int)"),
        ("[engine]\nmodel_path = 3", "'engine.model_path' must be path, found 3 (int)"),
        ("port = 1\n[engine]\ncpu = true", "missing required key 'engine.model_path'"),
        ("port = 1", "missing required key 'engine.model_path'"),
        (f"kinds = ['c']\n{GOOD}", "'kinds[0]' must be 'one' or 'two', found 'c' (str)"),
        (f"port = 13\n{GOOD}", "port 13 brings bad luck"),
        (f"{GOOD}[pool]\nkey = 'a'\nkey_file = '/b'", "pool.key and pool.key_file are both set: keep one"),
        (f"{GOOD}[[pool.nodes]]\naddress = ''\ntoken_file = 3", "'pool.nodes[0].token_file' must be a path"),
        (f"{GOOD}[pool]\nkeyfile = '/b'", "'pool.keyfile' (did you mean 'pool.key_file'?)"),
        (f"{GOOD}page_size_file = '/b'", "unknown key 'engine.page_size_file'"),
        (f"{GOOD}\n[pool\n", "not valid TOML: "),
    ],
)
def test_a_mistake_in_the_file_is_one_line_that_names_file_and_key(
    tmp_path: Path, text: str, message: str
) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_config(Config, path, {})
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_syntax_error_names_its_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at line 2"):
        load_config(Config, write(tmp_path, "port = 1\nengine = = 2\n"), {})
    with pytest.raises(ConfigError, match="at line 1, end of file"):
        load_config(Config, write(tmp_path, "port ="), {})


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: no such configuration file"):
        load_config(Config, tmp_path / "none.toml", {})


def test_a_mistake_in_a_flag_names_the_flag_and_not_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    with pytest.raises(ConfigError) as caught:
        load_config(Config, path, {"engine.page_size": 0})
    assert str(caught.value) == "--engine.page-size: 'engine.page_size' must be int >= 1, found 0 (int)"


def test_options_are_every_leaf_with_type_default_and_description() -> None:
    assert [(one.key, one.type_name, one.default, one.description) for one in options(Config)] == [
        ("port", "int", "8000", "Port | to listen on."),
        ("engine.model_path", "path", "required", "Model directory."),
        ("engine.page_size", "int", "64", "Tokens a page."),
        ("engine.cpu", "bool", "none", "Force the CPU."),
        ("engine.extra_args", "list of string", "[]", "SGLang's."),
        ("pool.nodes[].address", "string", "required", "Where it is."),
        ("pool.nodes[].token", "secret", '""', "Its token."),
        ("pool.data_path", "`auto` or `shm`", "auto", "How bytes travel."),
        ("pool.key", "secret", '""', "Key of pages."),
        ("tags", "list of string", "[a]", "Tags."),
        ("kinds", "list of `one` or `two`", "[one]", "Kinds."),
        ("env", "table of string", "{}", "Environment."),
    ]


# --- commands made from a struct


def app(seen: list[Config], status: int | None = None) -> typer.Typer:
    def run(config: Config) -> int | None:
        seen.append(config)
        return status

    return config_command(Config, run, help="Do it.", extra_args_key="engine.extra_args")


def test_command_takes_flags_file_and_words_after_two_dashes(tmp_path: Path) -> None:
    path = write(tmp_path, f"port = 1\n{GOOD}extra_args = ['--a']\n[env]\nX = 'y'")
    words = [
        "--config",
        str(path),
        "--engine.no-cpu",
        "--tags",
        "x",
        "--tags",
        "y",
        "--engine.page-size",
        "16",
    ]
    seen: list[Config] = []
    result = CliRunner().invoke(app(seen), [*words, "--", "--b", "1"])
    assert result.exit_code == 0
    engine = Engine(model_path=Path("m"), page_size=16, cpu=False, extra_args=["--a", "--b", "1"])
    assert seen == [Config(port=1, engine=engine, tags=("x", "y"), env={"X": "y"})]


def test_command_help_shows_every_flag_with_description_and_default() -> None:
    text = " ".join(CliRunner().invoke(app([]), ["--help"], terminal_width=200).output.split())
    assert "--engine.page-size INT Tokens a page. [default: 64]" in text
    assert "--pool.data-path auto|shm How bytes travel. [default: auto]" in text
    assert "--kinds one|two Kinds." in text
    assert "--engine.cpu / --engine.no-cpu Force the CPU." in text
    assert "--pool.key-file PATH File that holds it: Key of pages." in text
    assert "--pool.key " not in text
    assert "nodes" not in text  # an array of tables is for the file


def test_command_refuses_a_flag_of_the_wrong_type() -> None:
    result = CliRunner().invoke(app([]), ["--port", "x"])
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception) == "--port: must be int, found 'x'"


def test_command_without_words_names_the_first_flag_that_it_needs() -> None:
    result = CliRunner().invoke(app([]), [])
    assert str(result.exception) == (
        "configuration: missing required key 'engine.model_path'; its flag is --engine.model-path"
    )


def test_command_gives_the_status_of_what_it_ran() -> None:
    assert CliRunner().invoke(app([], status=3), ["--engine.model-path", "m"]).exit_code == 3
