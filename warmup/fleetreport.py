"""What a fleet came to, host by host, and whether that is all of the plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from compilecache.report import Report, Status, TargetReport
from compilecache.shapes import ShapePlan
from warmup.hosts import Result


@dataclass(slots=True)
class Host:
    """One host, as far as it is known."""

    name: str
    devices: tuple[str, ...] = ()
    told: dict[str, TargetReport] = field(default_factory=dict)
    """Targets that have ended there, by key."""
    result: Result | None = None
    """None until it has ended."""
    fault: str = ""
    """What went wrong with it, or that it is lost."""
    lost: bool = False

    @property
    def report(self) -> Report | None:
        """Of a host that came to its end."""
        return self.result.report if self.result else None

    @property
    def rows(self) -> Sequence[TargetReport]:
        """All targets of a host that came to its end; what is known of another."""
        return self.report.targets if self.report else tuple(self.told.values())

    @property
    def state(self) -> str:
        """In one word."""
        if self.lost:
            return "lost"
        if self.fault or self.report is None:
            return "failed"
        return "warm" if self.report.warm else "partly"

    def count(self, status: Status) -> int:
        """Targets that ended so."""
        return sum(row.status == status for row in self.rows)


def unproven(hosts: Iterable[Host]) -> dict[str, set[str]]:
    """By host: keys of targets that it compiled and nobody else, in a process of its own, found warm."""
    hosts = list(hosts)
    made: dict[str, set[str]] = {}
    for host in hosts:
        proven = {
            row.key
            for other in hosts
            if other is not host and _mark(other) == _mark(host)
            for row in other.rows
            if row.status == "restored" and row.evidence and row.evidence.compiled_nothing
        }
        keys = {row.key for row in host.rows if row.status != "failed"}
        fresh = {row.key for row in host.rows if row.evidence and row.evidence.compiled_nothing}
        if host.report and (left := keys - proven - fresh):
            made[host.name] = left
    return made


def _mark(host: Host) -> str:
    return host.report.fingerprint if host.report else ""


@dataclass(frozen=True, slots=True)
class FleetReport:
    """All of it."""

    plan: ShapePlan
    hosts: tuple[Host, ...]
    not_proven: Mapping[str, str]
    """Target in words → what a fresh process did with it."""
    seconds: float

    @property
    def wanted(self) -> frozenset[str]:
        """Keys of the plan's targets on the devices of any host, also of one that is lost."""
        groups = {host.devices for host in self.hosts if host.devices}
        return frozenset(t.key for devices in groups for t in self.plan.targets(devices))

    @property
    def published(self) -> frozenset[str]:
        """Keys that the store has."""
        results = [host.result for host in self.hosts if host.result]
        return frozenset().union(*(result.published for result in results))

    @property
    def warm(self) -> bool:
        """All is published and proven, and every host that is not lost has all of its targets."""
        left = [host.state for host in self.hosts if not host.lost]
        whole = bool(left) and set(left) == {"warm"} and self.wanted <= self.published
        return whole and not self.not_proven

    @property
    def failed(self) -> list[Host]:
        """Hosts that answered, and could not do the job as a whole."""
        return [host for host in self.hosts if host.state == "failed"]

    def as_json(self) -> dict[str, object]:
        """The one line."""
        return {
            "state": "warm" if self.warm else "partly",
            "fingerprints": sorted({_mark(host) for host in self.hosts} - {""}),
            "hosts": len(self.hosts),
            "lost": [host.name for host in self.hosts if host.lost],
            "targets": len(self.wanted),
            "published": len(self.published & self.wanted),
            "compiled": sum(host.count("compiled") for host in self.hosts),
            "restored": sum(host.count("restored") for host in self.hosts),
            "failed": sum(host.count("failed") for host in self.hosts),
            "not_proven": [f"{name}: {seen}" for name, seen in self.not_proven.items()],
            "by_host": [_host_json(host) for host in self.hosts],
            "seconds": round(self.seconds, 3),
        }


def _host_json(host: Host) -> dict[str, object]:
    return {
        "host": host.name,
        "state": host.state,
        "devices": host.devices,
        "compiled": host.count("compiled"),
        "restored": host.count("restored"),
        "failed": host.count("failed"),
        "gave_up": host.report.gave_up if host.report else (),
        "seconds": round(host.report.seconds, 3) if host.report else None,
        "fault": host.fault or None,
    }
