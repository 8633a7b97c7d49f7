"""Options that several commands have."""

from __future__ import annotations

from pdserve.errors import ConfigError


def page_sizes(text: str) -> list[int]:
    """Sizes separated by commas, in bytes. Raises ConfigError."""
    from pdserve.kvpool.config import parse_bytes

    try:
        sizes = [parse_bytes(word) for word in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"--pages: {error}") from error
    if min(sizes) < 64:
        raise ConfigError(f"--pages: pages have at least 64 bytes, found {min(sizes)}")
    return sizes


def choices(option: str, text: str, allowed: tuple[str, ...]) -> list[str]:
    """Words separated by commas. Raises ConfigError for one that is not allowed."""
    words = text.split(",")
    for word in words:
        if word not in allowed:
            raise ConfigError(f"--{option}: '{word}' is not one of {', '.join(allowed)}")
    return words
