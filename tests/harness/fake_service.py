"""A service without a model, run as a script: announces itself, serves health, and misbehaves as its flags say."""

import argparse
import asyncio
import signal
import subprocess
import sys

from outrider.net.server import Server, run_until_signal


async def main(flags: argparse.Namespace) -> None:
    if flags.fail:
        print("loading", file=sys.stderr)
        print(f"error: {flags.fail}", file=sys.stderr)
        sys.exit(2)
    if flags.grandchild:
        process = subprocess.Popen(["sleep", "600"])  # noqa: ASYNC220
        print(f"grandchild {process.pid}", file=sys.stderr)
    server = Server("outrider.v1.Fake")
    port = await server.start("127.0.0.1", 0)
    if not flags.stubborn:
        # Whoever reads the announcement may send a signal at once.
        until_signal = asyncio.create_task(run_until_signal([lambda: server.stop(1.0)]))
        await asyncio.sleep(0)
    print(f"listening on 127.0.0.1:{port}", flush=True)
    if not flags.never_ready:
        await asyncio.sleep(flags.load_seconds)
        await server.ready()
    if flags.stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("deaf", file=sys.stderr, flush=True)
        await asyncio.Event().wait()
    await until_signal


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--fail", default="")
    parser.add_argument("--load-seconds", type=float, default=0.0)
    for flag in ("--never-ready", "--stubborn", "--grandchild"):
        parser.add_argument(flag, action="store_true")
    asyncio.run(main(parser.parse_args()))
