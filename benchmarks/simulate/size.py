"""How many workers there are of each role, and what else a simulation needs to know. Pure."""

from __future__ import annotations

import msgspec

from benchmarks.simulate.rates import Rates
from pdserve.router.config.router import RouterConfig
from pdserve.router.config.slo import ServiceLevel
from pdserve.router.fleet.worker import Role

POLICY = "cache_aware"


class Size(msgspec.Struct, frozen=True, kw_only=True):
    """Workers of each role."""

    prefill: int = 0
    decode: int = 0
    elastic: int = 0
    agg: int = 0

    @property
    def total(self) -> int:
        """All workers."""
        return self.prefill + self.decode + self.elastic + self.agg

    def __str__(self) -> str:
        return " + ".join(f"{count} {role}" for role, count in msgspec.structs.asdict(self).items() if count)


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """What is the same for all sizes."""

    rates: Rates
    level: ServiceLevel
    max_running: int = 128
    worker_blocks: int = 1024
    """Blocks of 512 tokens in a worker's own memory."""
    pool_blocks: int | None = None
    """In the pool; None: no bound."""
    knows_places: bool = False
    """The router knows what workers and the pool have of each prompt, in place of what it believes."""
    min_prefill_tokens: int = 0
    """0: the sizes differ by where prompts are computed, so all prompts have the prefill stage."""
    seed: int = 1

    def router(self, size: Size) -> RouterConfig:
        """The configuration of the router before workers of this size. It knows the rates as they are."""
        base = RouterConfig()
        rates = self.rates
        placement: dict[str, object] = {
            "prefill_ms_per_token": rates.prefill_ms_per_token,
            "pool_ms_per_token": rates.pool_ms_per_token,
        }
        counts: dict[Role, int] = {
            "prefill": size.prefill,
            "decode": size.decode,
            "agg": size.agg,
            "elastic": size.elastic,
        }
        urls: dict[Role, tuple[str, ...]] = {
            role: tuple(f"http://{role}{number}:1" for number in range(count))
            for role, count in counts.items()
        }
        return msgspec.structs.replace(
            base,
            **urls,
            min_prefill_tokens=self.min_prefill_tokens,
            prefill_policy=POLICY,
            decode_policy=POLICY,
            placement=msgspec.structs.replace(base.placement, **placement),
            slo=self.level,
        )
