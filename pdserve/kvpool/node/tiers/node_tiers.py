"""The tiers of one node: opened in order at its start, one worker each, stopped at its end.

A node that takes over from a running one (`pdserve pool upgrade`) goes on without a tier that it cannot open:
one that hangs may be held by the program before for as long as that runs. The next start has it again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from pdserve.errors import ConfigError, PdserveError
from pdserve.kvpool.core.events import Event, ForgetNamespace, ForgetPages, LoadPages, StorePages
from pdserve.kvpool.core.tiering.tier_index import TieringLimits, TierSpec
from pdserve.kvpool.namespaces.catalog import Namespaces
from pdserve.kvpool.namespaces.takeover import take_over
from pdserve.kvpool.node.config.node import PoolNodeConfig, TierConfig
from pdserve.kvpool.node.tiers.worker import TierWorker
from pdserve.kvpool.protocol.page_bytes import Bytes1D
from pdserve.kvpool.tiers.base import PageName, TierSettings
from pdserve.kvpool.tiers.registry import open_tier

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S: Final = 5.0
CLAIM_TIMEOUT_S: Final = 3.0  # for the node before to let go of the tiers, all together
CLAIM_POLL_S: Final = 0.02
LOAD_SHARE: Final = 0.25  # of the arena may be filling from tiers


class NodeTiers:
    """Opening is quick; what is in the tiers is found in the background, after `start`."""

    def __init__(
        self, config: PoolNodeConfig, memory: Bytes1D, namespaces: Namespaces, *, takes_over: bool = False
    ) -> None:
        """Raises ConfigError, StartupError; not where it takes over from a running node."""
        self._config = config
        self._deliver: Callable[[Event], None] | None = None
        self._opened: list[TierConfig] = []
        self._workers: list[TierWorker] = []
        claim_until_s = time.monotonic() + CLAIM_TIMEOUT_S
        try:
            for tier in config.tiers:
                worker = self._claim(tier, memory, claim_until_s) if takes_over else self._open(tier, memory)
                if worker is not None:
                    self._opened.append(tier)
                    self._workers.append(worker)
        except PdserveError:
            self._close()
            raise
        for above, below in zip(self._workers, self._workers[1:], strict=False):
            above.below = below
        saved = [worker.tier.namespaces() for worker in self._workers]
        self.namespaces, self._believed, problems = take_over(namespaces, saved)
        for problem in problems:
            logger.warning("node %s: tiers: pages are dropped: %s", config.name, problem)
        if config.fresh and not takes_over:
            self._believed = [set() for _ in self._workers]

    def _claim(self, config: TierConfig, memory: Bytes1D, until_s: float) -> TierWorker | None:
        """The tier, or None where it cannot be opened in time. Blocks."""
        while True:
            try:
                return self._open(config, memory)
            except PdserveError as error:
                if isinstance(error, ConfigError) or time.monotonic() >= until_s:
                    logger.warning("%s: the node goes on without this tier until its next start", error)
                    return None
            time.sleep(CLAIM_POLL_S)

    def _open(self, config: TierConfig, memory: Bytes1D) -> TierWorker:
        number = len(self._workers)

        def leaving(names: Sequence[PageName]) -> None:
            self._workers[number].leaving(names)

        settings = TierSettings(self._config.name, config.path, config.capacity, config.options, leaving)
        tier = open_tier(config.kind, settings)
        return TierWorker(self._config.name, number, config.kind, tier, memory, self._post)

    @property
    def specs(self) -> list[TierSpec]:
        """For NodeState."""
        return [
            TierSpec(f"{tier.kind}:{tier.path}", tier.kind, tier.capacity, tier.write)
            for tier in self._opened
        ]

    @property
    def limits(self) -> TieringLimits:
        """For NodeState."""
        return TieringLimits(
            watermark=self._config.tier_watermark,
            load_bytes=int(self._config.capacity * LOAD_SHARE),
            promotion_timeout_s=self._config.promotion_timeout_s,
        )

    def start(self, deliver: Callable[[Event], None]) -> None:
        """Begin to work. `deliver` takes events from any thread."""
        self._deliver = deliver
        for worker, believed, config in zip(self._workers, self._believed, self._opened, strict=True):
            worker.start(believed, self.namespaces.dump(), config.threads)

    def stop(self) -> None:
        """Within STOP_TIMEOUT_S, all together. Blocks."""
        if self._deliver is None:
            self._close()
            return
        deadline_s = time.monotonic() + STOP_TIMEOUT_S
        for worker in self._workers:
            worker.stop(deadline_s)

    def acts(self) -> dict[type, Callable[[Any], None]]:
        """What carries out the actions that concern tiers."""
        return {
            StorePages: lambda action: self._workers[action.tier].store(action),
            LoadPages: lambda action: self._workers[action.tier].load(action),
            ForgetPages: lambda action: self._workers[action.tier].forget(action),
            ForgetNamespace: self._forget_namespace,
        }

    def save_namespaces(self, text: str) -> None:
        """Keep the list for a start after a reboot."""
        for worker in self._workers:
            worker.save_namespaces(text)

    def _forget_namespace(self, action: ForgetNamespace) -> None:
        for worker in self._workers:
            worker.forget_namespace(action)

    def _post(self, event: Event) -> None:
        assert self._deliver is not None
        self._deliver(event)

    def _close(self) -> None:
        for worker in self._workers:
            worker.tier.close()
