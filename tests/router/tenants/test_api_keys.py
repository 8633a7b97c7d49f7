"""`pdserve key` and the keys file that it writes."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from pdserve.errors import ConfigError
from pdserve.router.config.tenants import Access
from pdserve.router.tenants.api_keys import app, load_keys
from pdserve.security.tokens import digest


def test_a_new_key_is_printed_once_and_kept_as_its_digest(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    runner = CliRunner()
    keys = [runner.invoke(app, ["acme", "--file", str(file)]).stdout.strip() for _ in range(2)]
    assert keys[0] != keys[1]
    assert all(len(key) > 40 for key in keys)
    assert not any(key in file.read_text() for key in keys)
    assert file.stat().st_mode & 0o077 == 0
    assert load_keys(Access(keys_file=file), {}) == {digest(key): "acme" for key in keys}


@pytest.mark.parametrize("tenant", ["shared", "a b", "a/b", "", "-x" * 40])
def test_what_cannot_name_a_tenant_gets_no_key(tenant: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["--file", str(tmp_path / "keys"), "--", tenant])
    assert isinstance(result.exception, ConfigError)
    assert not (tmp_path / "keys").exists()
