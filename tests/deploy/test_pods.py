"""What runs in a cluster or on a host: what it may, what it mounts, what it asks of the service."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
from deployed import (
    BASE,
    DEPLOY,
    SERVE,
    Node,
    containers,
    manifest,
    manifests,
    named,
    patched,
    pods,
    read,
)
from processes import ROOT

service = pytest.mark.skipif(
    find_spec("warmup.service") is None, reason="there is no warmup.service"
)
UNIT = DEPLOY / "systemd/compilecache-warmup.service"
DASHBOARD = DEPLOY / "grafana/compilecache.json"
SETTINGS = (BASE / "settings.yaml", DEPLOY / "systemd/warmup.yaml")


# -- pods --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("made", [list(manifests()), patched()], ids=["base", "overlay"])
def test_no_container_may_more_than_it_must(made: list[Node]) -> None:
    """Not root, nothing but volumes to write to, no capability, no API token, bounded in memory."""
    assert len(pods(made)) == 3
    for pod in pods(made):
        spec = pod["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for one in containers(pod):
            assert one["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            limits, requests = one["resources"]["limits"], one["resources"]["requests"]
            assert "memory" in limits and {"cpu", "memory"} <= requests.keys()
            assert limits["nvidia.com/gpu"] == requests["nvidia.com/gpu"]


@pytest.mark.parametrize("made", [list(manifests()), patched()], ids=["base", "overlay"])
def test_mounts_have_volumes_and_volumes_have_sources(made: list[Node]) -> None:
    """Each name leads to something: a volume, a ConfigMap that is generated, a Secret that the page makes."""
    page = (ROOT / "docs/deploy.md").read_text()
    generated = {one["name"] for one in read(BASE / "kustomization.yaml")[0]["configMapGenerator"]}
    claims = {m["metadata"]["name"] for m in made if m["kind"] == "PersistentVolumeClaim"}
    for pod in pods(made):
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        mounted = [mount["name"] for one in containers(pod) for mount in one["volumeMounts"]]
        assert set(mounted) == set(volumes)
        secrets = [one["envFrom"][0]["secretRef"]["name"] for one in containers(pod)]
        for volume in volumes.values():
            secrets += [volume["secret"]["secretName"]] if "secret" in volume else []
            assert volume.get("secret", {}).get("defaultMode", 0o440) == 0o440
            assert volume.get("configMap", {}).get("name") in {None, *generated}
            assert volume.get("persistentVolumeClaim", {}).get("claimName") in {None, *claims}
        assert [name for name in secrets if f"create secret generic {name} " not in page] == []


def test_the_cache_root_lies_in_a_volume_that_can_be_written() -> None:
    """And its folder, which anybody in the pod may write, is one that is trusted by name."""
    for pod in pods(list(manifests())):
        folders = {volume["name"] for volume in pod["spec"]["volumes"] if "emptyDir" in volume}
        for one in containers(pod):
            env = {variable["name"]: variable["value"] for variable in one["env"]}
            root = env.get("COMPILECACHE_ROOT") or read(BASE / "settings.yaml")[0]["root"]
            places = {mount["mountPath"]: mount["name"] for mount in one["volumeMounts"]}
            assert places[str(Path(root).parent)] in folders
            assert env["COMPILECACHE_TRUSTED_FOLDERS"] == str(Path(root).parent)


# -- the service -------------------------------------------------------------------------------------


def test_what_selects_the_service_selects_it() -> None:
    """Deployment, Service, PodMonitor and policy mean the pod with the service, and a port it has."""
    template = manifest(*SERVE)["spec"]["template"]
    labels = template["metadata"]["labels"]
    policy = manifest("NetworkPolicy", "warmup")["spec"]
    monitor = manifest("PodMonitor", "warmup")
    offered = manifest("Service", "warmup")["spec"]
    selectors = [manifest(*SERVE)["spec"]["selector"]["matchLabels"], offered["selector"]]
    selectors += [policy["podSelector"]["matchLabels"], monitor["spec"]["selector"]["matchLabels"]]
    assert all(selector.items() == labels.items() for selector in selectors)
    (port,) = template["spec"]["containers"][0]["ports"]
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    named_ports = [endpoint["port"], offered["ports"][0]["targetPort"]]
    named_ports.append(policy["ingress"][0]["ports"][0]["port"])
    assert named_ports == [port["name"]] * 3
    assert port["containerPort"] == read(BASE / "settings.yaml")[0]["port"]


def test_the_pod_monitor_is_what_its_operator_reads() -> None:
    """Its kind has no schema here: version, endpoint, and the Secret that the service's token comes from."""
    monitor = manifest("PodMonitor", "warmup")
    assert monitor["apiVersion"] == "monitoring.coreos.com/v1"
    assert set(monitor["spec"]) == {"selector", "podMetricsEndpoints"}
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert set(endpoint) == {"port", "path", "interval", "authorization"}
    secrets = {
        volume["secret"]["secretName"]: Path(read(BASE / "settings.yaml")[0]["token_file"]).name
        for volume in manifest(*SERVE)["spec"]["template"]["spec"]["volumes"]
        if "secret" in volume
    }
    credentials = endpoint["authorization"]["credentials"]
    assert secrets == {credentials["name"]: credentials["key"]}


