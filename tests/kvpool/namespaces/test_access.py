from __future__ import annotations

import itertools

import pytest

from pdserve.kvpool.namespaces.access import KEPT, guards, redacted, rights_of
from pdserve.kvpool.protocol.cluster_messages import NamespaceSettings
from pdserve.kvpool.protocol.messages import ALL, READ, WRITE
from pdserve.security.tokens import digest, digest_of_setting, is_digest, same

R, W, A = digest("r"), digest("w"), digest("a")


@pytest.mark.parametrize(
    ("read", "write", "admin", "expected"),
    [  # rights of: nobody, r, w, a
        ("", "", "", (ALL, ALL, ALL, ALL)),
        (R, W, A, (0, READ, READ | WRITE, ALL)),
        ("", W, A, (READ, READ, READ | WRITE, ALL)),
        ("", W, "", (READ, READ, ALL, READ)),
        (R, "", "", (0, ALL, 0, 0)),
        ("", "", A, (READ | WRITE, READ | WRITE, READ | WRITE, ALL)),
        (R, "", A, (0, READ | WRITE, 0, ALL)),
    ],
)
def test_a_right_is_guarded_by_its_token_or_by_the_one_below(
    read: str, write: str, admin: str, expected: tuple[int, ...]
) -> None:
    settings = NamespaceSettings(read_token=read, write_token=write, admin_token=admin)
    assert tuple(rights_of(presented, settings) for presented in ("", R, W, A)) == expected


def test_rights_include_those_below_and_nothing_is_more_open_than_what_it_includes() -> None:
    for read, write, admin, presented in itertools.product(["", R, W, A], repeat=4):
        settings = NamespaceSettings(read_token=read, write_token=write, admin_token=admin)
        rights = rights_of(presented, settings)
        if any((read, write, admin)):
            assert rights_of("", settings) != ALL
            assert rights_of(digest("else"), settings) == rights_of("", settings)
        assert rights in (0, READ, READ | WRITE, ALL)
        open_to_all = [not guard for guard in guards(settings)]
        assert open_to_all == sorted(open_to_all, reverse=True)


def test_digests_are_taken_as_they_are_and_plain_tokens_are_hashed() -> None:
    assert digest("") == ""
    assert is_digest(digest("x"))
    assert digest_of_setting("x") == digest("x")
    assert digest_of_setting(f"sha256:{digest('x').upper()}") == digest("x")
    assert not is_digest(digest_of_setting("sha256:abc"))


def test_whoever_knows_a_digest_does_not_know_the_token() -> None:
    assert digest(f"sha256:{digest('x')}") != digest("x")
    assert not same("", "")
    assert same(R, R)
    assert not same(R, W)


def test_a_list_shows_of_a_token_only_that_there_is_one() -> None:
    shown = redacted(NamespaceSettings(write_token=W, weight=3))
    assert (shown.read_token, shown.write_token, shown.admin_token) == ("", KEPT, "")
    assert shown.weight == 3
