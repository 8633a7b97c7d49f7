"""Which data parallel rank a request goes to."""

from __future__ import annotations

from pdserve.engine.sglang.tokenizer_manager import MORE_REQUESTS, DpRanks
from pdserve.pages import page_hashes

PAGE = 4
IDLE = [0, 0, 0]


def chain(*tokens: int) -> list[bytes]:
    return page_hashes(tokens, PAGE)


def test_conversations_go_round_and_each_stays_where_it_began() -> None:
    ranks = DpRanks(3)
    first = [chain(i, *range(8)) for i in range(3)]
    assert [ranks.choose(one, IDLE) for one in first] == [0, 1, 2]
    second = [chain(i, *range(8), *range(20, 27)) for i in (2, 0, 1)]
    assert [ranks.choose(one, IDLE) for one in second] == [2, 0, 1]
    third = [chain(i, *range(8), *range(20, 27), 5, 5, 5, 5) for i in (1, 2)]
    assert [ranks.choose(one, IDLE) for one in third] == [1, 2]


def test_prompts_that_only_begin_alike_are_spread() -> None:
    ranks = DpRanks(3)
    system = range(100, 108)
    assert [ranks.choose(chain(*system, i, i, i, i), IDLE) for i in range(6)] == [0, 1, 2, 0, 1, 2]


def test_a_rank_that_is_much_busier_than_another_loses_its_conversations_to_it() -> None:
    ranks = DpRanks(2)
    begun = chain(*range(8))
    assert ranks.choose(begun, [0, 5]) == 0
    busy = 2 * 3 + MORE_REQUESTS
    assert ranks.choose(begun, [busy, 3]) == 0
    assert ranks.choose(begun, [busy + 1, 3]) == 1
    assert ranks.choose(begun, [0, 5]) == 1


def test_short_prompts_go_where_the_fewest_requests_are() -> None:
    ranks = DpRanks(3)
    assert [ranks.choose([], load) for load in ([1, 0, 1], [1, 1, 0], [0, 0, 0])] == [1, 2, 0]


def test_the_oldest_prompts_are_forgotten() -> None:
    ranks = DpRanks(2, remembered=2)
    prompts = [chain(*[i] * PAGE) for i in range(3)]
    assert [ranks.choose(one, [0, 0]) for one in prompts] == [0, 1, 0]
    assert ranks.choose(prompts[0], [0, 0]) == 1  # as if it were new
    assert ranks.choose(prompts[2], [0, 0]) == 0
