"""A report as JUnit XML: what CI systems show as tests, a target each."""

from __future__ import annotations

import re
from collections.abc import Mapping
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from compilecache.report import Report, TargetReport

_UNFIT = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit(report: Report, unproven: Mapping[str, str], *, absent_gpu: str = "") -> bytes:
    """One suite, one case a target; ``unproven``: key of a target → why a fresh process would compile it.

    ``absent_gpu``: what it was all compiled for and could not run on. A failed target is an error, an unproven one a failure, one that torch compiles at every start too.
    """
    suite = Element("testsuite", name="compilecache", time=f"{report.seconds:.3f}")
    suite.set("tests", str(len(report.targets)))
    counts = {"error": 0, "failure": 0}
    for row in report.targets:
        case = SubElement(
            suite, "testcase", classname=f"warmup.{row.device}", name=_plain(row.target)
        )
        case.set("time", f"{row.evidence.seconds if row.evidence else 0:.3f}")
        for kind, text in _faults(row, unproven):
            counts[kind] += 1
            first = _plain(text).partition("\n")[0]
            SubElement(case, kind, message=first[:300]).text = _plain(text)
        where = f", not run here: it is for {absent_gpu}" if absent_gpu else ""
        SubElement(case, "system-out").text = _plain(f"{row.status} by {row.engine}{where}")
    suite.set("errors", str(counts["error"]))
    suite.set("failures", str(counts["failure"]))
    if report.gave_up:
        SubElement(suite, "system-err").text = _plain("\n".join(report.gave_up))
    suites = Element("testsuites")
    suites.append(suite)
    indent(suites)
    data: bytes = tostring(suites, encoding="utf-8", xml_declaration=True)
    return data + b"\n"


def _faults(row: TargetReport, unproven: Mapping[str, str]) -> list[tuple[str, str]]:
    if row.status == "failed":
        return [("error", row.error or "it failed")]
    if row.evidence is not None and row.evidence.outcome == "bypass":
        return [("failure", "torch never caches part of it: it compiles at every start")]
    return [("failure", unproven[row.key])] if row.key in unproven else []


def _plain(text: str) -> str:
    """Without the characters that XML cannot hold."""
    return _UNFIT.sub("\ufffd", text)
