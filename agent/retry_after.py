"""The Retry-After header, for whoever sends: channels and the drills' prober."""

from __future__ import annotations

import math
from datetime import UTC
from email.utils import parsedate_to_datetime


def retry_after_s(text: str | None, now: float) -> float | None:
    """Seconds to wait by a Retry-After header (seconds, or an HTTP date); None where it says nothing usable."""
    if text is None:
        return None
    try:
        wait_s = float(text)
    except ValueError:
        try:
            when = parsedate_to_datetime(text)
        except (ValueError, OverflowError):  # the latter: 'Mon, 30 Nov 2026 06:52:9999999999999999999'
            return None
        wait_s = when.replace(tzinfo=when.tzinfo or UTC).timestamp() - now
    return max(0.0, wait_s) if math.isfinite(wait_s) else None
