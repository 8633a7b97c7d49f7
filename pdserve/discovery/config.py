"""Configuration of discovery: etcd, and the API of Kubernetes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from pdserve.tokens import Secret


class EtcdConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where etcd is, and what of it is ours."""

    endpoints: Annotated[
        list[str], Meta(description="etcd's client URLs, e.g. `http://10.0.0.1:2379`; tried in order.")
    ] = []
    prefix: Annotated[str, Meta(min_length=1, description="Keys are under `<prefix>/<cluster>/`.")] = (
        "/pdserve"
    )
    username: Annotated[str, Meta(description="User name in etcd, if etcd requires one.")] = ""
    password: Annotated[Secret, Meta(description="The user's password; also from PDSERVE_ETCD_PASSWORD.")] = (
        Secret("")
    )
    password_file: Annotated[Path | None, Meta(description="File that holds this secret instead.")] = None
    ca_file: Annotated[
        str, Meta(description="CA certificates that verify https endpoints; empty: the system's.")
    ] = ""
    certificate_file: Annotated[
        str, Meta(description="Our certificate, for an etcd that asks clients for one; empty: none.")
    ] = ""
    key_file: Annotated[str, Meta(description="The key of certificate_file; empty: in the same file.")] = ""
    timeout_s: Annotated[float, Meta(gt=0, description="Longest time of one request to etcd.")] = 2.0
    lease_s: Annotated[
        int, Meta(ge=1, description="A key ends when its owner has not renewed it for this long.")
    ] = 5
    retry_s: Annotated[float, Meta(gt=0, description="Pause before etcd is tried again after a failure.")] = (
        1.0
    )


ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where Kubernetes puts a pod's own token, namespace and the API's certificate authority."""


class KubernetesConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Workers that are pods of Kubernetes. The router's pod needs the right to list and watch pods."""

    selector: Annotated[
        str,
        Meta(
            description="Label selector of the workers' pods, like `app.kubernetes.io/instance=disagg`; "
            "empty: no discovery."
        ),
    ] = ""
    namespace: Annotated[str, Meta(description="Namespace of the pods; empty: this pod's own.")] = ""
    role_label: Annotated[
        str,
        Meta(
            min_length=1,
            description="Label whose value is the worker's role: prefill, decode, agg or elastic.",
        ),
    ] = "app.kubernetes.io/component"
    port_name: Annotated[
        str, Meta(min_length=1, description="Name of the container port that serves HTTP.")
    ] = "http"
    address: Annotated[
        Literal["ip", "name"],
        Meta(
            description="How workers are reached. name: HOSTNAME.SUBDOMAIN.NAMESPACE.svc, as certificates "
            "name the pods of a StatefulSet."
        ),
    ] = "ip"
    api: Annotated[str, Meta(description="URL of the API server; empty: as Kubernetes tells its pods.")] = ""
    token_file: Annotated[
        Path, Meta(description="Token of the service account; read again for each request.")
    ] = ACCOUNT / "token"
    ca_file: Annotated[Path, Meta(description="Certificate authority of the API server.")] = (
        ACCOUNT / "ca.crt"
    )
    timeout_s: Annotated[float, Meta(gt=0, description="Longest time of one request to the API server.")] = (
        5.0
    )
    watch_s: Annotated[
        int,
        Meta(ge=1, le=3600, description="Length of a watch. The next one goes on from the last change."),
    ] = 60
    retry_s: Annotated[
        float, Meta(gt=0, description="Pause before the API server is asked again after a failure.")
    ] = 1.0
