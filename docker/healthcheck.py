"""A container's health: exit status 0 if the process answers, 1 if not. The argument is its http:// URL or its gRPC HOST:PORT."""

import sys
import urllib.request

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

SECONDS = 2.0


def http(url: str) -> None:
    with urllib.request.urlopen(url, timeout=SECONDS):  # noqa: S310 - the image gives the URL
        pass  # any status but 2xx and 3xx raises


def grpc_health(target: str) -> None:
    with grpc.insecure_channel(target) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=SECONDS)  # type: ignore[attr-defined] # its stubs lack it
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        raise ConnectionError(f"{target} is not serving")


def main() -> int:
    where = sys.argv[1]
    try:
        http(where) if where.startswith("http://") else grpc_health(where)
    except Exception as error:  # noqa: BLE001 - whatever the reason, the answer is "not healthy"
        print(f"{where}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
