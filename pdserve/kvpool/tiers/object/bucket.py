"""A bucket of S3, Google Cloud Storage or Azure, or a directory: four operations, each with a deadline.

Credentials come from where each cloud's own tools look: environment variables, the machine's or pod's
identity, and for S3 the shared credentials file. They are no options, so no configuration file has them.
"""

from __future__ import annotations

import configparser
import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, urlsplit

from pdserve.errors import ConfigError
from pdserve.extras import needed_by

if TYPE_CHECKING:
    from obstore.store import ObjectStore

SCHEMES: Final = ("s3://", "gs://", "az://", "azure://", "abfss://", "file://")
GOOGLE: Final = "gs://"
AMAZON: Final = "s3://"
CONNECT_TIMEOUT_S: Final = 3.0
MAX_RETRIES: Final = 3  # within the deadline
LIST_PAGE: Final = 1000  # names per answer, the most that S3 gives
MAX_LISTED: Final = 1_000_000


class StoreError(Exception):
    """The store did not do what it was asked for; in words."""


class NoSuchObject(StoreError):
    """There is no object of this name."""


class Bucket:
    """Thread-safe. Every method ends within two deadlines. `read_timeout_s` is for reads, `timeout_s` for the
    others.
    """

    def __init__(
        self,
        url: str,
        settings: Mapping[str, str],
        *,
        anonymous: bool = False,
        read_timeout_s: float,
        timeout_s: float,
    ) -> None:
        """`settings`: endpoint and region, where they are not the usual ones. Raises ConfigError."""
        self.url = url
        self._reads = _open(url, settings, read_timeout_s, anonymous=anonymous)
        self._writes = _open(url, settings, timeout_s, anonymous=anonymous)

    def read(self, name: str, offset: int, size: int) -> memoryview:
        """Exactly this range. Raises StoreError, NoSuchObject."""
        import obstore

        with _Translated(self.url):
            found = memoryview(obstore.get_range(self._reads, name, start=offset, length=size))
        if len(found) != size:
            raise StoreError(f"{self.url}: {len(found)} bytes of {name} came instead of {size}")
        return found

    def write(self, name: str, content: bytes) -> None:
        """Make or replace an object. Raises StoreError."""
        import obstore

        with _Translated(self.url):
            obstore.put(self._writes, name, content, use_multipart=False)

    def remove(self, names: Sequence[str]) -> None:
        """Remove these objects; those that are gone already do not matter. Raises StoreError."""
        import obstore

        for name in names:
            try:
                with _Translated(self.url):
                    obstore.delete(self._writes, name)
            except NoSuchObject:
                continue

    def names(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Name and size of all objects below the prefix. Raises StoreError, also in the middle."""
        import obstore

        with _Translated(self.url):
            listing = iter(obstore.list(self._writes, prefix=prefix, chunk_size=LIST_PAGE))
        count = 0
        while True:
            with _Translated(self.url):
                some = next(listing, None)
            if some is None:
                return
            count += len(some)
            if count > MAX_LISTED:
                raise StoreError(
                    f"{self.url}: more than {MAX_LISTED} objects: give the pool a prefix of its own"
                )
            for one in some:
                yield one["path"], one["size"]


class _Translated:
    """Errors of the library become StoreError."""

    def __init__(self, url: str) -> None:
        self._url = url

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        from obstore.exceptions import BaseError, NotFoundError

        if isinstance(error, NotFoundError | FileNotFoundError):
            raise NoSuchObject(f"{self._url}: {_first_line(error)}") from None
        if isinstance(error, BaseError | OSError | ValueError):
            raise StoreError(f"{self._url}: {_first_line(error)}") from None


def _open(url: str, settings: Mapping[str, str], timeout_s: float, *, anonymous: bool) -> ObjectStore:
    with needed_by("a tier in an object store", "object"):
        from obstore.store import from_url
    if not url.startswith(SCHEMES):
        raise ConfigError(f"options.url must begin with one of {', '.join(SCHEMES)}, found '{url}'")
    if anonymous and not url.startswith(AMAZON):
        raise ConfigError(f"options.anonymous is for s3:// only: leave it out for {url}")
    config: dict[str, Any] = {}
    if url.startswith("file://"):
        _make_folder(url)
    else:
        connect_s = min(CONNECT_TIMEOUT_S, timeout_s)
        timeouts = {"timeout": _seconds(timeout_s), "connect_timeout": _seconds(connect_s)}
        config["client_options"] = {
            **timeouts,
            "allow_http": settings.get("endpoint", "").startswith("http:"),
        }
        config["retry_config"] = {"max_retries": MAX_RETRIES, "retry_timeout": _seconds(timeout_s)}
        config.update(_named(url, settings))
    if url.startswith(AMAZON):
        config.update({"skip_signature": True} if anonymous else _shared_credentials(os.environ))
    try:
        return from_url(url, **config)
    except Exception as error:  # boundary: the library's own errors, of many kinds, are about the options
        raise ConfigError(f"options.url {url}: {_first_line(error)}") from None


def _make_folder(url: str) -> None:
    """The folder of a mount is for this user alone; one that is there stays as it is. Raises ConfigError."""
    folder = Path(unquote(urlsplit(url).path))
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"options.url {url}: {error.strerror}") from None


def _named(url: str, settings: Mapping[str, str]) -> dict[str, str]:
    """The settings by the library's names for this cloud. Raises ConfigError."""
    if "region" in settings and not url.startswith(AMAZON):
        raise ConfigError(f"options.region is for s3:// only: leave it out for {url}")
    renamed = {"endpoint": "base_url"} if url.startswith(GOOGLE) else {}
    return {renamed.get(name, name): value for name, value in settings.items()}


def _seconds(seconds: float) -> timedelta:
    return timedelta(seconds=seconds)


def _shared_credentials(environ: Mapping[str, str]) -> dict[str, str]:
    """Those of ~/.aws/credentials, unless the environment has others. Raises ConfigError."""
    others = ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI")
    if any(environ.get(name) for name in (*others, "AWS_CONTAINER_CREDENTIALS_FULL_URI")):
        return {}
    path = Path(environ.get("AWS_SHARED_CREDENTIALS_FILE") or Path("~/.aws/credentials").expanduser())
    profile = environ.get("AWS_PROFILE", "default")
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read(path)
    except (OSError, configparser.Error) as error:
        raise ConfigError(f"{path}: {_first_line(error)}") from None
    if not parser.has_section(profile):
        return {}
    wanted = {"aws_access_key_id": "access_key_id", "aws_secret_access_key": "secret_access_key"}
    wanted["aws_session_token"] = "session_token"
    return {name: parser[profile][key] for key, name in wanted.items() if key in parser[profile]}


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
