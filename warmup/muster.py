"""A fleet at work: hosts looked at, started, listened to until each has ended or is lost, and the sum of it."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence

from compilecache import CompileCacheError, PlanError
from compilecache.progress import Teller
from warmup.fleetreport import FleetReport, Host, unproven
from warmup.hosts import HostJob, News, Order, Ready
from warmup.raycluster import Answer, Cluster, Node

LOOK_SECONDS = 600.0
"""How long the first answer may take: a process starts on the host, which may fetch a folder first."""
GRACE_SECONDS = 120.0
"""A host that has not ended so long after the deadline of its job is given up."""


class Muster:
    """One order, carried out by the hosts of a cluster."""

    def __init__(self, cluster: Cluster, order: Order, tell: Teller) -> None:
        self._cluster = cluster
        self._order = order
        self._tell = tell
        self._hosts: dict[Node, Host] = {}
        self._began = time.monotonic()

    def carry_out(self, limit: int | None) -> FleetReport:
        """What all hosts came to.

        Raises PlanError when several hosts do not share the store, CompileCacheError when none can begin.
        """
        chosen = self._choose(limit)
        self._hosts = {node: Host(node.name) for node in chosen}
        for node in chosen:
            self._cluster.start(node)
        try:
            self._look(chosen)
        finally:
            self._clear()
        self._work()
        not_proven = self._prove()
        hosts = tuple(self._hosts.values())
        seconds = time.monotonic() - self._began
        return FleetReport(self._order.plan, hosts, not_proven, seconds)

    # -- before -----------------------------------------------------------------------------------

    def _choose(self, limit: int | None) -> list[Node]:
        """Those with GPUs, if any has, and the CPU was not asked for."""
        nodes = list(self._cluster.nodes)
        if any(node.gpus for node in nodes) and "cpu" not in self._order.devices:
            nodes = [node for node in nodes if node.gpus]
        nodes = nodes[:limit]
        if len(nodes) > 1 and self._order.settings.store is None:
            raise PlanError(
                f"{len(nodes)} hosts, and no store that they share",
                next_step="Name s3://BUCKET/PREFIX, or a folder that all hosts mount, with --store",
                field="store",
            )
        return nodes

    def _look(self, nodes: Sequence[Node]) -> None:
        """Finds devices, and whether the store is one: the first host puts an object there."""
        first, others = None, deque(nodes)
        while first is None and others:
            node = others.popleft()
            self._note_ready([node], first=True)
            first = None if self._hosts[node].fault else node
        if first is None:
            problem = "; ".join(f"host {host.name}: {host.fault}" for host in self._hosts.values())
            raise CompileCacheError(
                f"no host of the cluster can begin: {problem or 'there is none'}",
                next_step="Mend the first of these, and start the fleet again",
            )
        self._note_ready(list(others), first=False)

    def _clear(self) -> None:
        able = [node for node, host in self._hosts.items() if host.devices][:1]
        self._gather(able, lambda node: self._cluster.ask(node, HostJob.clear, self._order))

    def _note_ready(self, nodes: Sequence[Node], *, first: bool) -> None:
        def ask(node: Node) -> object:
            return self._cluster.ask(node, HostJob.look, self._order, first=first)

        for node, answer in self._gather(nodes, ask).items():
            host, ready = self._hosts[node], answer.value
            if not isinstance(ready, Ready):
                self._mark(host, answer)
            elif ready.problem:
                self._mark(host, Answer(fault=ready.problem))
            elif not ready.probed:
                raise PlanError(
                    f"host {host.name} does not see in the store '{self._order.settings.store}' what another "
                    "host puts there",
                    next_step="Name s3://BUCKET/PREFIX, or a folder that all hosts mount, with --store",
                    field="store",
                )
            else:
                host.devices = ready.devices

    def _gather(
        self, nodes: Sequence[Node], ask: Callable[[Node], object], seconds: float = LOOK_SECONDS
    ) -> dict[Node, Answer]:
        """The answer of each; a host that has none within that time is lost."""
        asked = {ask(node): node for node in nodes}
        found: dict[Node, Answer] = {}
        until = time.monotonic() + seconds
        while asked and (
            got := self._cluster.next_answer(asked, max(0.0, until - time.monotonic()))
        ):
            found[got[0]] = got[1]
        silent = Answer(fault=f"no answer within {seconds:.0f} s", lost=True)
        return found | dict.fromkeys(asked.values(), silent)

    # -- the work ---------------------------------------------------------------------------------

    def _work(self) -> None:
        """Listens to every host until it has ended; one that cannot be heard any more is lost."""
        asked: dict[object, Node] = {}
        for node, host in self._hosts.items():
            if not host.fault:
                self._cluster.ask(node, HostJob.begin, self._order, host.devices)
                asked[self._cluster.ask(node, HostJob.news, 0)] = node
        heard: Counter[Node] = Counter()
        until = self._began + self._order.settings.job_deadline + GRACE_SECONDS
        while asked and (got := self._cluster.next_answer(asked, until - time.monotonic())):
            node, answer = got
            host = self._hosts[node]
            if not isinstance(answer.value, list):
                self._mark(host, answer)
                continue
            for news in answer.value:
                self._hear(host, news)
            heard[node] += len(answer.value)
            if host.result is None and time.monotonic() < until:
                asked[self._cluster.ask(node, HostJob.news, heard[node])] = node
        for node in asked.values():
            self._mark(self._hosts[node], Answer(fault="it did not end in time", lost=True))

    def _hear(self, host: Host, news: News) -> None:
        if news.row is not None:
            host.told[news.row.key] = news.row
        host.result = news.result
        if news.result is None:
            self._tell(f"{host.name}: {news.text}")
        elif news.result.problem:
            self._mark(host, Answer(fault=news.result.problem))

    def _mark(self, host: Host, answer: Answer) -> None:
        host.fault, host.lost = answer.fault, answer.lost
        self._tell(f"warning: host {host.name}{' is lost' if host.lost else ''}: {host.fault}")

    # -- after ------------------------------------------------------------------------------------

    def _prove(self) -> dict[str, str]:
        """Has those prove in a fresh process what no other host has found warm; target → what was seen."""
        left = unproven(self._hosts.values())
        nodes = [node for node, host in self._hosts.items() if host.name in left and not host.lost]
        seconds = self._began + self._order.settings.job_deadline - time.monotonic()

        def ask(node: Node) -> object:
            host = self._hosts[node]
            return self._cluster.ask(
                node, HostJob.prove, self._order, host.devices, host.report, seconds
            )

        found: dict[str, str] = {}
        for node, answer in self._gather(nodes, ask, max(0.0, seconds) + GRACE_SECONDS).items():
            host = self._hosts[node]
            seen = answer.value if isinstance(answer.value, dict) else None
            if seen is None:
                self._mark(host, answer)
            for row in host.rows:
                if row.key in left[host.name] and (seen is None or row.key in seen):
                    found[f"{host.name}: {row.target}"] = seen[row.key] if seen else answer.fault
        return found
