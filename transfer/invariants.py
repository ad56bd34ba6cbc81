"""What ``check_invariants`` methods say things with: an assertion that ``python -O`` keeps."""

from __future__ import annotations

__all__ = ["hold_true"]


def hold_true(condition: bool, what: str) -> None:
    """Raise AssertionError unless ``condition``; ``what`` is the sentence that should hold."""
    if not condition:
        raise AssertionError(f"does not hold: {what}")
