"""Whether a metrics endpoint answers, with metrics of ours."""

import asyncio
import http.client
import urllib.error
import urllib.request

from outrider.cli.doctor.findings import Finding, broken, ok

_LONGEST = 8 << 20


async def scraped(address: str, seconds: float) -> list[Finding]:
    """One GET /metrics."""
    return [await asyncio.to_thread(_scrape, address, seconds)]


def _scrape(address: str, seconds: float) -> Finding:
    subject = f"metrics {address}"
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=seconds) as answer:
            text = answer.read(_LONGEST).decode(errors="replace")
    except urllib.error.HTTPError as error:
        return broken("metrics", subject, f"GET /metrics is answered with {error.code}", _ADVICE)
    except http.client.HTTPException:
        return broken("metrics", subject, "it answers, and does not speak HTTP", _ADVICE)
    except (OSError, ValueError) as error:
        return broken("metrics", subject, f"GET /metrics is not answered: {getattr(error, 'reason', error)}", _ADVICE)
    ours = {line.partition("{")[0].partition(" ")[0] for line in text.splitlines() if line.startswith("outrider_")}
    if not ours:
        return broken("metrics", subject, "it answers, without any metric of Outrider's", _ADVICE)
    return ok("metrics", subject, f"{len(ours)} metrics of Outrider's")


_ADVICE = "start the service with --metrics-address, and give that address here"
