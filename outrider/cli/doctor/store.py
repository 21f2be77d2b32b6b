"""The session store, looked at by the orchestrator's own code, in a process of its own: services are not imported."""

import asyncio
import json
import os
import sys
from dataclasses import dataclass, field

from outrider.cli.doctor.findings import Finding, Level, broken
from outrider.net.address import without_credentials

_MODULE = "orchestrator.store.checkup"


@dataclass(frozen=True)
class StoreSettings:
    """As an orchestrator has them.

    Attributes:
        url: session store; empty: it is not looked at.
        password_file: with its password; empty for none.
        wait_replicas: that must have a write before it counts.
    """

    url: str = field(default="", repr=False)
    password_file: str = ""
    wait_replicas: int = 0


async def store(settings: StoreSettings, seconds: float) -> list[Finding]:
    """What the checks of the store found; the process ends with them."""
    # Not as flags: everybody on the machine may read those, and the URL may have a password.
    told = {
        "OUTRIDER_STORE": settings.url,
        "OUTRIDER_STORE_PASSWORD_FILE": settings.password_file,
        "OUTRIDER_STORE_WAIT_REPLICAS": str(settings.wait_replicas),
        "OUTRIDER_STORE_TIMEOUT": str(seconds),
    }
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", _MODULE),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **told},
    )
    try:
        out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    subject = f"store {without_credentials(settings.url)}"
    found = [
        Finding(each["check"], subject, Level(each["level"]), each["seen"], each["advice"])
        for each in map(json.loads, out.decode().splitlines())
    ]
    if process.returncode:
        last = err.decode(errors="replace").strip().splitlines()[-1:]
        found.append(
            broken("store", subject, f"the checks ended early: {''.join(last)}", "is Outrider installed whole?")
        )
    return found
