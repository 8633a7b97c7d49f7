"""Discovery of workers by the labels of their pods: the router's fleet follows the API of Kubernetes.

- A worker joins when its pod runs, and leaves when its pod is deleted or is asked to end.
- While the API server does not answer, the fleet stays unchanged.
- A list of the API server is the whole truth. So a worker that it lacks leaves at once.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from pdserve.discovery.config import KubernetesConfig
from pdserve.discovery.kubernetes import PodWatch
from pdserve.discovery.pods import FoundPod, Scheme
from pdserve.errors import DiscoveryError
from pdserve.router.fleet.found import FoundWorkers
from pdserve.router.fleet.registry import Fleet
from pdserve.router.fleet.worker import ROLES

logger = logging.getLogger(__name__)


class PodDiscovery:
    """Keeps the fleet's members of source `kubernetes` equal to the workers' pods."""

    def __init__(
        self, config: KubernetesConfig, fleet: Fleet, environ: Mapping[str, str], scheme: Scheme
    ) -> None:
        """Connects at the first request. `scheme`: of workers' URLs. Raises ConfigError."""
        self._workers = FoundWorkers("kubernetes", fleet)
        self._watch = PodWatch(config, self._changed, environ, scheme)

    async def first(self) -> None:
        """List the pods once. If the API server does not answer, log a warning."""
        try:
            await self._watch.list()
        except DiscoveryError as error:
            logger.warning("Kubernetes does not tell of workers yet: %s", error)

    async def run(self) -> None:
        """Follow the pods until cancelled. Can be called again after a failure."""
        await self._watch.run()

    async def close(self) -> None:
        """Close the connections to the API server; after `run` was cancelled."""
        await self._watch.close()

    def _changed(self, pods: list[FoundPod]) -> None:
        self._workers.clear()
        for pod in pods:
            if pod.role in ROLES:  # the selector may match the router and the pool too
                self._workers.put(pod.name, pod.role, pod.url)
        self._workers.sync()
