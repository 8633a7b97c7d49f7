"""What the API of Kubernetes says of pods: its lists and changes, and which pods are workers. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, TypeVar

import msgspec

from pdserve.discovery.config import KubernetesConfig
from pdserve.errors import DiscoveryError

T = TypeVar("T")
Scheme = Literal["http", "https"]

GONE: Final = 410
"""The API server has forgotten the version that was asked for."""
SHOWN_CHARS: Final = 200


@dataclass(frozen=True)
class FoundPod:
    """A running pod with a role and an address."""

    name: str
    role: str
    url: str


class Metadata(msgspec.Struct, frozen=True, rename="camel"):
    """Of an object; also of a bookmark, which has a version alone."""

    name: str = ""
    namespace: str = ""
    resource_version: str = ""
    labels: dict[str, str] | None = None
    deletion_timestamp: str | None = None


class _Port(msgspec.Struct, frozen=True, rename="camel"):
    container_port: int
    name: str = ""


class _Container(msgspec.Struct, frozen=True):
    ports: list[_Port] | None = None


class _Spec(msgspec.Struct, frozen=True):
    containers: list[_Container] = []
    hostname: str = ""
    subdomain: str = ""


class _Status(msgspec.Struct, frozen=True, rename={"pod_ip": "podIP"}):
    phase: str = ""
    pod_ip: str = ""


class _Pod(msgspec.Struct, frozen=True):
    metadata: Metadata
    spec: _Spec = _Spec()
    status: _Status = _Status()


class Named(msgspec.Struct, frozen=True):
    """Any object, as far as its metadata."""

    metadata: Metadata = Metadata()


class ListMetadata(msgspec.Struct, frozen=True, rename={"version": "resourceVersion", "rest": "continue"}):
    """`rest` asks for the next page; empty after the last one."""

    version: str = ""
    rest: str = ""


class PodPage(msgspec.Struct, frozen=True):
    """One page of a list. Each pod is read by itself, so that one bad pod hides no other."""

    metadata: ListMetadata
    items: list[msgspec.Raw] | None = None


class Change(msgspec.Struct, frozen=True):
    """A line of a watch: ADDED, MODIFIED, DELETED, BOOKMARK or ERROR."""

    type: str
    object: msgspec.Raw


class ApiStatus(msgspec.Struct, frozen=True):
    """A refusal in the API server's form."""

    code: int = 0
    message: str = ""


class PodReader:
    """Which pods are workers, and where they are reached. `pass_over(name, why)` hears of mistakes."""

    def __init__(
        self, config: KubernetesConfig, scheme: Scheme, pass_over: Callable[[str, str], None]
    ) -> None:
        self._config = config
        self._scheme = scheme
        self._pass_over = pass_over

    def read(self, item: msgspec.Raw) -> FoundPod | None:
        """The pod, if it is a worker that runs and stays."""
        try:
            pod = parsed(item, _Pod)
        except DiscoveryError as error:
            self._pass_over("a pod", str(error))
            return None
        meta, status = pod.metadata, pod.status
        role = (meta.labels or {}).get(self._config.role_label, "")
        if not role or meta.deletion_timestamp is not None or status.phase != "Running" or not status.pod_ip:
            return None
        try:
            return FoundPod(meta.name, role, self._url(pod))
        except ValueError as error:
            self._pass_over(meta.name, str(error))
            return None

    def _url(self, pod: _Pod) -> str:
        """Raises ValueError."""
        ports = [port for one in pod.spec.containers for port in one.ports or ()]
        number = next((port.container_port for port in ports if port.name == self._config.port_name), None)
        if number is None:
            raise ValueError(f"no container has a port named {self._config.port_name!r}")
        if self._config.address == "name":
            if not (pod.spec.hostname and pod.spec.subdomain):
                raise ValueError("it has no hostname and subdomain, as pods of a StatefulSet have")
            host = f"{pod.spec.hostname}.{pod.spec.subdomain}.{pod.metadata.namespace}.svc"
        else:
            address = ipaddress.ip_address(pod.status.pod_ip)
            host = f"[{address}]" if address.version == 6 else str(address)
        return f"{self._scheme}://{host}:{number}"


def parsed(text: bytes | msgspec.Raw, type_: type[T]) -> T:
    """Raises DiscoveryError for what is not of this form."""
    try:
        return msgspec.json.decode(text, type=type_)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise DiscoveryError(f"an answer that is not the API server's: {shown(str(error))}") from None


def reason(body: bytes) -> str:
    """What a refusal says, as part of one line."""
    try:
        return shown(parsed(body, ApiStatus).message)
    except DiscoveryError:
        return shown(body[:SHOWN_CHARS].decode(errors="replace"))


def shown(text: str) -> str:
    """What others wrote, as part of one line of our log."""
    return ascii(text[:SHOWN_CHARS])[1:-1]
