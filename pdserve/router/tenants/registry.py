"""The tenants, found by API key. Pure: keys come here as digests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pdserve.errors import ConfigError
from pdserve.router.config.tenants import Tenant, TenantLimits
from pdserve.router.tenants.tenant import TenantState
from pdserve.security.tokens import same

ANONYMOUS = "anonymous"
"""The one tenant of a router without keys."""
_PREFIX_CHARS = 16


class Tenants:
    """All tenants, found by the digest of a key."""

    def __init__(self) -> None:
        self._by_name: dict[str, TenantState] = {}
        self._known: dict[str, TenantState] = {}
        """Also tenants whose keys were removed: their requests may still run, and a key may come back."""
        self._by_prefix: dict[str, list[tuple[str, TenantState]]] = {}
        self.has_keys = False
        self._granted: int | None = None

    @property
    def granted(self) -> int | None:
        """Share of its concurrency that a tenant may use in this process. Setting it changes all tenants."""
        return self._granted

    @granted.setter
    def granted(self, granted: int | None) -> None:
        self._granted = granted
        for state in self.known:
            state.granted = granted

    def configure(
        self,
        keys: Mapping[str, str],
        tenants: Iterable[Tenant],
        defaults: TenantLimits,
        now_s: float,
    ) -> None:
        """Take over keys (digest -> tenant) and limits. The use of known tenants stays. Raises ConfigError,
        and then changes nothing.
        """
        limits: dict[str, TenantLimits] = {}
        for tenant in tenants:
            if tenant.name in limits:
                raise ConfigError(f"tenant {tenant.name} is listed twice in [[tenants]]")
            limits[tenant.name] = tenant
        names = list(dict.fromkeys(keys.values())) or [ANONYMOUS]
        if keys and (keyless := [name for name in limits if name not in names]):
            raise ConfigError(
                f"tenant {keyless[0]} of [[tenants]] has no API key: add one to the keys, or drop it"
            )
        states = {}
        for name in names:
            state = self._known.get(name)
            if state is None:
                state = self._known[name] = TenantState(name, limits.get(name, defaults), now_s, self.granted)
            else:
                state.set_limits(limits.get(name, defaults), now_s)
            states[name] = state
        self._by_name = states
        self._by_prefix = {}
        for key, name in keys.items():
            self._by_prefix.setdefault(key[:_PREFIX_CHARS], []).append((key, states[name]))
        self.has_keys = bool(keys)

    @property
    def all(self) -> tuple[TenantState, ...]:
        """Tenants that have a key, in the order of the keys."""
        return tuple(self._by_name.values())

    @property
    def known(self) -> tuple[TenantState, ...]:
        """All tenants, also those whose keys were removed."""
        return tuple(self._known.values())

    def get(self, name: str) -> TenantState | None:
        """The tenant of this name. None: there is none."""
        return self._known.get(name)

    @property
    def anonymous(self) -> TenantState:
        """The tenant of a router without keys."""
        return self._by_name[ANONYMOUS]

    def find(self, key_digest: str) -> TenantState | None:
        """The tenant whose key has this digest, or None. A client cannot steer the digest that is looked up,
        and the whole digest is compared in constant time.
        """
        for known, tenant in self._by_prefix.get(key_digest[:_PREFIX_CHARS], ()):
            if same(key_digest, known):
                return tenant
        return None
