"""A node's namespaces: opened, created, changed, replaced, dropped; and rights to use them. Pure.

    opened by a worker    A new name gets a record with the node's default settings; its first worker decides
                          the geometry. A dropped name comes back with its settings. Where the node has an
                          admin token, only its holder does that, or a holder of the name's write token.
    put                   An administrator creates or changes it. A replaced name comes back. Its own
                          administrator changes its tokens; its limits are the node's administrator's.
    replaced              `new` takes over the settings of `old`, unless it has its own. `old` is dropped;
                          clients that open it are told its replacement.
    dropped               No lookup finds its pages from this call on. Generation and version grow. Its
                          tenants (namespaces/tenants.py) go with it; `#TENANT` is a tenant in all models.
    learned               Another node changed the record. Pages of an older generation, or of another
                          geometry, are dropped before any page of it is served. So are all pages where some
                          were erased while this node was away.

Each change is saved, carried out, published to the other nodes, and only then answered.
"""

from __future__ import annotations

import difflib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias, assert_never

import msgspec

from pdserve.kvpool.core.events import Action, PublishNamespace, SaveNamespaces
from pdserve.kvpool.core.sessions import Session
from pdserve.kvpool.namespaces import access
from pdserve.kvpool.namespaces.catalog import Namespace, Namespaces
from pdserve.kvpool.namespaces.registry import (
    EVERYBODY,
    MAX_NAMESPACES_PER_TOKEN,
    NamespaceError,
    check_geometry,
    check_record,
    check_settings,
    check_tenant_settings,
)
from pdserve.kvpool.namespaces.tenants import MARK, name_of, split
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.cluster_messages import (
    ListNamespaces,
    NamespaceList,
    NamespaceRecord,
    NamespaceSettings,
    PutNamespace,
    ReplaceNamespace,
)
from pdserve.kvpool.protocol.handshake import key_id
from pdserve.security.tokens import same

NEAR_NAMES: Final = 8  # looked at for a name that was mistyped
NEAR_CHARS: Final = 64  # of each
OnGone: TypeAlias = Callable[[int, bool, list[Action]], int]
OnSettings: TypeAlias = Callable[[int, NamespaceSettings], None]
AdminRequest: TypeAlias = m.OpenNamespace | m.DropNamespace | PutNamespace | ReplaceNamespace | ListNamespaces


@dataclass(frozen=True)
class Rules:
    """The node's configuration of namespaces. Tokens are digests."""

    admin_token: str = ""
    defaults: NamespaceSettings = field(default_factory=NamespaceSettings)
    named: Mapping[str, NamespaceSettings] = field(default_factory=dict)


