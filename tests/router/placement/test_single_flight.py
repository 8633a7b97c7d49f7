"""One prompt that many ask for at once: who has it computed, who waits, and who takes over."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdserve.router.placement.prefix_index import Prefix
from pdserve.router.placement.single_flight import SingleFlight

BLOCK_TOKENS = 256
PROMPTS = st.text("ab", max_size=4)


def prefix(letters: str) -> Prefix:
    """A block for each letter; prompts with the same first letters begin alike."""
    return Prefix(tuple(hash(("x", letters[: i + 1])) for i in range(len(letters))))


class Flights(RuleBasedStateMachine):
    """Requests that lead, follow, leave and end, in any order."""

    MOST = 3

    def __init__(self) -> None:
        super().__init__()
        self.flights: SingleFlight[int] = SingleFlight(self.MOST)
        self.prompts: dict[int, str] = {}
        self.computing: list[int] = []
        """These lead, or are on their own."""
        self.following: list[int] = []

    @rule(letters=PROMPTS, cached=st.integers(0, 4))
    def begin(self, letters: str, cached: int) -> None:
        number = len(self.prompts)
        self.prompts[number] = letters
        tokens = BLOCK_TOKENS * len(letters) + 10
        uncached = max(0, tokens - BLOCK_TOKENS * cached)
        follows = self.flights.begin(number, prefix(letters), tokens, uncached)
        (self.following if follows else self.computing).append(number)
        assert not follows or any(self.prompts[n][:1] == letters[:1] != "" for n in self.computing)

    @precondition(lambda self: self.following)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(self.following))
        self.following.remove(number)
        self.flights.leave(number)

    @precondition(lambda self: self.computing)
    @rule(data=st.data(), computed=st.booleans())
    def end(self, data: st.DataObject, computed: bool) -> None:
        number = data.draw(st.sampled_from(self.computing))
        self.computing.remove(number)
        told, successor = self.flights.end(number, computed=computed)
        assert not (told and successor is not None), "either it is computed, or somebody takes over"
        assert computed or not told, "nobody fails with the leader, and nobody is told of what is not there"
        for follower, blocks in told.items():
            self.following.remove(follower)
            assert self.prompts[follower][:blocks] == self.prompts[number][:blocks]
            assert blocks > 0
        if successor is not None:
            self.following.remove(successor)
            self.computing.append(successor)

    @invariant()
    def somebody_computes_while_others_wait(self) -> None:
        assert not self.following or self.computing

    def teardown(self) -> None:
        """Whatever the order: all that wait are told, and nothing is left behind."""
        while self.computing:
            told, successor = self.flights.end(self.computing.pop(), computed=False)
            assert not told
            if successor is not None:
                self.following.remove(successor)
                self.computing.append(successor)
        assert self.following == []
        assert not self.flights.begin(-1, prefix("ab"), 512, 512)
        assert not self.flights.begin(-2, prefix("ba"), 512, 512), "every flight is over"


TestFlights = Flights.TestCase


@given(letters=st.text("abc", min_size=1, max_size=8), followers=st.integers(1, 30))
def test_of_requests_with_one_prompt_one_computes_and_the_others_follow(letters: str, followers: int) -> None:
    flights: SingleFlight[int] = SingleFlight()
    tokens = BLOCK_TOKENS * len(letters)
    followed = [flights.begin(n, prefix(letters), tokens, tokens) for n in range(followers + 1)]
    assert followed == [False] + [True] * followers
    told, _ = flights.end(0, computed=True)
    assert told == dict.fromkeys(range(1, followers + 1), len(letters))


def test_a_request_waits_only_where_that_saves_half_and_not_for_a_much_longer_prompt() -> None:
    for leader, follower, uncached, follows in [
        ("aaaa", "aabb", 512, False),  # what they share is cached
        ("aaaa", "aabb", 1024, True),
        ("aaaa", "abbb", 1024, False),  # a quarter is shared
        ("aaaaaaaa", "aaa", 768, False),  # the leader has much more to compute
        ("aaaa", "aaa", 768, True),
    ]:
        flights: SingleFlight[str] = SingleFlight()
        assert not flights.begin("leader", prefix(leader), BLOCK_TOKENS * len(leader), 4096)
        tokens = BLOCK_TOKENS * len(follower)
        assert flights.begin("follower", prefix(follower), tokens, uncached) is follows, (leader, follower)


def test_beyond_the_bound_requests_compute_for_themselves() -> None:
    flights: SingleFlight[int] = SingleFlight(most_leaders=1)
    assert not flights.begin(0, prefix("a"), 256, 256)
    assert [flights.begin(n, prefix("b"), 256, 256) for n in (1, 2)] == [False, False]
    flights.end(1, computed=True)
    assert flights.begin(3, prefix("a"), 256, 256)
