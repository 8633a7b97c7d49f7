"""SGLang's arguments: its own parser reads the words, and its own resolution says what they come to.

SGLang leaves arguments open (`None`, `auto`) and changes some where others ask for it. So what a worker needs
is compared with the resolved values, not with the words.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import os
from collections.abc import Iterator, Mapping
from typing import Any, Final

from pdserve.errors import ConfigError

STORED_DRAFTS: Final = ("EAGLE", "EAGLE3", "STANDALONE", "NGRAM")
"""Values of --speculative-algorithm. NEXTN is SGLang's other name of EAGLE."""
WITH_SCALES: Final = frozenset({"mxfp8", "nvfp4", "fp4_mx_block16"})
"""KV types with scales beside the values, which SGLang keeps in host memory and never stores."""
_STAGES: Final = 'engine.hicache_host_memory_mode = "buffer_only"'
_NO_STAGES: Final = 'engine.hicache_host_memory_mode = "cache"'
_NO_STORAGE: Final = 'storage = "none"'
_SECRET = frozenset({"api_key", "admin_api_key"})
_SHOWN_CHARACTERS = 60
_MISSING: Final = object()


def parse_args(argv: list[str]) -> Any:
    """SGLang's ServerArgs for `argv`, not resolved yet.

    Raises ConfigError with SGLang's own last line when it does not accept the words.
    """
    from sglang.srt.server_args import prepare_server_args

    said = io.StringIO()
    try:
        with _root_logger_kept(), contextlib.redirect_stderr(said):
            return prepare_server_args(argv)
    except SystemExit as error:
        line = (said.getvalue().strip().splitlines() or ["no reason given"])[-1]
        raise ConfigError(
            f"SGLang does not accept these flags: {line.partition('error: ')[2] or line}"
        ) from error
    except ValueError as error:
        raise ConfigError(f"SGLang does not accept these flags: {error}") from error


@contextlib.contextmanager
def _root_logger_kept() -> Iterator[None]:
    """SGLang configures logging while it parses: its handler would write into the text that is read from
    here, and what this process logs until SGLang starts would be lost.
    """
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


def resolved(server_args: Any) -> Any:
    """A read-only view of what SGLang makes of `server_args`, which stay as they are.

    Raises ConfigError where SGLang refuses them.
    """
    from sglang.srt.arg_groups.model_override_base import resolved_view

    own = copy.deepcopy(server_args)
    try:
        with _without_traces():
            own.resolve_once()
    except (ValueError, AssertionError, NotImplementedError, RuntimeError) as error:
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"SGLang does not accept these flags: {line}") from error
    return resolved_view(own)


@contextlib.contextmanager
def _without_traces() -> Iterator[None]:
    """SGLang notes in the environment and in the log what it decides. It will do so again when it starts."""
    before, disabled = dict(os.environ), logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(disabled)
        os.environ.clear()
        os.environ.update(before)


def rank_count(found: Any) -> int:
    """Scheduler processes of the resolved arguments. Attention data parallelism divides the same ones."""
    replicas = 1 if found.enable_dp_attention else found.dp_size
    return int(found.tp_size * found.pp_size * replicas)


def ranks_here(found: Any) -> int:
    """Those of this host, where `--nnodes` divides them between several."""
    return max(1, rank_count(found) // int(found.nnodes))


def check_supported(found: Any) -> None:
    """Raises ConfigError for resolved arguments with which SGLang 0.5.23 stores no pages, ends in the middle,
    or was never seen to store them.
    """
    algorithm, stages = found.speculative_algorithm, found.hicache_host_memory_mode == "buffer_only"
    drafts = f"--speculative-algorithm {algorithm}"
    if found.device == "cpu" and algorithm == "NGRAM":
        raise ConfigError(f"{drafts}: SGLang has it on a CPU with its own kernels only")
    if not found.enable_hierarchical_cache:
        return
    if stages and found.pp_size > 1:
        # a fetch's outcome goes from rank to rank there, and a pull would end at another step on each of them
        refused = f"{_STAGES} and --pp-size over 1 exclude each other", _NO_STAGES
    elif found.kv_cache_dtype in WITH_SCALES:
        said = "SGLang keeps scales beside its values, and stores no such pages"
        refused = f"--kv-cache-dtype {found.kv_cache_dtype}: {said}", f"fp8_e4m3, or {_NO_STORAGE}"
    elif found.enable_streaming_session:
        # it asks the tree about a node of the session's own (`_prefetch_kvcache`, `_VirtualNode`)
        said = "with HiCache, SGLang ends at a session's second turn"
        refused = f"--enable-streaming-session: {said}", _NO_STORAGE
    elif algorithm is None:
        return
    elif algorithm not in STORED_DRAFTS:
        said = f"one of {', '.join(STORED_DRAFTS)}, or {_NO_STORAGE}"
        refused = f"{drafts}: pdserve has not seen SGLang store its pages", said
    elif found.disaggregation_mode != "null":
        refused = f"{drafts}: pdserve has not seen drafts handed over directly", 'handoff = "pool"'
    elif stages:
        refused = f"{drafts}: pdserve has not seen drafts staged in host memory", _NO_STAGES
    else:
        return
    raise ConfigError(": take ".join(refused))


def check_needs(found: Any, own: Any, needed: Mapping[str, str]) -> None:
    """Compare what SGLang makes of all words with what a worker needs.

    `found`: resolved, of all words. `own`: of the worker's words without the user's. `needed`: fields that
    must agree, with the reason. Raises ConfigError that names the first that does not.
    """
    for field, reason in needed.items():
        flag = "--" + field.replace("_", "-")
        value, need = getattr(found, field, _MISSING), getattr(own, field, _MISSING)
        if value is _MISSING or need is _MISSING:
            raise ConfigError(
                f"SGLang has no {flag}, by which a worker sees that {reason}: "
                "install the SGLang that this pdserve is made for (launch/setup.sh)"
            )
        if value != need:
            raise ConfigError(
                f"SGLang's {flag} would be {_shown(field, value)}, but a worker needs "
                f"{_shown(field, need)}: {reason}"
            )


def _shown(field: str, value: Any) -> str:
    if value is None:
        return "none"
    shown = "set" if field in _SECRET else str(value)
    return shown if len(shown) <= _SHOWN_CHARACTERS else f"{shown[:_SHOWN_CHARACTERS]}..."