class Administration:
    """The namespaces of one node. `on_gone(number, is_tenant, out)` frees everything of a namespace, and
    returns the number of its pages; `on_void(number, out)` frees its pages only. `on_settings(number,
    settings)` is called when a namespace is opened, and when its settings change. `started_ms`: the clock's
    millisecond of the node's start.
    """

    def __init__(
        self,
        node: str,
        capacity_bytes: int,
        largest_page_bytes: int,
        namespaces: Namespaces,
        rules: Rules,
        on_gone: OnGone,
        on_void: Callable[[int, list[Action]], None],
        on_settings: OnSettings,
        started_ms: int,
    ) -> None:
        self.namespaces = namespaces
        self.guarded: set[int] = set()  # numbers of namespaces with tokens
        self.denials = 0
        self.revision = 0  # of all settings: rights derived under an earlier revision are derived anew
        self._node = node
        self._capacity_bytes = capacity_bytes
        self._largest_page_bytes = largest_page_bytes
        self._rules = rules
        self._on_gone = on_gone
        self._on_void = on_void
        self._started_ms = started_ms
        self._on_settings = on_settings
        self._opens = _Opens([], [])
        self._opens_at = -1  # the registry's changes, when `_opens` was made
        self._configure()
        for namespace in namespaces:
            self._settings_changed(namespace)

    def _configure(self) -> None:
        """Create the namespaces of the configuration. An administrator's changes to a known one stay, unless
        the configuration changed since the last start.
        """
        registry, before = self.namespaces.registry, self.namespaces.configured
        for name, settings in self._rules.named.items():
            known = registry.get(name)
            if known is None:
                if before.get(name) != settings:  # else it was dropped long ago
                    registry.change(registry.changed(registry.fresh(name, settings)))
            elif before.get(name, settings) != settings and known.settings != settings:
                registry.change(registry.changed(known, settings=settings))
        self.namespaces.configured = dict(self._rules.named)

    # --- rights

    def rights(self, session: Session, number: int) -> int:
        """The client's rights in a namespace of this node, as a bit mask (access.READ and so on)."""
        if number not in self.guarded or self._is_super(session):
            return m.ALL
        revision, found = session.rights.get(number, (-1, 0))
        if revision != self.revision:
            found = access.rights_of(session.token, self.namespaces.settings(number))
            session.rights[number] = self.revision, found
        return found

    def may_write(self, session: Session) -> bool:
        """Whether the client may write to any namespace: one that there is, or a new one."""
        if self._is_super(session) or self._may_make(session, self._rules.defaults):
            return True
        return self._tokens().may_write(session.token)

    def refusal(self, session: Session, message: m.Request) -> m.Fault | None:
        """Why the client may not make this request; None when it may. Whether it may open or list namespaces,
        `handle` finds out.
        """
        if self.authorized(session, message):
            return None
        self.denials += 1
        request_id: int = getattr(message, "id", 0)
        scope, right = access.NEEDED[type(message)]
        if scope == "pool":
            return access.denied_peer(self._node, request_id)
        if scope == "node":
            return access.denied_here(self._node, type(message).__name__, request_id)
        if scope == "name" and (name := _named(message)).startswith(MARK):
            return access.denied_here(self._node, "deleting a tenant", request_id)
        if scope == "name":
            return access.denied_change(name, request_id)
        number: int = getattr(message, "namespace", 0)
        may_see = self.rights(session, number) & m.READ  # numbers can be tried, and names tell
        name = f"'{self.namespaces[number].name}'" if may_see else f"number {number}"
        return access.denied(name, right, request_id)

    def authorized(self, session: Session, message: m.Request) -> bool:
        """Whether the client has the right that the request needs."""
        needed = access.NEEDED.get(type(message))
        if needed is None:
            return True
        scope, right = needed
        if scope == "namespace":
            return bool(self.rights(session, getattr(message, "namespace", 0)) & right)
        if scope == "name":
            return any(self._may_administer(session, one) for one in self._guards_of(_named(message)))
        return session.peer if scope == "pool" else self._is_operator(session)

    def token_digest(self, named: bytes) -> str:
        """The digest of the token with this key id, if it is the node's or any namespace's; else empty."""
        return self._tokens().by_key_id.get(named, "")

    def _tokens(self) -> _Opens:
        """What the namespaces' tokens open. Made anew after a change, not for each client that asks."""
        registry = self.namespaces.registry
        if self._opens_at != registry.changes:
            digests = {self._rules.admin_token, *access.guards(self._rules.defaults)}
            self._opens, self._opens_at = _Opens(registry, digests), registry.changes
        return self._opens

    def _is_super(self, session: Session) -> bool:
        return session.peer or same(session.token, self._rules.admin_token)

    def _is_operator(self, session: Session) -> bool:
        return not self._rules.admin_token or self._is_super(session)

    def _may_make(self, session: Session, settings: NamespaceSettings) -> bool:
        """Whether the client may open a namespace with these settings that is not there."""
        if self._is_operator(session):
            return True
        return access.guards(settings)[1] != "" and bool(access.rights_of(session.token, settings) & m.WRITE)

    def _check_makes(self, session: Session, record: NamespaceRecord) -> None:
        """Raises NamespaceError: the holders of a token have as many as one may make."""
        if self._is_operator(session):
            return
        self.namespaces.registry.check_spare(record)
        guard = access.guards(record.settings)[1]
        living = (known for known in self.namespaces.registry if not known.dropped)
        made = sum(access.guards(known.settings)[1] == guard for known in living)
        if made >= MAX_NAMESPACES_PER_TOKEN:
            raise NamespaceError(
                "too_many_namespaces",
                f"{made} namespaces have this write token, at most {MAX_NAMESPACES_PER_TOKEN} may be made "
                "with one: drop those that are not used, or let the node's administrator make more",
            )

    def _has(self, session: Session, settings: NamespaceSettings, right: int) -> bool:
        """Whether the client has the right in a namespace with these settings."""
        return self._is_super(session) or bool(access.rights_of(session.token, settings) & right)

    def _may_administer(self, session: Session, record: NamespaceRecord | None) -> bool:
        return self._is_operator(session) if record is None else self._has(session, record.settings, m.ADMIN)

    def _require_operator(self, session: Session, what: str, request_id: int) -> None:
        """Raises Denied."""
        if not self._is_operator(session):
            raise Denied(access.denied_here(self._node, what, request_id))

    # --- requests

    def handle(self, session: Session, request: AdminRequest, out: list[Action]) -> m.Reply:
        """Carry out the request; the answer."""
        try:
            match request:
                case m.OpenNamespace():
                    return self._open(session, request, out)
                case PutNamespace():
                    return self._put(session, request, out)
                case ReplaceNamespace():
                    return self._replace(session, request, out)
                case m.DropNamespace():
                    return self._drop(session, request, out)
                case ListNamespaces():
                    return self._list(session, request)
                case _:
                    assert_never(request)
        except Denied as error:
            self.denials += 1
            return error.fault
        except NamespaceError as error:
            return m.Fault(request.id, error.code, str(error))

    def _open(self, session: Session, request: m.OpenNamespace, out: list[Action]) -> m.Opened:
        if split(request.name)[1]:
            return self._open_tenant(session, request, out)
        registry = self.namespaces.registry
        known = registry.get(request.name)
        is_new = known is None or known.dropped
        settings = self._rules.defaults if known is None else known.settings
        # strangers get here, and no further, on one way for all names
        if not self._has(session, settings, m.WRITE if is_new else m.READ):
            raise Denied(access.denied_open(request.name, request.id))
        if known is not None and known.replaced_by:
            raise NamespaceError(
                "namespace_replaced",
                f"namespace '{known.name}' was replaced by '{known.replaced_by}': start the worker with "
                "that revision (an administrator can bring the old one back: pdserve pool ns create)",
            )
        if is_new and not self._may_make(session, settings):
            raise Denied(access.denied_open(request.name, request.id))
        generation = request.generation if session.peer else 0  # only nodes know generations
        record = known or registry.fresh(request.name, settings)
        if known is None and generation:
            record = msgspec.structs.replace(record, generation=generation)
        local = self.namespaces.find(record.name)
        if generation and (record.dropped or record.generation != generation):
            # one of the two nodes has not heard of a drop yet: the pages must not come back
            raise NamespaceError("unknown_namespace", f"namespace '{record.name}' was dropped meanwhile")
        if is_new:
            self._check_makes(session, msgspec.structs.replace(record, geometry=dict(request.geometry)))
        elif local is None and not record.geometry and not self._has(session, record.settings, m.WRITE):
            raise Denied(access.denied_first(record.name, request.id))
        if local is not None or record.geometry:
            geometry = record.geometry if local is None else local.geometry
            check_geometry(request.name, geometry, request.geometry)
        if is_new or request.geometry != record.geometry:
            record = registry.changed(record, geometry=dict(request.geometry), dropped=False)
            check_record(record)
            registry.change(record)
            out.append(PublishNamespace(record))
        return self._opened(session, request.id, local, record, out)

    def _open_tenant(self, session: Session, request: m.OpenNamespace, out: list[Action]) -> m.Opened:
        """Whoever may write to the model's namespace makes those of its tenants."""
        registry, model = self.namespaces.registry, split(request.name)[0]
        parent, known = registry.get(model), registry.get(request.name)
        is_new = known is None or known.dropped
        settings = self._rules.defaults if parent is None else parent.settings
        if not self._has(session, settings, m.WRITE if is_new else m.READ):
            raise Denied(access.denied_open(request.name, request.id))
        generation = request.generation if session.peer else 0
        record = known or registry.fresh(request.name, NamespaceSettings())
        if known is None and generation:
            record = msgspec.structs.replace(record, generation=generation)
        outdated = generation and (record.dropped or record.generation != generation)
        if parent is None or parent.dropped or outdated:
            raise NamespaceError("unknown_namespace", f"namespace '{request.name}' was dropped, or '{model}'")
        local = self.namespaces.find(record.name)
        geometry = parent.geometry if local is None else local.geometry
        if geometry:
            check_geometry(request.name, geometry, request.geometry)
        if is_new:
            if not self._is_operator(session):
                registry.check_spare(record)
            record = registry.changed(record, dropped=False)
            check_record(record)
            registry.change(record)
            out.append(PublishNamespace(record))
        opened = msgspec.structs.replace(record, geometry=dict(request.geometry))
        return self._opened(session, request.id, local, opened, out)

    def _opened(
        self,
        session: Session,
        request_id: int,
        local: Namespace | None,
        record: NamespaceRecord,
        out: list[Action],
    ) -> m.Opened:
        """The answer, once the namespace is open on this node."""
        if local is None:
            local = self.namespaces.add(record)
            self._settings_changed(local)
            self._save(out)
        rights = self.rights(session, local.number)
        return m.Opened(request_id, local.number, rights, self._largest_page_bytes)

    def _of_tenant(self, name: str) -> list[NamespaceRecord]:
        """The records of `#TENANT`, of all models."""
        return [one for one in self.namespaces.registry if split(one.name)[1] == name.removeprefix(MARK)]

    def _guards_of(self, name: str) -> list[NamespaceRecord | None]:
        """What guards a name, of `#TENANT` what guards it in each model; None: nothing does."""
        if name.startswith(MARK):
            return [self._guarding(one.name) for one in self._of_tenant(name)] or [None]
        return [self._guarding(name)]

    def _guarding(self, name: str) -> NamespaceRecord | None:
        """The record whose tokens guard the namespace: a tenant's has those of its model."""
        return self.namespaces.registry.get(split(name)[0])

    def _put(self, session: Session, request: PutNamespace, out: list[Action]) -> m.Done:
        registry = self.namespaces.registry
        known, guarding = registry.get(request.name), self._guarding(request.name)
        known = known or registry.fresh(request.name, NamespaceSettings())
        if known.dropped and not self._is_operator(session):
            registry.check_spare(known)
        settings = _with_kept_tokens(request.settings, known.settings)
        if _without_tokens(settings) != _without_tokens(known.settings):
            self._require_operator(session, f"changing the limits of namespace '{known.name}'", request.id)
        check_settings(settings, self._capacity_bytes, tokens_allowed=bool(self._rules.admin_token))
        if split(request.name)[1]:
            check_tenant_settings(request.name, settings)
            if guarding is None or guarding.dropped:
                raise NamespaceError("unknown_namespace", f"'{split(request.name)[0]}' is not there")
        self._change(registry.changed(known, settings=settings, dropped=False, replaced_by=""), out)
        return m.Done(request.id)

    def _replace(self, session: Session, request: ReplaceNamespace, out: list[Action]) -> m.Done:
        registry = self.namespaces.registry
        old, new = self._known(request.old), registry.get(request.new)
        if request.old == request.new:
            raise NamespaceError("bad_request", f"namespace '{request.old}' cannot replace itself")
        if split(request.old)[1] or split(request.new)[1]:
            raise NamespaceError("bad_request", "a tenant's namespace is replaced with that of its model")
        is_new = new is None
        if new is None:
            if not self._may_make(session, self._rules.defaults):
                raise Denied(access.denied_change(request.new, request.id))
            new = registry.fresh(request.new, old.settings)
        else:
            if not self._may_administer(session, new):
                raise Denied(access.denied_change(new.name, request.id))
        if (is_new or new.dropped) and not self._is_operator(session):
            registry.check_spare(new)
        has_own = not is_new and new.settings not in (self._rules.defaults, NamespaceSettings())
        settings = new.settings if has_own else old.settings
        # `new` first: if it is refused, `old` must stay
        if is_new or new.dropped or new.settings != settings:
            self._change(registry.changed(new, settings=settings, dropped=False, replaced_by=""), out)
        count = 0
        for tenant in registry.tenants_of(old.name):
            theirs = name_of(new.name, split(tenant.name)[1])
            if tenant.settings != NamespaceSettings() and registry.get(theirs) is None:
                self._change(registry.changed(registry.fresh(theirs, tenant.settings)), out)
            count += self._change(registry.dropped(tenant), out)
        return m.Done(request.id, count + self._change(registry.dropped(old, request.new), out))

    def _drop(self, session: Session, request: m.DropNamespace, out: list[Action]) -> m.Done:
        registry = self.namespaces.registry
        if request.name.startswith(MARK):
            named = self._of_tenant(request.name)
            known = [one for one in named if self._may_administer(session, self._guarding(one.name))]
        else:
            known = registry.tenants_of(request.name)
            known += [one] if (one := registry.get(request.name)) is not None else []
        living = [one for one in known if not one.dropped]
        return m.Done(request.id, sum(self._change(registry.dropped(one), out) for one in living))

    def _list(self, session: Session, request: ListNamespaces) -> NamespaceList:
        """All for the node's administrator; for others those that they administer by a token."""
        registry = self.namespaces.registry
        if self._is_operator(session):
            found = sorted(registry, key=lambda record: record.name)
        else:
            names = self._tokens().administered.get(session.token, [])
            found = [record for name in sorted(names) if (record := registry.get(name)) is not None]
            found += [one for record in list(found) for one in registry.tenants_of(record.name)]
        if not found:
            self._require_operator(session, "the list of namespaces", request.id)
        shown = [
            msgspec.structs.replace(record, settings=access.redacted(record.settings)) for record in found
        ]
        return NamespaceList(request.id, shown)

    def _known(self, name: str) -> NamespaceRecord:
        """Raises NamespaceError."""
        found = self.namespaces.registry.get(name)
        if found is not None:
            return found
        near = nearest(name, [record.name for record in self.namespaces.registry])
        hint = f": did you mean '{near}'?" if near else ""
        raise NamespaceError("unknown_namespace", f"no namespace is named '{name}'{hint}")

    # --- changes

    def learn(self, records: Iterable[NamespaceRecord], out: list[Action]) -> None:
        """Take in records of other nodes."""
        registry, news, void = self.namespaces.registry, list[NamespaceRecord](), list[str]()
        for record in records:
            before = registry.get(record.name)
            if (joined := registry.learn(record)) is None:
                continue
            news.append(joined)
            if self._missed_ms(joined) > (0 if before is None else self._missed_ms(before)):
                void.append(joined.name)
        if news:
            self._carry_out(news, out)
        for local in filter(None, map(self.namespaces.find, void)):
            self._on_void(local.number, out)

    def void_at(self, number: int, away: Iterable[str], out: list[Action]) -> None:
        """Pages were erased while these nodes were away: they void what they have of the namespace."""
        record = self.namespaces.registry.get(self.namespaces[number].name)
        if record is not None:
            self._change(self.namespaces.registry.voided(record, away), out)

    def _missed_ms(self, record: NamespaceRecord) -> int:
        """When pages of the namespace were last erased without this node, as far as it is known."""
        everywhere_ms = record.voided.get(EVERYBODY, 0)
        return max(record.voided.get(self._node, 0), everywhere_ms if everywhere_ms < self._started_ms else 0)

    def _close(self, local: Namespace) -> None:
        """Close the namespace on this node. Its pages are to be freed."""
        self.namespaces.drop(local.name)
        self.revision += 1
        self.guarded.discard(local.number)

    def _change(self, record: NamespaceRecord, out: list[Action]) -> int:
        """Make a change of this node; the number of pages that it drops. Raises NamespaceError."""
        check_record(record)
        self.namespaces.registry.change(record)
        count = self._carry_out([record], out)
        out.append(PublishNamespace(record))
        return count

    def _carry_out(self, records: Iterable[NamespaceRecord], out: list[Action]) -> int:
        """Act on new records of the registry; the number of pages that are dropped."""
        gone, changed = dict[int, Namespace](), list[Namespace]()
        for record in records:
            local = self.namespaces.find(record.name)
            theirs = self.namespaces.tenants(record.name)
            for one in theirs if local is None else [local, *theirs]:
                other_pages = record.geometry not in ({}, one.geometry)
                other_pages |= one is local and record.generation > one.generation
                if record.dropped or other_pages or (local is not None and local.number in gone):
                    gone[one.number] = one
                else:
                    changed.append(one)
        for one in gone.values():
            self._close(one)
        for one in changed:
            if one.number not in gone:
                self._settings_changed(one)
        self._save(out)  # first: after a crash from here on these pages do not come back
        return sum(self._on_gone(number, split(one.name)[1] != "", out) for number, one in gone.items())

    def _settings_changed(self, namespace: Namespace) -> None:
        number = namespace.number
        settings = self.namespaces.settings(number)
        if access.is_guarded(settings):
            self.guarded.add(number)
        else:
            self.guarded.discard(number)
        self.revision += 1
        self._on_settings(number, settings)

    def _save(self, out: list[Action]) -> None:
        out.append(SaveNamespaces(self.namespaces.dump(), self.namespaces.revision))


