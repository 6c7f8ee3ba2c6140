"""What follows from the word of an error (errors.py); apart, for the command's quick start."""

from __future__ import annotations

EXIT_CODES: dict[str, int] = {
    "bad_request": 2,
    "unreachable": 3,
    "refused": 4,
    "layout": 4,
    "no_memory": 5,
    "not_found": 6,
    "forbidden": 7,
    "failed": 8,
    "internal": 8,
    "busy": 9,
    "timeout": 9,
    "conflict": 10,
    "no_space": 11,
    "cancelled": 130,
}
# What the caller did wrong, or asked for: no failure of the service.
BY_CALLER = frozenset({"bad_request", "forbidden", "not_found", "conflict", "cancelled"})
RETRYABLE = frozenset({"busy", "timeout", "cancelled"})
