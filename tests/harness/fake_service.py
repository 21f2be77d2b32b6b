"""A service without a model, run as a script: announces itself, serves health, and misbehaves as its flags say."""

import argparse
import asyncio
import signal
import subprocess
import sys

from outrider.net.server import Server, close_each, on_signal


async def main(flags: argparse.Namespace) -> None:
    if flags.fail:
        print("loading", file=sys.stderr)
        print(f"error: {flags.fail}", file=sys.stderr)
        sys.exit(2)
    if flags.grandchild:
        process = subprocess.Popen(["sleep", "600"])  # noqa: ASYNC220
        print(f"grandchild {process.pid}", file=sys.stderr)
    server = Server("outrider.v1.Fake")
    stopped = asyncio.Event() if flags.stubborn else on_signal()
    port = await server.start("127.0.0.1", 0)
    print(f"listening on 127.0.0.1:{port}", flush=True)
    if not flags.never_ready:
        await asyncio.sleep(flags.load_seconds)
        await server.ready()
    if flags.stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("deaf", file=sys.stderr, flush=True)
        await asyncio.Event().wait()
    await stopped.wait()
    await close_each([lambda: server.stop(1.0)])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--fail", default="")
    parser.add_argument("--load-seconds", type=float, default=0.0)
    for flag in ("--never-ready", "--stubborn", "--grandchild"):
        parser.add_argument(flag, action="store_true")
    asyncio.run(main(parser.parse_args()))
