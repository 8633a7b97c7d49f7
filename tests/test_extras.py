"""Processes without the optional libraries: what runs, and what those that configure them are told."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from pdserve.cli import SUB_COMMANDS, TWO_WORDS
from pdserve.errors import ConfigError
from pdserve.extras import is_installed
from pdserve.kvpool.client.config import PoolClientConfig
from pdserve.kvpool.client.connector import connector_for
from pdserve.kvpool.protocol.page_tag import PageTags
from pdserve.kvpool.tiers.encryption import PageCipher, SecretEntry
from pdserve.kvpool.tiers.page_codec import PageCodec
from pdserve.router.config.limits import RedisSettings
from pdserve.router.sharing.carriers import connect
from pdserve.tracing import Tracer, Tracing

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OPTIONAL = (
    *("torch", "sglang", "transformers", "tokenizers", "setproctitle", "pynvml", "zmq"),
    *("cryptography", "zstandard", "ucxx", "obstore", "redis", "opentelemetry.sdk", "mooncake", "matplotlib"),
)
CORE = ("router", "up", "key", "pool", "weights", "top", "doctor", "dynamo")
WITHOUT = f"import sys; sys.modules |= dict.fromkeys({OPTIONAL}); "


def without_extras(*words: str) -> subprocess.CompletedProcess[str]:
    """`pdserve WORDS` in a process where no optional library can be imported."""
    return subprocess.run(
        [sys.executable, "-c", f"{WITHOUT} from pdserve.cli import main; main()", *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_core_needs_no_optional_library() -> None:
    targets = [*(SUB_COMMANDS[name].target for name in CORE), *TWO_WORDS.values()]
    loads = f"{WITHOUT} from pdserve.cli import load; [load(target) for target in {targets}]"
    subprocess.run([sys.executable, "-c", loads], check=True, timeout=120)


def test_doctor_says_how_to_add_ucx() -> None:
    done = without_extras("doctor")
    assert done.returncode == 1, done.stderr  # warnings
    assert "pip install 'pdserve[ucx]'" in done.stdout


def test_a_command_that_needs_an_extra_names_it_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    (tmp_path / "model.safetensors").touch()
    done = without_extras("agg", "--engine.model-path", str(tmp_path), "--storage", "none", "--insecure")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith(": pip install 'pdserve[sglang]'")
    assert "Traceback" not in done.stderr


FEATURES: dict[str, tuple[str, str, Callable[[], object]]] = {
    "page key": ("cryptography", "encryption", lambda: PageTags("s", "ns")),
    "tier keys": ("cryptography", "encryption", lambda: PageCipher([SecretEntry("ab" * 32)])),
    "compression": ("zstandard", "zstd", lambda: PageCodec(compressed=True)),
    "events": ("zmq", "events", lambda: import_module("pdserve.kvpool.node.events")),
    "redis": ("redis", "redis", lambda: connect(RedisSettings(url="redis://127.0.0.1/0"), 1.0)),
    "traces": ("opentelemetry.sdk", "otel", lambda: Tracer(Tracing(endpoint="http://127.0.0.1/v1"), "x")),
    "ucx": ("ucxx", "ucx", lambda: connector_for(PoolClientConfig(data_path="ucx"), "x")),
}


@pytest.mark.parametrize("feature", FEATURES)
def test_who_configures_a_feature_without_its_library_is_told_what_to_install(
    feature: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, extra, configure = FEATURES[feature]
    importers = ("pdserve.kvpool.node.events",)
    for name in [*sys.modules]:
        if name.startswith(f"{library}.") or name in importers:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    is_installed.cache_clear()
    try:
        with pytest.raises(ConfigError) as caught:
            configure()
    finally:
        is_installed.cache_clear()
    assert str(caught.value).endswith(f"pip install 'pdserve[{extra}]'")


def test_every_extra_that_is_named_is_one() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "pdserve").rglob("*.py"))
    named = set(re.findall(r"""(?:needed_by\(.*, |how_to_install\(|is_installed\()["'](\w+)["']""", sources))
    assert named >= {"sglang", "ucx", "encryption", "zstd", "events", "object", "redis", "otel"}
    assert named <= set(PROJECT["optional-dependencies"])


def test_the_core_has_at_most_twelve_dependencies() -> None:
    assert len(PROJECT["dependencies"]) <= 12