def test_a_stop_may_take_as_long_as_the_service_grants() -> None:
    """Kubernetes and systemd wait for longer than `grace`, by which the target in hand has ended."""
    pod, host = (read(path)[0]["grace"] for path in SETTINGS)
    assert manifest(*SERVE)["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > pod + 10
    waits = re.search(r"^TimeoutStopSec=(\d+)$", UNIT.read_text(), re.M)
    assert waits is not None and int(waits[1]) > host + 10


@service
@pytest.mark.parametrize("path", SETTINGS, ids=named)
def test_settings_are_taken_by_the_service(path: Path) -> None:
    """No setting that it does not know."""
    from warmup.service.settings import Settings

    assert Settings.load(path, {}).workloads


@service
def test_probes_ask_for_what_the_service_has() -> None:
    """Paths of probes and of the PodMonitor are routes."""
    from warmup.service.outside import outside

    routes = {getattr(route, "path", None) for route in outside.routes}
    probe = manifest(*SERVE)["spec"]["template"]["spec"]["containers"][0]
    paths = {kind: probe[f"{kind}Probe"]["httpGet"]["path"] for kind in ("liveness", "readiness")}
    assert paths == {"liveness": "/healthz", "readiness": "/readyz"}
    (endpoint,) = manifest("PodMonitor", "warmup")["spec"]["podMetricsEndpoints"]
    assert {*paths.values(), probe["startupProbe"]["httpGet"]["path"], endpoint["path"]} <= routes


# -- the dashboard -----------------------------------------------------------------------------------


def queries() -> list[str]:
    """All that the dashboard asks Prometheus."""
    made = json.loads(DASHBOARD.read_text())
    asked = [target["expr"] for panel in made["panels"] for target in panel["targets"]]
    return [*asked, *(one["query"]["query"] for one in made["templating"]["list"][1:])]


@service
def test_every_figure_and_label_of_the_dashboard_exists() -> None:
    """Names and labels are those of a service that has had one job, one target and one request."""
    from prometheus_client.parser import text_string_to_metric_families

    from warmup.service.metrics import Metrics

    queue = SimpleNamespace(counts=lambda: {"done": 1}, ended={"compiled": 1}, pace=2.0)
    parts = SimpleNamespace(
        queue=queue, runner=SimpleNamespace(alive=True), feed=SimpleNamespace(listeners=0, last=3)
    )
    metrics = Metrics(parts)
    metrics.count("/healthz", "GET", 200, 0.1)
    labels = {
        sample.name: {*sample.labels, "instance"}
        for family in text_string_to_metric_families(metrics.text().decode())
        for sample in family.samples
    }
    assert {*re.findall(r"\bwarmup_\w+", " ".join(queries()))} <= labels.keys()
    for query in queries():
        for name, inside in re.findall(r"(warmup_\w+)\{(.*?)\}", query):
            assert {*re.findall(r"(\w+)(?:=|!)", inside)} <= labels[name], query
        (known,) = [labels[name] for name in {*re.findall(r"\bwarmup_\w+", query)}]
        for by in re.findall(r"\bby \((.*?)\)", query):
            assert {*by.split(", ")} <= known, query


def test_the_dashboard_can_be_imported() -> None:
    """Panels have ids of their own, lie beside each other in 24 columns, and ask the chosen data source."""
    made = json.loads(DASHBOARD.read_text())
    cells: set[tuple[int, int]] = set()
    for panel in made["panels"]:
        box = panel["gridPos"]
        own = {(x, y) for x in range(box["x"], box["x"] + box["w"]) for y in range(box["y"], box["y"] + box["h"])}  # fmt: skip
        assert not own & cells and max(x for x, _ in own) < 24, panel["title"]
        cells |= own
        assert panel["datasource"]["uid"] == "${datasource}"
    assert len({panel["id"] for panel in made["panels"]}) == len(made["panels"]) >= 8
