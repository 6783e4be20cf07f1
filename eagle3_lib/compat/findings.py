"""A finding: how bad, what, where in the engine that stands, and what to do."""

from collections.abc import Iterable
from dataclasses import dataclass

SEVERITIES = ("ok", "note", "ignored", "wrong", "fails")


@dataclass(frozen=True)
class Finding:
    """One finding.

    severity: ok; note; ignored (not read, no effect); wrong (served without an error, drafts differ); fails (refused).
    source: engine, version, and the file inside its package.
    """

    severity: str
    rule: str
    what: str
    source: str
    remedy: str


def worst(findings: Iterable[Finding]) -> str:
    return max((finding.severity for finding in findings), key=SEVERITIES.index, default="ok")
