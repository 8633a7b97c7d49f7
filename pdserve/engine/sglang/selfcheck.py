"""The self-check: SGLang still has every place that pdserve leans on, and our replacements compute the right
results.

SGLang only logs what a plugin raises. A hook that silently missed its place would serve wrong answers, or
kill a thread later. The tests check the whole of the pinned version, and `pdserve doctor` can do it again. A
worker checks an SGLang of another version before it starts anything, and stops with one line that names what
does not fit.
"""

from __future__ import annotations

import importlib
import logging
import sys
from array import array
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Final

from pdserve.engine.device import Device, choose_device
from pdserve.engine.sglang import prepare
from pdserve.errors import StartupError
from pdserve.extras import how_to_install
from pdserve.sglang_places import missing_places, places

logger = logging.getLogger(__name__)

TESTED_SGLANG = "0.5.23"

MODULES: Final = (
    *(
        "abilities",
        "answers",
        "children.declined_fetches",
        "children.detached",
        "children.entry",
        "children.kept_prompts",
    ),
    *("children.embedded", "children.embedding_salts", "children.local_store", "children.object_layout"),
    *("children.pulls", "children.ssd_tokens", "children.stop_strings"),
    *("continuation", "drafts", "engine", "geometry", "pool_weights", "prompt"),
    *("prompts.exact_turns", "prompts.long_texts"),
    *("server", "server_args", "storage", "text_offsets", "tls", "tokenizer_manager"),
    "warm_up",
)
"""The modules of this package that lean on SGLang; each declares its `PLACES`."""
HASHES: Final = (
    *places(
        "sglang.srt.mem_cache.utils",
        "get_hash_str(token_ids, prior_hash, page_size)",
        "storage_namespace_seed(extra_key, cache_salt)",
    ),
    *places("sglang.srt.mem_cache.radix_cache", "RadixKey(token_ids, is_bigram)"),
)


def check_start(device: Device) -> None:
    """What each start checks: torch's version, and the whole of SGLang where it is not the tested version.
    Raises StartupError.
    """
    _check_torch()
    if not _is_tested():
        check(device)


def _check_torch() -> None:
    """SGLang's native code reads torch's objects: with another torch it reads wrong types, and the
    scheduler dies at its first prompt.
    """
    pin = next((one for one in requires("sglang") or () if one.startswith("torch==")), "").removeprefix(
        "torch=="
    )
    found = version("torch")
    if pin and found.partition("+")[0] != pin:
        raise StartupError(
            f"torch {found} is installed, but SGLang {sglang_version()} needs another: "
            f"pip install torch=={pin}"
        )


def check(device: Device) -> None:
    """Check the installed SGLang, and on CPU put the hooks in place and try them.

    Raises StartupError naming everything that does not fit. Imports SGLang: call it after `prepare.choose`.
    """
    problems = list(missing())
    if device == "cpu":
        from pdserve.engine.sglang.cpu import hooks

        problems += hooks.missing()
    if not problems:
        if device == "cpu":
            hooks.apply()
        problems += _wrong_results(device)
    if problems:
        raise StartupError(
            f"SGLang {sglang_version()} does not fit this pdserve (tested with {TESTED_SGLANG}): "
            + "; ".join(problems)
        )


def sglang_version() -> str:
    """Version of the installed SGLang. Raises StartupError when there is none."""
    try:
        return version("sglang")
    except PackageNotFoundError as error:
        raise StartupError(
            f"SGLang is not installed: {how_to_install('sglang')}, or launch/setup.sh in a checkout, which "
            "leaves out what needs a GPU where there is none"
        ) from error


def _is_tested() -> bool:
    found = sglang_version()
    if found != TESTED_SGLANG:
        logger.warning("SGLang %s is installed; pdserve is tested with %s", found, TESTED_SGLANG)
    return found == TESTED_SGLANG


def missing() -> Iterator[str]:
    """What the installed SGLang lacks, one phrase each."""
    yield from missing_places(HASHES)
    for name in MODULES:
        try:
            module = importlib.import_module(f"{__package__}.{name}")
        except (ImportError, AttributeError) as error:  # it imports from SGLang what is not there
            yield f"{name}: {error}"
        else:
            yield from missing_places(module.PLACES)


def _wrong_results(device: Device) -> Iterator[str]:
    checks: list[tuple[str, Callable[[], bool]]] = [("page hashes", page_hashes_agree)]
    if device == "cpu":
        from pdserve.engine.sglang.cpu import trials

        checks += [
            ("page copies, page_first_direct", trials.page_first_copies_agree),
            ("page copies, layer_first", trials.layer_first_copies_agree),
            ("extend attention", trials.attention_agrees),
            ("attention with sliding windows", trials.windows_agree),
        ]
    for name, agrees in checks:
        if not agrees():
            yield f"{name} give wrong results"
    if wrong := wrong_attachment():
        yield f"the pool as storage backend: {wrong}"


def wrong_attachment() -> str:
    """What SGLang does with the pool as its storage backend that it should not; empty where all is well."""
    from pdserve.engine.sglang import storage

    try:
        return storage.wrong_attachment()
    except (AttributeError, TypeError, ValueError, KeyError, RuntimeError) as error:  # SGLang is another
        return f"{type(error).__name__}: {error}"


def page_hashes_agree() -> bool:
    """SGLang's page hashes of this process equal ours: with and without a namespace, of tokens and of pairs.

    On a GPU machine this compiles SGLang's native hash, once per machine: raises StartupError, naming what to
    install, when that fails.
    """
    from sglang.srt.mem_cache import utils
    from sglang.srt.mem_cache.radix_cache import RadixKey

    from pdserve.pages import namespace_seed, page_hashes

    for extra_key, cache_salt, pairs in ((None, None, False), ("tenant", "sält", False), (None, None, True)):
        tokens = [(7919 * i) % 150_000 for i in range(3 * 16 + pairs)]
        key = RadixKey(array("q", tokens), is_bigram=pairs)
        try:
            theirs = utils.get_hash_str(
                key, utils.storage_namespace_seed(extra_key, cache_salt), page_size=16
            )
        except RuntimeError as error:
            raise StartupError(
                "SGLang's page hash could not be compiled: install a C++ compiler, ninja and OpenSSL's "
                "headers (on Debian: apt-get install g++ ninja-build libssl-dev)"
            ) from error
        seed = namespace_seed(extra_key, cache_salt)
        if theirs != [digest.hex() for digest in page_hashes(tokens, 16, seed, pairs=pairs)]:
            return False
    return True


def main() -> None:
    """Check the whole of the installed SGLang for this machine's device; a line on stderr and status 1 if
    it does not fit. In a process of its own: `python -m pdserve.engine.sglang.selfcheck`.
    """
    device = choose_device("auto")
    prepare.choose(device)
    try:
        check(device)
    except StartupError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
