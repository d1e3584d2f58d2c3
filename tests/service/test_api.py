"""The API keeps to its OpenAPI document, whatever it is asked."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import get_args

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from places import Cold
from processes import ROOT
from schemathesis import Case
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from services import TOKEN, Answer, Service, plan_of_acts

from compilecache.picture.grid import SIGNS
from compilecache.report import Status
from compilecache.search import State
from warmup.service.jobs import JobState, TargetState

QUICK = settings(
    max_examples=6,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
)
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
STREAMS = ("/v1/events",)
"""Without end; ``test_a_stream_…`` asks for them."""


def test_the_document_names_every_answer(shared: Service) -> None:
    """Each endpoint has a summary, and its problems as problem+json; what is protected says how."""
    document = shared.ask("GET", "/openapi.json").json
    text = json.dumps(document)
    assert "HTTPValidationError" not in text
    paths = document["paths"]
    assert isinstance(paths, dict)
    for path, item in paths.items():
        for method, endpoint in item.items():
            assert endpoint["summary"], (method, path)
            if path.startswith("/v1"):
                assert endpoint["security"] == [{"token": []}, {"session": []}]
            for status, answer in endpoint["responses"].items():
                if int(status) >= 400 and path not in ("/readyz", "/healthz"):
                    assert list(answer["content"]) == ["application/problem+json"], path


def test_schemathesis_finds_no_server_error(locked: Service) -> None:
    """Generated requests, right and wrong, to every endpoint: documented answers, and no 5xx."""
    schema = schemathesis.openapi.from_url(f"{locked.url}/openapi.json")
    asked: list[int] = []
    for path in schema:
        for method in schema[path]:
            if path in STREAMS:
                continue
            for mode in (
                schemathesis.GenerationMode.POSITIVE,
                schemathesis.GenerationMode.NEGATIVE,
            ):
                _ask_much(locked, schema[path][method].as_strategy(generation_mode=mode), asked)
    assert len(asked) > 100
    assert sum(status < 400 for status in asked) > 10


def _ask_much(service: Service, cases: object, asked: list[int]) -> None:
    """A dozen of these, each checked."""

    @QUICK
    @given(case=cases)  # type: ignore[arg-type]
    def ask(case: Case) -> None:
        authorized = {"Authorization": f"Bearer {TOKEN}"}
        answer = case.call(base_url=service.url, headers=authorized, timeout=20)
        case.validate_response(answer, checks=CHECKS)
        asked.append(answer.status_code)

    with contextlib.suppress(
        Unsatisfiable
    ):  # nothing can be wrong about a request without a choice
        ask()


def test_pages_of_jobs_hold_each_job_once(service: Service) -> None:
    """Newest first, by state too; nothing twice and nothing left out while others are submitted."""
    service.start()
    blocker = service.submit("hang")
    service.until(blocker, "compiling")
    submitted = [service.submit("quick") for _ in range(7)]
    found: list[str] = []
    path = "/v1/jobs?limit=3&state=queued"
    while True:
        page = service.ask("GET", path).json
        found += [str(job["id"]) for job in page["jobs"]]  # type: ignore[index, attr-defined]
        if len(found) == 3:
            service.submit("quick")
        if page["next_before"] is None:
            break
        path = f"/v1/jobs?limit=3&state=queued&before={page['next_before']}"
    assert found == submitted[::-1]
    service.client.cancel(blocker)


def lines(answer: http.client.HTTPResponse) -> Iterator[str]:
    """Lines of a stream."""
    while line := answer.readline():
        yield line.decode().rstrip("\n")


def test_a_stream_of_all_jobs_misses_nothing(shared: Service) -> None:
    """Three listeners, from the beginning, from the middle, and by Last-Event-ID, hear the same."""
    begin = shared.client.jobs().last_event
    last = shared.wait(shared.submit("quick", "quick")).last_event
    heard: list[list[int]] = []

    def listen(path: str, headers: dict[str, str]) -> None:
        with closing(http.client.HTTPConnection(*shared.address, timeout=20)) as link:
            link.request("GET", path, headers=headers)
            numbers: list[int] = []
            for line in lines(link.getresponse()):
                if line.startswith("id: "):
                    numbers.append(int(line[4:]))
                if numbers and numbers[-1] >= last:
                    break
            heard.append(numbers)

    for path, headers in (
        (f"/v1/events?after={begin}", {}),
        (f"/v1/events?after={last - 3}", {}),
        ("/v1/events?after=0", {"Last-Event-ID": str(begin)}),
    ):
        listen(path, headers)
    assert heard[0] == heard[2] == list(range(begin + 1, last + 1))
    assert heard[1] == heard[0][-3:]


def test_who_asks_for_events_of_another_queue_is_told_to_begin_anew(shared: Service) -> None:
    """The state was removed meanwhile, so the client's number is ahead of ours."""
    with closing(http.client.HTTPConnection(*shared.address, timeout=20)) as link:
        link.request("GET", "/v1/events?after=999999999")
        told = lines(link.getresponse())
        assert "event: reset" in [next(told) for _ in range(6)]


