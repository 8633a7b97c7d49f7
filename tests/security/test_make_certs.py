"""`launch/make_certs.sh`: files that others can use, and no key that others can read."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest
from cryptography import x509

from tests.support.certificates import MAKE_CERTS, end


def make(*words: str | Path, days: int | None = None, status: int = 0) -> subprocess.CompletedProcess[str]:
    environ = dict(os.environ) if days is None else os.environ | {"DAYS": str(days)}
    done = subprocess.run([MAKE_CERTS, *words], capture_output=True, text=True, check=False, env=environ)
    assert done.returncode == status, done.stderr
    return done


def certificate(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def test_openssl_accepts_what_it_makes_for_servers_and_for_clients(tmp_path: Path) -> None:
    directory = tmp_path / "ca"
    assert "tls.ca" in make("ca", directory).stdout
    assert str(directory / "pool-a.pem") in make("host", directory, "pool-a", "10.0.0.1", "fd00::1").stdout
    for purpose in ("sslserver", "sslclient"):
        command = ["openssl", "verify", "-x509_strict", "-purpose", purpose, "-CAfile"]
        files = [directory / "ca.pem", directory / "pool-a.pem"]
        subprocess.run([*command, *files], check=True, capture_output=True)
    names = certificate(directory / "pool-a.pem").extensions.get_extension_for_class(
        x509.SubjectAlternativeName
    )
    assert names.value.get_values_for_type(x509.DNSName) == ["pool-a"]
    assert list(map(str, names.value.get_values_for_type(x509.IPAddress))) == ["10.0.0.1", "fd00::1"]
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    for key in ("ca.key", "pool-a.key"):
        assert stat.S_IMODE((directory / key).stat().st_mode) == 0o600


def test_a_host_is_renewed_and_an_authority_is_not_overwritten(tmp_path: Path) -> None:
    make("ca", tmp_path)
    make("host", tmp_path, "pool-a")
    before = (tmp_path / "ca.pem").read_bytes(), (tmp_path / "pool-a.pem").read_bytes()
    make("host", tmp_path, "pool-a", days=2)
    assert "is there already" in make("ca", tmp_path, status=2).stderr
    assert (tmp_path / "ca.pem").read_bytes() == before[0]
    assert (tmp_path / "pool-a.pem").read_bytes() != before[1]


def test_a_host_certificate_ends_no_later_than_its_authority(tmp_path: Path) -> None:
    make("ca", tmp_path, days=30)
    make("host", tmp_path, "pool-a", days=90)
    end, latest = (certificate(tmp_path / f"{name}.pem").not_valid_after_utc for name in ("pool-a", "ca"))
    assert 28 <= (end - certificate(tmp_path / "pool-a.pem").not_valid_before_utc).days <= 30
    assert end <= latest


def test_an_authority_that_has_ended_makes_no_certificates(tmp_path: Path) -> None:
    make("ca", tmp_path)
    end(tmp_path / "ca.pem", tmp_path / "ca.key")
    assert "ends within a day" in make("host", tmp_path, "pool-a", status=2).stderr
    assert sorted(file.name for file in tmp_path.iterdir()) == ["ca.key", "ca.pem"]


@pytest.mark.parametrize("name", ["bad name", "../x", "-x-", "", "x,IP:1.2.3.4", "1.2.3.4.5"])
def test_a_name_that_is_none_is_refused(tmp_path: Path, name: str) -> None:
    make("ca", tmp_path)
    make("host", tmp_path, name, status=2)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["ca.key", "ca.pem"]


def test_without_an_authority_it_says_how_to_make_one(tmp_path: Path) -> None:
    assert f"make_certs.sh ca {tmp_path} makes one" in make("host", tmp_path, "pool-a", status=2).stderr
    assert "host DIR NAME" in make(status=2).stdout
