"""`python -m outrider.net.probe`: whether the service of this container serves; for HEALTHCHECK and exec probes.

Asks grpc.health.v1 at OUTRIDER_HEALTH_ADDRESS, or in plain text at OUTRIDER_PORT: a service that wants TLS answers
there only to its peers, and needs the former. Imports gRPC alone, for it runs every few seconds.
"""

import os
import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

_SECONDS = 4.0
_ANYWHERE = ("0.0.0.0", "[::]")


def address(environment: "os._Environ[str] | dict[str, str]") -> str:
    """HOST:PORT to ask, from the variables that the service reads. Raises KeyError where neither is set."""
    asked = environment.get("OUTRIDER_HEALTH_ADDRESS") or f"127.0.0.1:{environment['OUTRIDER_PORT']}"
    host, _, port = asked.rpartition(":")
    return f"127.0.0.1:{port}" if host in _ANYWHERE else asked


def probe(peer: str, seconds: float = _SECONDS) -> str:
    """The name of the status at HOST:PORT, SERVING where all is well, or of the gRPC error."""
    with grpc.insecure_channel(peer) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=seconds)
        except grpc.RpcError as error:
            return str(error.code().name)
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


if __name__ == "__main__":
    status = probe(address(os.environ))
    print(status)
    sys.exit(status != "SERVING")