def test_listeners_hear_events_as_they_come(shared: Service) -> None:
    """Before the job has ended."""
    job = shared.submit("quick", "slow", "slow")
    heard: list[float] = []
    for one in shared.client.events(job):
        if one.target is not None and one.target.ended is not None:
            heard.append(time.time() - one.target.ended)
    assert len(heard) == 3
    assert max(heard) < 5.0


def test_figures_for_prometheus(shared: Service) -> None:
    """Jobs by state, targets, requests; each with help and type, and no name of a job as a label."""
    shared.wait(shared.submit("quick", name="secret-name"))
    answer = shared.ask("GET", "/metrics")
    text = answer.body.decode()
    assert answer.headers["content-type"].startswith("text/plain")
    assert re.search(r'^warmup_jobs\{state="done"\} [1-9]', text, re.M)
    assert re.search(r'^warmup_targets_total\{status="compiled"\} [1-9]', text, re.M)
    assert 'route="/v1/jobs"' in text
    assert "secret-name" not in text
    shared.ask("GET", "/nothing/like/this")
    assert "/nothing" not in shared.ask("GET", "/metrics").body.decode()


def test_what_the_store_holds(service: Service, cold: Cold) -> None:
    """By fingerprint, with size and age, and its artifacts; nothing is imported for it."""
    service.settings["store"] = str(cold.place.store)
    service.start()
    told = service.ask("GET", "/v1/fingerprints").json
    (found,) = told["fingerprints"]  # type: ignore[misc]
    assert found["targets"] == 3
    assert found["bytes"] > 10_000
    assert abs(found["newest"] - time.time()) < 3600
    assert found["what"]["device"] == "cpu"
    detail = service.ask("GET", f"/v1/fingerprints/{found['digest']}").json
    artifacts = detail["artifacts"]
    assert isinstance(artifacts, list)
    assert {one["key"] for one in artifacts} == {
        target.key for target in cold.place.plan.targets(["cpu"])
    }
    assert service.ask("GET", "/v1/fingerprints/" + "0" * 32).status == 404


def test_a_store_that_does_not_answer_holds_up_nothing_else(service: Service) -> None:
    """503 with the next step; jobs are read meanwhile; once it answers, so do we."""
    (service.folder / "store").write_text("no folder")
    service.start()
    answer = service.ask("GET", "/v1/fingerprints")
    assert answer.status == 503
    assert answer.json["next_step"]
    assert service.ask("GET", "/v1/jobs").status == 200


def test_readiness_ends_with_the_stop(service: Service) -> None:
    """While the target in hand comes to its end, probes are told, and reads are answered."""
    service.start()
    assert service.ask("GET", "/readyz").status == 200
    job = service.submit("slow", "quick")
    service.until(job, "compiling")
    seen: list[Answer] = []
    ender = threading.Thread(target=service.end)
    ender.start()
    while not seen or seen[-1].status == 200:
        seen.append(service.ask("GET", "/readyz"))
    assert seen[-1].status == 503
    assert "stopping" in str(seen[-1].json["why"])
    assert service.ask("POST", "/v1/jobs", {"plan": plan_of_acts("quick")}).status == 503
    ender.join()


def test_every_status_of_the_library_is_a_state_with_a_sign() -> None:
    """What reports and explanations say can be kept, and shown."""
    script = (ROOT / "warmup" / "service" / "page" / "page.js").read_text(encoding="utf-8")
    known = {*get_args(Status), *get_args(State)}
    assert known <= {*get_args(TargetState)}
    assert known <= SIGNS.keys()
    for state in get_args(TargetState):
        assert len(re.findall(rf'(?:"{state}"|\b{state}): "', script)) == 2, state


def test_states_and_settings_are_documented() -> None:
    """Every state, setting and endpoint has its place in service.md."""
    from warmup.service.settings import Settings

    text = (ROOT / "docs" / "service.md").read_text(encoding="utf-8")
    words = [*get_args(JobState), *get_args(TargetState), *Settings.model_fields]
    assert [word for word in words if f"`{word}`" not in text] == []


def test_endpoints_are_documented(shared: Service) -> None:
    """By method and path."""
    text = (ROOT / "docs" / "service.md").read_text(encoding="utf-8")
    paths = shared.ask("GET", "/openapi.json").json["paths"]
    assert isinstance(paths, dict)
    named = [f"`{method.upper()} {path}`" for path, item in paths.items() for method in item]
    assert [name for name in named if name not in text] == []


def test_a_port_that_is_taken_is_one_error(service: Service, tmp_path: Path) -> None:
    """Named, with the exit code of a fault."""
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        service.settings["port"] = taken.getsockname()[1]
        with pytest.raises(AssertionError, match="address already in use"):
            service.start()
