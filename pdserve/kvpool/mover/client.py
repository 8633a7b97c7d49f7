"""The scheduler's side of the page mover: the calls of `ChainClient`, for host pools that both share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from pdserve.errors import PoolError, PoolRefused, PoolUnavailable
from pdserve.kvpool.client.config import PoolClientConfig
from pdserve.kvpool.client.operations import CLEAR_TIMEOUT_S
from pdserve.kvpool.mover.chain_client import Moved
from pdserve.kvpool.mover.host_pages import HostPart
from pdserve.kvpool.mover.messages import VERSION, Call, Check, Checked, Clear, Done, Exists, Move, Start
from pdserve.kvpool.mover.supervisor import MoverSupervisor
from pdserve.pages import KV
from pdserve.security.tokens import reveal_secret

GRACE_S = 1.0  # the mover's own client gives up in time; this is for its answer


class MoverClient:
    """One rank's pages of one namespace, moved by a page mover. Thread-safe.

    Operations raise PoolUnavailable where the mover failed; faults of the pool are misses. When a call
    returns or raises, nothing reads or writes the host pools any more.
    """

    def __init__(
        self,
        config: PoolClientConfig,
        namespace: str,
        geometry: Mapping[str, str],
        parts: Mapping[str, HostPart],
        *,
        name: str = "client",
        ranks: str = "",
    ) -> None:
        """Starts the mover. `parts`: the host pools by part, `KV` among them. `ranks`: as in `Start`. Raises
        StartupError.
        """
        self.config = config
        pool = msgspec.to_builtins(config, enc_hook=reveal_secret)

        def start(lanes: list[int]) -> Start:
            return Start(
                version=VERSION,
                lanes=lanes,
                parts=dict(parts),
                pool=pool,
                namespace=namespace,
                geometry=dict(geometry),
                name=name,
                ranks=ranks,
            )

        self._supervisor = MoverSupervisor(start)

    @property
    def pid(self) -> int | None:
        """The mover's process id; None while it is started again."""
        return self._supervisor.pid

    @property
    def restarts(self) -> int:
        """How many movers were started after the first."""
        return self._supervisor.restarts

    def present(self, keys: Sequence[str], parts: Sequence[str] = (KV,)) -> list[list[bool]]:
        """As `ChainClient.present`."""
        done = self._done(Exists(list(keys), list(parts)), self.config.exists_timeout_s)
        count = len(keys)
        mask = self._whole_mask(done, count * len(parts))
        return [mask[number * count : (number + 1) * count] for number in range(len(parts))]

    def get(self, keys: Sequence[str], indices: bytes, part: str = KV) -> Moved:
        """Read pages into the part's host pool. `indices`: each page's first token there, int64 [pages]."""
        return self._move(Move(False, part, list(keys), indices), self.config.get_timeout_s)

    def put(self, keys: Sequence[str], indices: bytes, part: str = KV) -> Moved:
        """Write pages from the part's host pool. `indices`: as for `get`."""
        return self._move(Move(True, part, list(keys), indices), self.config.put_timeout_s)

    def clear(self) -> int:
        """As `ChainClient.clear`."""
        return self._done(Clear(), max(CLEAR_TIMEOUT_S, self.config.exists_timeout_s)).number

    def check(self) -> dict[str, PoolError | None]:
        """As `ChainClient.check`."""
        answer = self._supervisor.call(Check(), self._within(self.config.connect_timeout_s))
        if not isinstance(answer, Checked):
            raise PoolUnavailable(f"the page mover failed: {answer}")
        refused = set(answer.refused)
        return {
            node: (PoolRefused(text) if node in refused else PoolUnavailable(text)) if text else None
            for node, text in answer.errors.items()
        }

    def close(self) -> None:
        """End the mover. Idempotent. Operations in progress fail."""
        self._supervisor.close()

    def _move(self, call: Move, timeout_s: float) -> Moved:
        done = self._done(call, timeout_s)
        mask = self._whole_mask(done, len(call.keys))
        return Moved(mask, written=done.number)

    def _done(self, call: Call, timeout_s: float) -> Done:
        answer = self._supervisor.call(call, self._within(timeout_s))
        if not isinstance(answer, Done):
            raise PoolUnavailable(f"the page mover failed: {answer}")
        return answer

    @staticmethod
    def _whole_mask(done: Done, pages: int) -> list[bool]:
        if len(done.mask) != pages:
            raise PoolUnavailable(f"the page mover answered {len(done.mask)} of {pages} pages")
        return list(map(bool, done.mask))

    def _within(self, timeout_s: float) -> float:
        return timeout_s + self.config.restart_wait_s + GRACE_S
