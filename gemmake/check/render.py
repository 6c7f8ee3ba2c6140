"""Reports as text and as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from gemmake.check.rules import FATAL, Report, Severity
from gemrun.format.writer import show


def allow_any_terminal() -> None:
    """A terminal without UTF-8 gets "?" for the marks, never an error."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def as_text(reports: Sequence[Report], verbose: bool) -> str:
    """All findings; with several files each has its name before them."""
    out: list[str] = []
    for report in reports:
        if len(reports) > 1:
            out.append(f"{show(report.path)}:")
        out += lines(report, verbose, named=len(reports) > 1)
    return "\n".join(out)


def lines(report: Report, verbose: bool, *, named: bool = False) -> list[str]:
    """The finding lines; hints follow what did not pass. `named`: a heading names the file."""
    if report.exit_code == FATAL:
        finding = report.findings[0]
        file = "" if named else f"{show(report.path)}: "
        remedy = f"; {finding.hint}" if finding.hint else ""
        return [f"{finding.severity.value} Artifact refused: {file}{finding.text}{remedy}"]
    out = []
    for finding in report.findings:
        out.append(finding.line)
        bad = finding.severity is Severity.ERROR
        if finding.hint and (bad or (verbose and finding.severity is Severity.WARNING)):
            out.append(f"  {finding.hint}")
        out += [f"  {line}" for line in finding.details if verbose]
    return out


def as_json(reports: Sequence[Report]) -> str:
    """One object for one file, a list for several; keys are stable."""
    listed = [_object(report) for report in reports]
    return json.dumps(listed[0] if len(listed) == 1 else listed, ensure_ascii=False, indent=2)


def _object(report: Report) -> dict[str, Any]:
    return {
        "file": report.path,
        "ok": report.exit_code == 0,
        "exit_code": report.exit_code,
        "code": report.code,
        "size": report.size,
        "root_sha256": report.root_sha256,
        "findings": [
            {
                "rule": f.rule,
                "severity": f.severity.name.lower(),
                "text": f.text,
                "hint": f.hint,
                **({"details": list(f.details)} if f.details else {}),
            }
            for f in report.findings
        ],
    }
