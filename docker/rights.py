"""What a container of ours may do, as it sees it itself."""

import json

from engine import Engine, Failed

# Runs in the container.
_ASK = """
import json, os, shutil
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
tools = ("cc", "gcc", "g++", "c++", "clang", "nvcc", "as", "ld", "make")
print(json.dumps({
    "user": [os.getuid(), os.getgid()],
    "capabilities": int(status["CapEff"], 16) | int(status["CapPrm"], 16) | int(status["CapBnd"], 16),
    "no new privileges": status["NoNewPrivs"].strip() == "1",
    "read-only root": bool(os.statvfs("/").f_flag & os.ST_RDONLY),
    "not writable": [place for place in ("/models", "/tmp") if not os.access(place, os.W_OK)],
    "compilers": [tool for tool in tools if shutil.which(tool)],
}))
"""
AS_IT_SHOULD_BE = {
    "user": [10001, 10001],
    "capabilities": 0,
    "no new privileges": True,
    "read-only root": True,
    "not writable": [],
    "compilers": [],
}


def check_rights(engine: Engine, service: str, container: str) -> None:
    """Raises Failed where it is root, may write what it should not or not what it should, or has a compiler."""
    said = json.loads(engine.podman("exec", container, "python", "-c", _ASK))
    wrong = {name: value for name, value in said.items() if value != AS_IT_SHOULD_BE[name]}
    if wrong:
        raise Failed(f"{service} is not as locked down as it should be: {wrong}")
