"""Pods of rendered files on hosts of a network, and what the kubelet does with them: volumes, variables,
probes, stop hooks, the time to end.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml

from tests.support.kubernetes.api_server import NAMESPACE
from tests.support.netns.lab import Lab, last_lines

Json = dict[str, Any]
NODE: Final = "node"
"""The host in the network that the kubelet is on."""
ACCOUNT: Final = "/var/run/secrets/kubernetes.io/serviceaccount"
UNITS: Final = {"Mi": 1 << 20, "Gi": 1 << 30}


@dataclass(frozen=True)
class Rendered:
    """What `pdserve render kubernetes` wrote, read as Kubernetes would."""

    directory: Path
    secrets: Path
    """Files of the Secret."""
    objects: dict[tuple[str, str], Json] = field(default_factory=dict)
    """By kind and name."""

    @staticmethod
    def read(directory: Path, secrets: Path) -> Rendered:
        made = Rendered(directory, secrets)
        base = yaml.safe_load((directory / "base/kustomization.yaml").read_text())
        for name in base["resources"]:
            for document in yaml.safe_load_all((directory / "base" / name).read_text()):
                made.objects[document["kind"], document["metadata"]["name"]] = document
        for config in base["configMapGenerator"]:
            files = dict(one.split("=") for one in config["files"])
            made.objects["ConfigMap", config["name"]] = {"files": files}
        return made

    def template(self, name: str) -> Json:
        """Of the pods of a workload."""
        workload = self.objects.get(("StatefulSet", name)) or self.objects["Deployment", name]
        found: Json = workload["spec"]["template"]
        return found

    def all(self, kind: str) -> list[Json]:
        """The objects of a kind."""
        return [one for (found, _), one in self.objects.items() if found == kind]

    @property
    def pods(self) -> dict[str, str]:
        """Workload by the name of each pod."""
        sets = {name: one for (kind, name), one in self.objects.items() if kind == "StatefulSet"}
        made = {f"{name}-{i}": name for name, one in sets.items() for i in range(one["spec"]["replicas"])}
        return made | {f"{name}-x": name for kind, name in self.objects if kind == "Deployment"}

    def service(self, workload: str) -> str:
        """The service that gives the workload's pods names of their own; empty: none does."""
        found = self.objects.get(("StatefulSet", workload), {"spec": {"serviceName": ""}})
        name: str = found["spec"]["serviceName"]
        return name


class Said(NamedTuple):
    """What a server answered."""

    status: int
    text: str
    headers: Mapping[str, str]
    """By names in lower case."""


class Ended(NamedTuple):
    """The end of a pod."""

    hook: int
    """Exit status of its stop hook; 0 where it has none."""
    status: int
    took_s: float


