"""Which of the views that nodes tell counts, and whom a client asks next."""

from __future__ import annotations

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from pdserve.kvpool.client.routing import MAX_VIEWS, Rings, Search, ViewBook
from pdserve.kvpool.cluster.ring import Ring
from pdserve.kvpool.protocol.cluster_messages import View
from pdserve.kvpool.protocol.messages import NodeAddress


def nodes(*names: str) -> list[NodeAddress]:
    return [NodeAddress(name, f"tcp:{name}:1") for name in names]


def view(epoch: int, *names: str, previous: tuple[str, ...] = ()) -> View:
    return View(0, epoch, nodes(*names), nodes(*previous))


def names(book: ViewBook) -> list[str]:
    return [node.node for node in book.rings.ring.nodes]


KEYS = [hashlib.sha256(bytes([n])).digest() for n in range(200)]


def test_the_configured_list_holds_until_a_node_has_spoken() -> None:
    book = ViewBook(nodes("a", "b"))
    assert not book.on_view("a", 1, View(0, 0, nodes("a", "b", "c")))
    assert not book.on_view("a", 1, View(0, 5, []))
    assert names(book) == ["a", "b"]
    assert book.on_view("a", 1, view(5, "a", "b", "c"))
    assert (names(book), book.rings.epoch) == (["a", "b", "c"], 5)


def test_the_largest_epoch_counts_whoever_tells_it() -> None:
    book = ViewBook(nodes("a"))
    book.on_view("a", 1, view(5, "a", "b"))
    assert not book.on_view("b", 1, view(4, "a"))
    assert names(book) == ["a", "b"]
    assert book.on_view("b", 1, view(6, "b"))
    assert names(book) == ["b"]


def test_within_an_epoch_the_earlier_ring_only_goes() -> None:
    book = ViewBook(nodes("a"))
    book.on_view("a", 1, view(5, "a", "b", previous=("a",)))
    assert book.rings.previous is not None
    assert book.on_view("b", 1, view(5, "a", "b"))
    assert book.rings.previous is None
    assert not book.on_view("a", 1, view(5, "a", "b", previous=("a",)))
    assert book.rings.previous is None


def test_a_view_read_late_does_not_undo_a_later_one_of_the_same_node() -> None:
    book = ViewBook(nodes("a"))
    book.on_view("a", 1, view(7, "a", "b"))
    assert not book.on_view("a", 1, view(6, "a"))
    assert book.rings.epoch == 7


def test_a_pool_started_anew_is_believed_once_nobody_speaks_for_the_old_one() -> None:
    book = ViewBook(nodes("a", "b"))
    book.on_view("a", 1, view(90, "a", "b", "c"))
    book.on_view("b", 2, view(90, "a", "b", "c"))
    assert not book.on_view("a", 3, view(2, "a", "b"))  # b may be right
    assert book.on_unreachable("b")
    assert (names(book), book.rings.epoch) == (["a", "b"], 2)
    assert not book.on_view("a", 1, view(91, "a"))  # of its earlier life, read late
    assert book.on_view("b", 4, view(3, "a", "b"))


def test_when_nobody_can_be_reached_the_last_ring_stays() -> None:
    book = ViewBook(nodes("a"))
    book.on_view("a", 1, view(3, "a", "b"))
    assert not book.on_unreachable("a")
    assert names(book) == ["a", "b"]


def test_one_view_told_by_many_is_one_ring() -> None:
    book = ViewBook(nodes("a"))
    book.on_view("a", 1, view(3, "a", "b", previous=("a",)))
    rings = book.rings
    assert not book.on_view("b", 1, view(3, "b", "a", previous=("a",)))
    assert book.rings is rings
    book.on_view("b", 1, view(4, "a", "b", "c", previous=("a", "b")))
    assert book.rings.previous is rings.ring


def test_nodes_that_do_not_know_of_each_other_are_the_pool_of_the_configured_list() -> None:
    book = ViewBook(nodes("a", "b", "c"))
    assert not book.on_view("a", 1, view(7, "a"))
    assert not book.on_view("b", 1, view(8, "b"))
    assert names(book) == ["a", "b", "c"]
    assert not book.on_unreachable("a")
    assert names(book) == ["a", "b", "c"]  # c may be there
    assert book.on_view("c", 1, view(9, "a", "b", "c"))
    assert book.rings.epoch == 9


def test_the_last_node_of_a_pool_is_believed_once_the_others_are_gone() -> None:
    book = ViewBook(nodes("a", "b"))
    book.on_view("a", 1, view(5, "a", "b"))
    assert book.on_view("a", 1, view(6, "a"))  # it knew b, and knows more now
    assert names(book) == ["a"]
    assert book.on_view("b", 2, view(8, "a", "b"))
    book = ViewBook(nodes("a", "b"))
    assert not book.on_view("a", 1, view(6, "a"))  # b may be there
    assert names(book) == ["a", "b"]
    assert book.on_unreachable("b")
    assert (names(book), book.rings.epoch) == (["a"], 6)