class _Opens:
    """What tokens open, by their digests. `others`: digests that belong to no namespace."""

    def __init__(self, records: Iterable[NamespaceRecord], others: Iterable[str]) -> None:
        self.administered: dict[str, list[str]] = {}  # the namespaces that a token administers
        self._writers: set[str] = set()
        self._open = False  # a namespace may be written to without a token
        digests = set(others)
        for record in records:
            if split(record.name)[1]:
                continue  # its tokens are those of its model
            guards = _, write, admin = access.guards(record.settings)
            digests.update(guards)
            self._writers.update((write, admin))
            self._open = self._open or not write
            if admin:
                self.administered.setdefault(admin, []).append(record.name)
        self.by_key_id = {key_id(digest): digest for digest in digests if digest}

    def may_write(self, token: str) -> bool:
        """Whether the holder of this token may write to any namespace."""
        return self._open or (bool(token) and token in self._writers)


def _named(message: m.Request) -> str:
    """The namespace, or `#TENANT`, that an administrator's request names."""
    name: str = message.old if isinstance(message, ReplaceNamespace) else getattr(message, "name", "")
    return name


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name that is most like this one, or an empty string. Bounded: it looks at the `NEAR_NAMES`
    before and after it in order, which have the longest beginnings in common, and at `NEAR_CHARS` of each.
    """
    ordered = sorted(known)
    at = bisect_left(ordered, name)
    heads = {other[:NEAR_CHARS]: other for other in ordered[max(0, at - NEAR_NAMES) : at + NEAR_NAMES]}
    return next((heads[head] for head in difflib.get_close_matches(name[:NEAR_CHARS], heads, n=1)), "")


def _without_tokens(settings: NamespaceSettings) -> NamespaceSettings:
    return msgspec.structs.replace(settings, **dict.fromkeys(access.TOKENS, ""))


def _with_kept_tokens(settings: NamespaceSettings, known: NamespaceSettings) -> NamespaceSettings:
    kept = {name: getattr(known, name) for name in access.TOKENS if getattr(settings, name) == access.KEPT}
    return msgspec.structs.replace(settings, **kept)


class Denied(Exception):
    """A right is missing; `fault` says which."""

    def __init__(self, fault: m.Fault) -> None:
        super().__init__(fault.message)
        self.fault = fault