class Pod:
    """One pod of a workload, on a host of its own. `host`: in the network; its name is the pod's."""

    def __init__(
        self, rendered: Rendered, workload: str, host: str, network: Lab, directory: Path, **more: str
    ) -> None:
        """`more`: variables that Kubernetes adds, beside those of the template."""
        self.name = host
        self.address = network.address(host)
        self._network, self._rendered = network, rendered
        template = rendered.template(workload)
        self.labels: dict[str, str] = template["metadata"]["labels"]
        self.spec: Json = template["spec"]
        (self.container,) = self.spec["containers"]
        self.ports = {port["name"]: port["containerPort"] for port in self.container["ports"]}
        self._user: int = self.spec["securityContext"]["runAsUser"]
        self._directory = directory / host
        self._directory.mkdir()
        self.log_path = self._directory / "log"
        self._env = self._variables(more)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, hosts: Mapping[str, str], *command: str) -> None:
        """`hosts`: addresses by the names of pods. `command`: instead of the container's own."""
        program = str(Path(sys.executable).parent / "pdserve")
        words = [program, *(self._filled(word) for word in self.container["args"])]
        asked = {
            "hosts": dict(hosts),
            "volumes": list(self._volumes()),
            "user": self._user,
            "capabilities": self.container["securityContext"]["capabilities"].get("add", []),
            "env": self._env,
            "command": list(command) or words,
        }
        file = self._directory / "container.json"
        file.write_text(json.dumps(asked))
        with self.log_path.open("wb") as log:
            words = ["-m", "tests.support.kubernetes.contain", str(file), str(self._directory / "root")]
            self._process = self._network.start(self.name, *words, log=log)

    # --- what the kubelet does

    def await_started(self) -> None:
        """Until the startup probe and then the readiness probe hold, in the time that they have."""
        for name in ("startupProbe", "readinessProbe"):
            probe = self.container[name]
            until_s = time.monotonic() + probe["periodSeconds"] * probe["failureThreshold"]
            while not self.probe(name):
                assert self.runs, f"{self.name} ended: {self.log()}"
                assert time.monotonic() < until_s, f"{self.name}, {name}: {self.log()}"
                time.sleep(0.1)

    def probe(self, name: str) -> bool:
        """One try of a probe, from the host that the kubelet is on."""
        probe = self.container[name]
        asked = probe.get("httpGet") or probe["tcpSocket"]
        port = self.ports[asked["port"]]
        timeout_s = probe["timeoutSeconds"]

        def tried() -> bool:
            try:
                if "httpGet" in probe:
                    return 200 <= ask(self.address, port, asked["path"], timeout_s=timeout_s)[0] < 400
                socket.create_connection((self.address, port), timeout_s).close()
            except (OSError, http.client.HTTPException):
                return False
            return True

        return self._network.call(NODE, tried)

    def stop(self) -> Ended:
        """As a pod that is deleted: hook, SIGTERM, and SIGKILL when its time is over, which is a failure."""
        began_s = time.monotonic()
        left_s = float(self.spec["terminationGracePeriodSeconds"])
        assert self._process is not None
        hook = 0
        if found := self.container.get("lifecycle", {}).get("preStop"):
            hook = self.run(found["exec"]["command"], left_s).returncode
        self._process.terminate()
        try:
            status = self._process.wait(max(2.0, began_s + left_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"{self.name} had to be killed: {self.log()}") from None
        return Ended(hook, status, time.monotonic() - began_s)

    def run(self, command: list[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
        """A command in the container, as its user, with its variables."""
        assert self._process is not None
        enter = ["nsenter", "-t", str(self._process.pid), "-m", "-n", "-r", "-S", str(self._user)]
        whole = [*enter, "-G", str(self._user), "--", *command]
        return subprocess.run(
            whole, env=self._env, capture_output=True, text=True, timeout=timeout_s, check=False
        )

    def kill(self) -> None:
        """All of its processes, at once."""
        for number in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        if self._process is not None:
            self._process.wait()

    @property
    def processes(self) -> list[int]:
        """Their numbers."""
        listed = ["ip", "netns", "pids", self._network.space(self.name)]
        done = subprocess.run(listed, capture_output=True, text=True, check=True)
        return [int(word) for word in done.stdout.split()]

    @property
    def runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def log(self) -> str:
        return last_lines(self.log_path)

    def as_object(self) -> Json:
        """What the API server shows of it."""
        name = self.container["name"]
        return {
            "metadata": {"name": self.name, "namespace": NAMESPACE, "labels": self.labels},
            "spec": {"containers": [{"name": name, "ports": self.container["ports"]}]},
            "status": {"phase": "Running", "podIP": self.address},
        }

    # --- what it starts with

    def _variables(self, more: Mapping[str, str]) -> dict[str, str]:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        made = {"PATH": path, "PYTHONDONTWRITEBYTECODE": "1", **more}  # as the image has them
        if "PYTHONPATH" in os.environ:
            made["PYTHONPATH"] = os.environ["PYTHONPATH"]
        for one in self.container["env"]:
            made[one["name"]] = one["value"] if "value" in one else self._fact(one["valueFrom"])
        return made

    def _fact(self, source: Json) -> str:
        return {"metadata.name": self.name, "status.podIP": self.address}[source["fieldRef"]["fieldPath"]]

    def _filled(self, word: str) -> str:
        return re.sub(r"\$\((\w+)\)", lambda found: self._env[found[1]], word)

    def _volumes(self) -> Iterator[Json]:
        """Mounts in the container's order."""
        volumes = {volume["name"]: volume for volume in self.spec["volumes"]}
        for mount in self.container["volumeMounts"]:
            volume = volumes[mount["name"]]
            made: Json = {"path": mount["mountPath"]}
            if "configMap" in volume:
                files = self._rendered.objects["ConfigMap", volume["configMap"]["name"]]["files"]
                base = self._rendered.directory / "base"
                made["source"] = self._projected(
                    "config", {name: base / path for name, path in files.items()}
                )
            elif "secret" in volume:
                items = {
                    one["path"]: self._rendered.secrets / one["key"] for one in volume["secret"]["items"]
                }
                made["source"] = self._projected("secrets", items, volume["secret"]["defaultMode"])
            elif "persistentVolumeClaim" in volume:
                made["source"] = str(self._directory.parent / volume["persistentVolumeClaim"]["claimName"])
            elif limit := volume["emptyDir"].get("sizeLimit"):
                made["size"] = int(limit[:-2]) * UNITS[limit[-2:]]
            yield made
        if self.spec["automountServiceAccountToken"]:
            account = self._directory.parent / "account"
            yield {
                "path": ACCOUNT,
                "source": self._projected("account", {path.name: path for path in account.iterdir()}),
            }

    def _projected(self, name: str, files: Mapping[str, Path], mode: int = 0o644) -> str:
        """Files as the kubelet lays them: links to a directory that it replaces as a whole."""
        directory = self._directory / name
        data = directory / "..data-1"
        data.mkdir(parents=True)
        (directory / "..data").symlink_to(data.name)
        for key, path in files.items():
            shutil.copyfile(path, data / key)
            (data / key).chmod(mode)
            os.chown(data / key, 0, self._user)
            (directory / key).symlink_to(f"..data/{key}")
        return str(directory)


def ask(
    address: str, port: int, path: str, key: str = "", body: Json | None = None, timeout_s: float = 20.0
) -> Said:
    """The answer to a GET, or to a POST with a body."""
    connection = http.client.HTTPConnection(address, port, timeout=timeout_s)
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    try:
        connection.request("GET" if body is None else "POST", path, body and json.dumps(body), headers)
        answer = connection.getresponse()
        headers = {name.lower(): value for name, value in answer.getheaders()}
        return Said(answer.status, answer.read().decode(), headers)
    finally:
        connection.close()