def test_a_node_that_starts_anew_and_knows_nobody_yet_changes_nothing() -> None:
    book = ViewBook(nodes("a", "b"))
    book.on_view("a", 1, view(50, "a", "b"))
    assert not book.on_view("a", 2, view(9, "a"))
    assert names(book) == ["a", "b"]
    book.on_view("b", 1, view(50, "a", "b"))
    assert not book.on_view("a", 3, view(9, "a"))
    assert book.rings.epoch == 50


def test_one_seed_alone_is_a_pool_of_one() -> None:
    book = ViewBook(nodes("a"))
    assert book.on_view("a", 1, View(0, 6, [NodeAddress("a", "tcp:elsewhere:1", 4)]))
    assert book.rings.ring.nodes == (NodeAddress("a", "tcp:elsewhere:1", 4),)


def test_nonsense_is_passed_over() -> None:
    book = ViewBook(nodes("a"))
    assert not book.on_view("a", 1, view(3, "b", "b"))
    assert not book.on_view("a", 1, View(0, 4, [NodeAddress("b", "", 0)]))
    assert names(book) == ["a"]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 6)), max_size=30))
def test_the_view_that_counts_is_the_largest_of_the_last_words(words: list[tuple[str, int]]) -> None:
    book, last = ViewBook(nodes("a")), dict[str, int]()
    for node, epoch in words:
        book.on_view(node, 1, view(epoch, *"abc"[: 1 + epoch % 3]))
        last[node] = max(epoch, last.get(node, 0))
        assert book.rings.epoch == max(last.values())


@given(
    st.sets(st.sampled_from("abcd"), min_size=1),
    st.sets(st.sampled_from("abcd")),
    st.lists(st.sampled_from(["a", "b", "c", "d", ""]), min_size=200, max_size=200),
    st.lists(st.integers(0, 199), unique=True).map(sorted),
)
def test_whom_to_ask_next(now: set[str], before: set[str], asked: list[str], places: list[int]) -> None:
    rings = Rings(1, Ring(nodes(*now)), Ring(nodes(*before)) if before else None)
    found = rings.others(KEYS, places, {place: {node} for place, node in enumerate(asked)})
    by_place = {place: node for node, chosen in found.items() for place in chosen}
    for place in places:
        owners = [rings.ring.owner(KEYS[place]).node]
        owners += [rings.previous.owner(KEYS[place]).node] if rings.previous else []
        assert by_place.pop(place, None) == next((node for node in owners if node != asked[place]), None)
    assert not by_place
    assert all(chosen == sorted(chosen) for chosen in found.values())


def test_only_pages_with_another_earlier_owner_are_looked_for_there() -> None:
    rings = Rings(1, Ring(nodes("a", "b")), Ring(nodes("a")))
    before = rings.earlier(KEYS)
    assert list(before) == ["a"]
    assert before["a"] == rings.split(KEYS)["b"]
    assert Rings(1, Ring(nodes("a"))).earlier(KEYS) == {}


def test_an_empty_pool_has_nobody_to_ask() -> None:
    rings = Rings(0, Ring([]))
    assert rings.split(KEYS) == rings.others(KEYS, range(3), {}) == rings.earlier(KEYS) == {}


def test_a_search_asks_owner_and_earlier_owner_and_ends() -> None:
    rings = Rings(2, Ring(nodes("a", "b")), Ring(nodes("a")))
    search, asked = Search(KEYS, rings), [""] * len(KEYS)
    missed = range(len(KEYS))
    for node, places in rings.split(KEYS).items():
        for place in places:
            asked[place] = node
    moving = rings.split(KEYS)["b"]
    assert search.further(missed, asked, rings) == {"a": moving}
    for place in moving:
        asked[place] = "a"
    assert search.further(missed, asked, rings) == {}


def test_a_no_of_before_the_view_changed_is_worth_nothing() -> None:
    """The new owner said no, then the pages moved: now it has them, and nobody else."""
    moving, moved = Rings(2, Ring(nodes("b")), Ring(nodes("a"))), Rings(2, Ring(nodes("b")))
    for asked in ("b", "a"):  # the change came after the owner's answer, or after the earlier owner's
        search = Search(KEYS, moving)
        if asked == "a":
            assert search.further([7], ["b"] * len(KEYS), moving) == {"a": [7]}
        assert search.further([7], [asked] * len(KEYS), moved) == {"b": [7]}
        assert search.further([7], ["b"] * len(KEYS), moved) == {}


def test_a_search_ends_however_fast_the_view_changes() -> None:
    search = Search(KEYS, Rings(1, Ring(nodes("a"))))
    asked = [len(search.further([0], ["a"] * len(KEYS), Rings(n, Ring(nodes("a"))))) for n in range(2, 30)]
    assert sum(asked) == MAX_VIEWS - 1
