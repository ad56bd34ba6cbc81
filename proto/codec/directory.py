"""Requests and answers of the directory ↔ messages of directory.proto.

Each ``read_*`` raises ValueError where a message does not make a valid value; the RPC layer turns that into a ProtocolError.
"""

from __future__ import annotations

from kvferry.control import (
    Announce,
)
from kvferry.node import NodeInfo
from kvferry.proto import directory_pb2
from kvferry.proto.codec.shared import (
    read_node_info,
    write_node_info,
)

__all__ = [
    "read_announce",
    "read_nodes",
    "write_announce",
    "write_nodes",
]


def write_announce(value: Announce) -> directory_pb2.AnnounceRequest:
    return directory_pb2.AnnounceRequest(node=write_node_info(value.node), ttl_seconds=value.ttl_seconds)


def read_announce(message: directory_pb2.AnnounceRequest) -> Announce:
    if not message.ttl_seconds > 0:
        raise ValueError("an announcement holds for a positive time")
    return Announce(read_node_info(message.node), message.ttl_seconds)


def write_nodes(value: tuple[NodeInfo, ...]) -> directory_pb2.ListNodesResponse:
    return directory_pb2.ListNodesResponse(nodes=[write_node_info(node) for node in value])


def read_nodes(message: directory_pb2.ListNodesResponse) -> tuple[NodeInfo, ...]:
    return tuple(read_node_info(node) for node in message.nodes)
