"""What every kind of bucket promises: a directory, and the real clients of S3, Google's and Azure's stores.

Google's client speaks its XML interface, which is S3's in all that is used here: moto's server answers it.
Azure's client runs against Azurite, where `azurite-blob` is installed (npm: azurite).
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from pdserve.errors import ConfigError
from pdserve.kvpool.tiers.base import GONE, LOADED, STORED
from pdserve.kvpool.tiers.object.bucket import Bucket, NoSuchObject, StoreError
from tests.support.e2e.cluster import free_port
from tests.support.kvpool.object_tiers import BUCKET, CREDENTIALS, MakeNode, moto_bucket

ACCOUNT = "devstoreaccount1"
ACCOUNT_KEY = base64.b64encode(b"of Azurite, for tests only").decode()
START_S = 60.0


class Place(NamedTuple):
    """A bucket's URL and options, and where its client finds credentials."""

    url: str
    endpoint: str = ""
    environ: dict[str, str] = {}  # noqa: RUF012 (never written)

    @property
    def options(self) -> dict[str, str]:
        return {"endpoint": self.endpoint} if self.endpoint else {}


@contextlib.contextmanager
def azurite() -> Iterator[str]:
    """The address of a store with an empty container."""
    if (program := shutil.which("azurite-blob")) is None:
        pytest.skip("azurite-blob is not installed: npm install --global azurite")
    port = free_port()
    how = ("--silent", "--disableTelemetry", "--inMemoryPersistence", "--skipApiVersionCheck")
    server = subprocess.Popen(
        [program, *how, "--blobHost", "127.0.0.1", "--blobPort", str(port)],
        env={**os.environ, "AZURITE_ACCOUNTS": f"{ACCOUNT}:{ACCOUNT_KEY}"},
        stdout=subprocess.DEVNULL,
    )
    try:
        endpoint = f"http://127.0.0.1:{port}/{ACCOUNT}"
        deadline_s = time.monotonic() + START_S
        while True:
            with contextlib.suppress(httpx.TransportError):
                httpx.get(endpoint)
                break
            assert server.poll() is None, "azurite-blob ended"
            assert time.monotonic() < deadline_s, "azurite-blob does not answer"
            time.sleep(0.05)  # between looks
        made = httpx.put(f"{endpoint}/{BUCKET}?restype=container", headers=_signed(f"{ACCOUNT}/{BUCKET}"))
        assert made.status_code == 201, made.text
        yield endpoint
    finally:
        server.terminate()
        server.wait(10)


def _signed(path: str) -> dict[str, str]:
    """Headers of a request that makes a container. The library has no call for it."""
    date, version = formatdate(usegmt=True), "2021-08-06"
    text = (
        "PUT" + "\n" * 12 + f"x-ms-date:{date}\nx-ms-version:{version}\n/{ACCOUNT}/{path}\nrestype:container"
    )
    digest = hmac.digest(base64.b64decode(ACCOUNT_KEY), text.encode(), hashlib.sha256)
    signature = base64.b64encode(digest).decode()
    return {
        "x-ms-date": date,
        "x-ms-version": version,
        "Authorization": f"SharedKey {ACCOUNT}:{signature}",
    }


@pytest.fixture(scope="module", params=["file", "s3", "gs", "az"])
def cloud(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    match request.param:
        case "file":
            yield Place(f"file://{tmp_path_factory.mktemp('bucket')}")
        case "s3":
            with moto_bucket() as endpoint:
                yield Place(f"s3://{BUCKET}", endpoint, CREDENTIALS)
        case "gs":
            with moto_bucket() as endpoint:
                yield Place(f"gs://{BUCKET}", endpoint, {"GOOGLE_BEARER_TOKEN": "for-tests"})
        case "az":
            with azurite() as endpoint:
                keys = {"AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT, "AZURE_STORAGE_ACCOUNT_KEY": ACCOUNT_KEY}
                yield Place(f"az://{BUCKET}", endpoint, keys)


@pytest.fixture
def place(cloud: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Place:
    """With a prefix of its own."""
    for name, value in cloud.environ.items():
        monkeypatch.setenv(name, value)
    return cloud._replace(url=f"{cloud.url}/{tmp_path.name}")


@pytest.fixture
def bucket(place: Place) -> Bucket:
    return Bucket(place.url, place.options, read_timeout_s=10.0, timeout_s=10.0)


def test_a_range_is_read_exactly_or_not_at_all(bucket: Bucket) -> None:
    content = bytes(range(256)) * 40
    bucket.write("a/one", content)
    assert bytes(bucket.read("a/one", 0, len(content))) == content
    assert bytes(bucket.read("a/one", 1000, 3)) == content[1000:1003]
    with pytest.raises(StoreError):
        bucket.read("a/one", len(content) - 1, 2)
    with pytest.raises(NoSuchObject):
        bucket.read("a/two", 0, 1)


def test_an_object_is_replaced_as_a_whole(bucket: Bucket) -> None:
    bucket.write("one", b"the first and longer one")
    bucket.write("one", b"second")
    assert list(bucket.names("")) == [("one", 6)]
    assert bytes(bucket.read("one", 0, 6)) == b"second"


def test_names_below_a_prefix_are_listed_with_their_sizes(bucket: Bucket) -> None:
    for n in range(5):
        bucket.write(f"a/{n}", bytes(n))
        bucket.write(f"b/{n}", bytes(10))
    assert sorted(bucket.names("a")) == [(f"a/{n}", n) for n in range(5)]
    assert list(bucket.names("c")) == []


def test_removed_objects_are_gone_and_those_that_were_gone_do_not_matter(bucket: Bucket) -> None:
    for name in ("one", "two", "three"):
        bucket.write(name, b"x")
    bucket.remove(["one", "never", "three", "one"])
    assert [name for name, _ in bucket.names("")] == ["two"]


def test_a_node_reads_what_another_one_stored_and_removes_a_namespace_for_all(
    place: Place, nodes: MakeNode
) -> None:
    one, two = (
        nodes(name, place.endpoint, place.url, read_timeout_s=10.0, timeout_s=10.0) for name in ("one", "two")
    )
    one.open()
    assert one.put(*range(30)) == [STORED] * 30
    one.until_uploaded()
    two.open()
    assert two.read(*range(31)) == [LOADED] * 30 + [GONE]
    two.tier.forget_space(1)
    one.until(lambda: one.read(0) == [GONE])


@pytest.mark.parametrize("url", ["gs://bucket/pool", "az://container/pool"])
@pytest.mark.parametrize(
    ("settings", "anonymous", "said"), [({"region": "r"}, False, "region"), ({}, True, "anonymous")]
)
def test_options_of_s3_alone_are_refused_elsewhere_by_name(
    url: str, settings: dict[str, str], anonymous: bool, said: str
) -> None:
    with pytest.raises(ConfigError, match=rf"options\.{said} is for s3:// only"):
        Bucket(url, settings, anonymous=anonymous, read_timeout_s=1.0, timeout_s=1.0)
