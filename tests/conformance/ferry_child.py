"""The other side of a path as a process of its own, to be killed: ``python -m tests.conformance.ferry_child ROLE ARGUMENT``.

``sender`` takes a ticket (JSON of its addresses and grant), announces all layers but the first, and waits.
``receiver`` takes a directory, opens one grant, prints its ticket, and never lets its second write end.
"""

from __future__ import annotations

import json
import sys
import threading
from dataclasses import asdict
from pathlib import Path as FilePath

from kvferry.config import PathPolicy
from kvferry.handoff import DataEndpoint, Grant, Ticket
from kvferry.types import BlockId, Epoch, GrantId, NodeAddress, RequestId
from tests.conformance.ferry_rig import FINGERPRINT, LAYOUT, Rig, Valve, spans_by_layer


def ticket_to_json(ticket: Ticket) -> str:
    return json.dumps({"grant": asdict(ticket.grant), "target": asdict(ticket.target), "endpoint": asdict(ticket.endpoint)})


def ticket_from_json(text: str) -> Ticket:
    raw = json.loads(text)
    grant = raw["grant"]
    return Ticket(
        Grant(
            GrantId(grant["grant"]), Epoch(grant["epoch"]), RequestId(grant["request"]),
            tuple(BlockId(block) for block in grant["blocks"]), grant["tokens"], grant["cached_tokens"],
        ),
        NodeAddress(**raw["target"]), DataEndpoint(**raw["endpoint"]), LAYOUT, FINGERPRINT,
    )  # fmt: skip


def run_sender(ticket: Ticket, policy: PathPolicy) -> None:
    source = Rig(FilePath()).source(policy)
    tokens = ticket.grant.tokens
    handoff = source.engine.open(ticket, source.blocks(tokens), 60)
    for span in reversed(spans_by_layer(ticket.grant, LAYOUT.layers)[1:]):  # backwards, so that each is a frame of its own
        handoff.ready(span)
    threading.Event().wait()


def run_receiver(directory: FilePath) -> None:
    target = Rig(directory).target()
    valve = Valve(after=1)
    target.gate.during = valve
    print(ticket_to_json(target.ticket(target.gate.open(LAYOUT.block_tokens * 3))), flush=True)
    valve.entered.wait()
    print("writing", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["sender", text, policy]:
            run_sender(ticket_from_json(text), PathPolicy(policy))
        case ["receiver", directory]:
            run_receiver(FilePath(directory))
        case _:
            sys.exit(__doc__)
