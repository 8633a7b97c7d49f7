"""The tokens of long texts that were encoded a moment ago.

A decode worker gets a long prompt twice: while a prefill worker computes it (`/pd/pull`), and to answer it.
SmolLM2's tokenizer takes 1 to 9 ms for 1,000 tokens, by the load of the processor. The second time would fall
into the time to the first token. Other requests repeat texts too: look-ups, hints, and tries of a prompt.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final

from pdserve.engine.sglang.long_texts import SHORT_CHARS
from pdserve.engine.turns.record import Memory

CAPACITY_BYTES: Final = 16 * 1024 * 1024
"""Four million tokens: those of the prompts that are under way, many times over."""


class Encodings:
    """Of one tokenizer. Thread-safe. Texts are remembered by their digest."""

    def __init__(self, capacity_bytes: int = CAPACITY_BYTES) -> None:
        self._memory = Memory(capacity_bytes)
        self._lock = threading.Lock()  # of `_memory`

    def of(self, text: Any, options: Mapping[str, Any] | None, encode: Callable[[], Any]) -> Any:
        """What `encode` gives for this text under these options: from memory, where it is a long text that
        was encoded before. The list is the caller's own.
        """
        if not isinstance(text, str) or len(text) <= SHORT_CHARS:
            return encode()
        said = f"{sorted((options or {}).items())}\0{text}".encode("utf-8", "surrogatepass")
        key = hashlib.blake2b(said, digest_size=32).digest()
        with self._lock:
            found = self._memory.get(key)
        if found is not None:
            return list(found)
        ids = encode()
        if type(ids) is list:
            with self._lock:
                self._memory.put(key, ids)
        return ids

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._memory.clear()
