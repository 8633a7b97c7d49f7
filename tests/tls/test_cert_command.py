"""`pdserve cert`: files that others can use, and no key that others can read."""

from __future__ import annotations

import stat
import subprocess
from pathlib import Path

import pytest

from pdserve.tls.authority import ends_at, make_authority
from tests.support.command import pdserve_here


def cert(*words: str | Path, status: int = 0) -> subprocess.CompletedProcess[str]:
    done = pdserve_here("cert", *map(str, words))
    assert done.returncode == status, done.stderr
    return done


def test_openssl_accepts_what_it_makes_for_servers_and_for_clients(tmp_path: Path) -> None:
    directory = tmp_path / "ca"
    assert "tls.ca" in cert("ca", directory).stdout
    said = cert("host", directory, "pool-a", "10.0.0.1", "fd00::1").stdout
    assert str(directory / "pool-a.pem") in said
    for purpose in ("sslserver", "sslclient"):
        command = ["openssl", "verify", "-x509_strict", "-purpose", purpose, "-CAfile"]
        files = [directory / "ca.pem", directory / "pool-a.pem"]
        subprocess.run([*command, *files], check=True, capture_output=True)
    shown = ["openssl", "x509", "-in", directory / "pool-a.pem", "-noout", "-ext", "subjectAltName"]
    text = subprocess.run(shown, check=True, capture_output=True, text=True).stdout
    assert "DNS:pool-a, IP Address:10.0.0.1, IP Address:FD00" in text.replace("fd00", "FD00")


def test_keys_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    directory = tmp_path / "ca"
    cert("ca", directory)
    cert("host", directory, "pool-a")
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    for key in ("ca.key", "pool-a.key"):
        assert stat.S_IMODE((directory / key).stat().st_mode) == 0o600


def test_a_host_is_renewed_and_an_authority_is_not_overwritten(tmp_path: Path) -> None:
    cert("ca", tmp_path)
    cert("host", tmp_path, "pool-a")
    before = (tmp_path / "ca.pem").read_bytes(), (tmp_path / "pool-a.pem").read_bytes()
    cert("host", tmp_path, "pool-a", "--days", "2")
    error = cert("ca", tmp_path, status=1).stderr
    assert "is there already" in error
    assert (tmp_path / "ca.pem").read_bytes() == before[0]
    assert (tmp_path / "pool-a.pem").read_bytes() != before[1]


def test_a_host_certificate_ends_no_later_than_its_authority(tmp_path: Path) -> None:
    cert("ca", tmp_path, "--days", "30")
    said = cert("host", tmp_path, "pool-a", "--days", "90").stdout
    end = ends_at(tmp_path / "pool-a.pem")
    assert end == ends_at(tmp_path / "ca.pem")
    assert f"until {end:%Y-%m-%d}" in said
    cert("host", tmp_path, "pool-a", "--days", "2")
    assert ends_at(tmp_path / "pool-a.pem") < end


def test_an_authority_that_has_ended_makes_no_certificates(tmp_path: Path) -> None:
    make_authority(tmp_path, lifetime_days=-0.001)
    error = cert("host", tmp_path, "pool-a", status=2).stderr
    assert "has ended" in error
    assert sorted(file.name for file in tmp_path.iterdir()) == ["ca.key", "ca.pem"]


@pytest.mark.parametrize("name", ["bad name", "../x", "-x-", ""])
def test_a_name_that_is_none_is_refused(tmp_path: Path, name: str) -> None:
    cert("ca", tmp_path)
    error = cert("host", tmp_path, "--", name, status=2).stderr
    assert "neither the name of a host nor an IP address" in error
    assert sorted(file.name for file in tmp_path.iterdir()) == ["ca.key", "ca.pem"]


def test_without_an_authority_it_says_how_to_make_one(tmp_path: Path) -> None:
    error = cert("host", tmp_path, "pool-a", status=2).stderr
    assert f"`pdserve cert ca {tmp_path}` makes one" in error
    assert error.count("\n") == 1
