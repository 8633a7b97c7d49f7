"""The adapter's parameters, and what it reads of a model: it runs in LMCache's process."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from pdserve.errors import ConfigError, StartupError
from pdserve.kvpool.client.config import PoolClientConfig, with_pool_secrets
from pdserve.kvpool.client.locate import locate_pool
from pdserve.logs import TEXT_FORMAT, TextFormatter
from pdserve.pages import model_fingerprint
from pdserve.settings.config_file import build_config

MAX_LABEL_CHARS: Final = 64


class IntegrationSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`adapter_params` in LMCache's `--l2-adapter`."""

    pool: PoolClientConfig
    """How the pool is reached, as at a worker."""
    revision: Annotated[str, Meta(max_length=256)] = ""
    """What else changes KV and is not said to us: the revision of a model that is no local directory,
    quantization, the kind of an FP8 cache, overridden configuration.
    """


def read_settings(
    params: Mapping[str, Any], environ: Mapping[str, str], *, source: str
) -> IntegrationSettings:
    """The settings, with the pool's nodes and secrets. `source`: where they stand, for errors. Raises
    ConfigError; StartupError: etcd names no node.
    """
    settings = build_config(IntegrationSettings, params, source=source)
    pool = with_pool_secrets(settings.pool, environ)
    if not (pool.nodes or pool.etcd.endpoints):
        raise ConfigError(f"{source}: give pool.nodes or pool.etcd: where the pool's nodes are")
    pool = locate_pool(pool)
    return replace(settings, pool=pool)


def model_identity(model: str) -> str:
    """The fingerprint of a model's directory, wherever it lies; the name of a model that is none here. Raises
    StartupError: the directory cannot be read.
    """
    path = Path(model)
    if not path.is_dir():
        return model
    try:
        return model_fingerprint(path)
    except (OSError, ValueError, KeyError) as error:
        raise StartupError(f"{path}: the model's files cannot be read: {error}") from error


def model_label(model: str) -> str:
    """A model's name as a part of a namespace's, for people."""
    return "".join(c for c in Path(model).name if c.isprintable()).strip()[:MAX_LABEL_CHARS] or "model"


def log_to_stderr() -> None:
    """Show pdserve's log in a process that shows only its own."""
    ours = logging.getLogger("pdserve")
    if not ours.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(TextFormatter(f"[pdserve] {TEXT_FORMAT}"))
        ours.addHandler(handler)
        ours.setLevel(logging.INFO)
