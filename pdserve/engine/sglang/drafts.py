"""What speculative decoding adds to a worker's pages: keys and values of the draft model.

SGLang 0.5.23 has three kinds of them (`BaseSpecWorker._build_hicache_draft_plan`):

| draft model | its keys and values |
|---|---|
| NEXTN and MTP layers of the model's own kind (EAGLE) | more layers of each KV page |
| EAGLE, EAGLE3, STANDALONE | a part of each page beside KV, `draft` |
| none: NGRAM | none |

Only how many drafted tokens are accepted depends on them, never an answer. Workers that share pages draft
alike all the same: a page without its draft part would be one of two things under one name.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sglang.srt.configs.model_config import AttentionArch, ModelConfig

from pdserve.engine.fingerprints import kept_fingerprint
from pdserve.errors import StartupError
from pdserve.pages import model_fingerprint

WITHOUT_DRAFTS: Final = frozenset({None, "NGRAM"})
_OF_PAIRS: Final = frozenset({"EAGLE", "EAGLE3"})  # SpeculativeAlgorithm.is_eagle


@dataclass(frozen=True)
class Drafts:
    """Of a worker's draft model. All false where it has none."""

    is_part: bool = False
    """Its keys and values are a part of their own."""
    pairs: bool = False
    """See `pages.page_hashes`."""
    option: str = ""
    """What is said of it in the geometry."""


def drafts(server_args: Any, config: Any, *, has_parts: bool, pieces: int) -> Drafts:
    """`server_args`: resolved. `config`: of the model whose tokens are drafted. `has_parts`: it has parts
    beside KV. `pieces`: as of `kv_identity`.

    Raises StartupError for a draft model whose keys and values cannot be stored.
    """
    algorithm = server_args.speculative_algorithm
    if algorithm in WITHOUT_DRAFTS or not server_args.enable_hierarchical_cache:
        return Drafts()
    option = f"--speculative-algorithm {algorithm}"
    path = Path(server_args.speculative_draft_model_path or "")
    if not server_args.speculative_draft_model_path or not path.is_dir():
        raise StartupError(
            f"{option}: draft model {server_args.speculative_draft_model_path!r} is no local directory: "
            "download it first, and give its path as --speculative-draft-model-path"
        )
    if pieces or has_parts:
        why = "engine.page_pieces is set" if pieces else "this model keeps state beside its KV pages"
        raise StartupError(
            f"{option}: {why}, and pdserve has not seen SGLang store both: "
            + ("leave one of them out" if pieces else 'set storage = "none"')
        )
    own = ModelConfig.from_server_args(server_args, model_path=str(path), is_draft_model=True)
    is_part = algorithm != "EAGLE" or not own.num_nextn_predict_layers
    if is_part:
        _check_part(option, own, config, server_args.tp_size)
    said = [algorithm]
    if path.resolve() != Path(server_args.model_path).resolve():
        said.append(kept_fingerprint(path, model_fingerprint))
    if server_args.speculative_draft_kv_cache_dtype:
        said.append(server_args.speculative_draft_kv_cache_dtype)
    return Drafts(is_part, algorithm in _OF_PAIRS, ":".join(said))


def _check_part(option: str, own: Any, config: Any, tp_size: int) -> None:
    """Raises StartupError where a draft model's keys and values are no part that all ranks store."""
    if own.is_hybrid_swa:
        raise StartupError(
            f'{option}: the draft has sliding windows, which pdserve does not store: set storage = "none"'
        )
    is_shared = config.attention_arch == AttentionArch.MLA
    if is_shared and own.attention_arch != AttentionArch.MLA and tp_size > 1:
        raise StartupError(
            f"{option}: the ranks of this model share their pages, and those of the draft do not: SGLang "
            'then stores the draft of one rank alone. Take --tp-size 1, or storage = "none"'
        )
