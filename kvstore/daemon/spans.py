"""Which of the pages a worker announces its peer is owed. Pure."""

from __future__ import annotations

from kvferry.handoff import Grant, PagesReady

__all__ = ["owed_part"]


def owed_part(span: PagesReady, grant: Grant) -> PagesReady | None:
    """``span`` cut to the tokens [cached_tokens, tokens) that ``grant`` takes; None where nothing is left."""
    first = max(span.first_token, grant.cached_tokens)
    end = min(span.first_token + span.tokens, grant.tokens)
    if end <= first or not span.layers:
        return None
    return PagesReady(span.first_layer, span.layers, first, end - first)
