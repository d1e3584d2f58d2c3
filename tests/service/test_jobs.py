"""The queue and its worker: what is submitted is done once, in order, and survives every death."""

from __future__ import annotations

import os
import signal
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest
from services import PATIENCE, Service, plan_of_acts, until

from warmup.client import Client, ServiceError
from warmup.service.orders import SAID


def test_a_plan_is_made_warm_and_every_change_is_an_event(shared: Service) -> None:
    """From queued to done; the events tell the same story as the job, in order."""
    job = shared.wait(shared.submit("quick", "bypass", name="story"))
    assert job.state == "done"
    assert [row.state for row in job.rows] == ["compiled", "bypass"]
    assert job.fingerprint == "fe" * 16
    assert all(row.published and row.seconds is not None for row in job.rows)
    heard = list(shared.client.events(job.id))
    assert [one.id for one in heard] == sorted({one.id for one in heard})
    states = [one.job.state for one in heard if one.job]
    assert (states[0], states[-1]) == ("queued", "done")
    first = [one.target.state for one in heard if one.target and one.target.position == 0]
    assert first == ["compiling", "compiled"]


def test_an_equal_request_gets_the_job_that_is_open(shared: Service) -> None:
    """Same plan, devices and fingerprint; another name is no difference, another kind is one."""
    blocker = shared.submit("slow", name="blocker")
    asked = {"plan": plan_of_acts("quick"), "devices": ["cpu"]}
    first = shared.ask("POST", "/v1/jobs", asked)
    again = shared.ask("POST", "/v1/jobs", {**asked, "name": "again", "priority": 7})
    assert (first.status, again.status) == (201, 200)
    assert again.json["id"] == first.json["id"]
    assert again.json["priority"] == 7
    for other in ({"kind": "explain"}, {"fingerprint": "fe" * 16}, {"devices": ["cuda:0"]}):
        assert shared.ask("POST", "/v1/jobs", {**asked, **other}).status == 201
    shared.wait(blocker)
    shared.wait(str(first.json["id"]))
    assert shared.ask("POST", "/v1/jobs", asked).status == 201


def test_a_higher_priority_goes_first_and_one_target_at_a_time(shared: Service) -> None:
    """What was submitted first goes first only among equals."""
    blocker = shared.submit("slow")
    shared.until(blocker, "compiling")
    low = shared.submit("quick", priority=-1)
    plain = shared.submit("quick", "quick")
    high = shared.submit("quick", "quick", "quick", priority=5)
    ended = {job: shared.wait(job).ended or 0.0 for job in (low, plain, high)}
    assert ended[high] < ended[plain] < ended[low]


def test_a_queued_job_is_cancelled_at_once_and_a_running_one_soon(shared: Service) -> None:
    """The worker is gone, the rest is cancelled, and the next job runs."""
    running = shared.submit("quick", "hang", "quick")
    shared.until(running, "compiling")
    queued = shared.submit("quick", "quick")
    assert shared.client.cancel(queued).state == "cancelled"
    assert shared.client.cancel(running).state == "cancelling"
    job = shared.wait(running)
    assert job.state == "cancelled"
    assert [row.state for row in job.rows] == ["compiled", "cancelled", "cancelled"]
    assert shared.wait(shared.submit("quick")).state == "done"
    with pytest.raises(ServiceError, match="ended already") as caught:
        shared.client.cancel(running)
    assert caught.value.status == 409


def test_a_retry_does_only_what_is_not_warm(shared: Service) -> None:
    """Finished targets stay as they are; the others are tried again."""
    job = shared.wait(shared.submit("quick", "fail", "quick"))
    assert job.state == "failed"
    assert job.rows[1].error == "no such shape. Plan another one."
    began = len(shared.noted("began"))
    shared.client.retry(job.id)
    again = shared.wait(job.id)
    assert [row.state for row in again.rows] == ["compiled", "failed", "compiled"]
    assert shared.noted("began")[began:] == [job.rows[1].key]
    assert again.number == job.number


def test_a_worker_that_dies_costs_the_target_in_hand_alone(shared: Service) -> None:
    """Tried once more, then reported with the last words; the others are made."""
    job = shared.wait(shared.submit("quick", "crash", "quick"))
    assert [row.state for row in job.rows] == ["compiled", "failed", "compiled"]
    assert "signal 11" in str(job.rows[1].error)
    assert "the compiler has eaten itself" in str(job.rows[1].error)
    assert shared.noted("began").count(job.rows[1].key) == 2


def test_a_worker_that_hangs_is_ended_at_the_deadline(service: Service) -> None:
    """189290: a compile pool that hangs. The target is reported, the rest goes on, nothing is left."""
    service.settings |= {"target_deadline": 0.5, "lock_timeout": 1}
    service.start()
    job = service.wait(service.submit("quick", "hang", "quick"))
    assert [row.state for row in job.rows] == ["compiled", "failed", "compiled"]
    assert "deadline" in str(job.rows[1].error)
    assert workers_of(service) == []


def test_a_job_that_outlives_its_deadline_is_reported(service: Service) -> None:
    """What it has finished stays finished."""
    service.settings |= {"job_deadline": 0.6}
    service.start()
    job = service.wait(service.submit("quick", "hang", "quick"))
    assert job.state == "failed"
    assert [row.state for row in job.rows] == ["compiled", "failed", "failed"]
    assert "job_deadline" in str(job.next_step)


@pytest.mark.parametrize("victim", ["service", "worker"])
def test_sigkill_loses_nothing_and_repeats_only_the_target_in_hand(
    service: Service, victim: str
) -> None:
    """Of the service, or of its worker, in the middle of the third of five targets."""
    service.start()
    job_id = service.submit("quick", "quick", "slow", "quick", "quick")
    queued = service.submit("quick")
    service.until(job_id, "compiled", 2)
    service.until(job_id, "compiling")
    (worker,) = workers_of(service)
    if victim == "service":
        service.end(signal.SIGKILL)
        until_gone(worker)
        service.start()
    else:
        os.kill(worker, signal.SIGKILL)
    job = service.wait(job_id)
    assert [row.state for row in job.rows] == ["compiled"] * 5
    assert service.wait(queued).state == "done"
    began = [service.noted("began").count(row.key) for row in job.rows]
    assert began == [1, 1, 2, 1, 1]
    assert [service.noted("ended").count(row.key) for row in job.rows] == [1] * 5
    assert job.attempts == 2


def test_events_go_on_after_a_restart(service: Service) -> None:
    """Numbers are never given twice; who listens hears the rest after Last-Event-ID."""
    service.start()
    job = service.wait(service.submit("quick"))
    service.end()
    service.start()
    second = service.wait(service.submit("quick", "quick"))
    late = list(service.client.events(second.id, after=job.last_event))
    assert min(one.id for one in late) > job.last_event
    answer = service.ask(
        "GET", f"/v1/jobs/{job.id}/events", headers={"Last-Event-ID": str(job.last_event - 1)}
    )
    assert answer.body.count(b"event: ") == 1


def test_a_stop_lets_the_target_in_hand_end(service: Service) -> None:
    """SIGTERM within the grace time: done and kept; the rest waits for the next start."""
    service.start()
    job_id = service.submit("slow", "quick")
    service.until(job_id, "compiling")
    assert service.end() == 0
    assert len(service.noted("ended")) == 1
    service.start()
    job = service.wait(job_id)
    assert [row.state for row in job.rows] == ["compiled", "compiled"]
    assert len(service.noted("began")) == 2


def test_a_stop_gives_back_what_does_not_end_in_time(service: Service) -> None:
    """Beyond the grace time the worker is ended, and the target waits again."""
    service.settings["grace"] = 0.3
    service.start()
    job_id = service.submit("quick", "hang")
    service.until(job_id, "compiling")
    began = time.monotonic()
    assert service.end() == 0
    assert time.monotonic() - began < PATIENCE / 2
    service.start()
    job = service.until(job_id, "compiling")
    assert [row.state for row in job.rows] == ["compiled", "compiling"]
    service.client.cancel(job_id)


def test_old_jobs_are_forgotten_and_open_ones_are_not(service: Service) -> None:
    """The queue's file does not grow for ever."""
    service.settings["keep_jobs"] = 3
    service.start()
    first = service.submit("quick")
    for _ in range(8):
        last = service.submit(*["quick"] * 12)
    service.wait(last)
    service.wait(service.submit("quick"))
    kept = service.client.jobs(limit=200).jobs
    assert 3 <= len(kept) < 10
    assert first not in {job.id for job in kept}
    assert last in {job.id for job in kept}
    service.end()
    service.start()
    logs = {path.stem for path in (service.folder / "state" / "logs").iterdir()}
    assert logs <= {job.id for job in kept}


def test_two_services_on_one_queue_are_refused(service: Service, tmp_path: Path) -> None:
    """The second would give back what the first has in hand."""
    service.start()
    other = Service(service.fresh, tmp_path, {"state": str(tmp_path / "state")})
    with pytest.raises(AssertionError, match="another service uses it"):
        other.start()


def test_a_queue_that_cannot_be_written_is_said_and_mended_by_a_restart(service: Service) -> None:
    """Nothing is answered as if it were kept; probes are told; the next start goes on."""
    service.start()
    kept = service.submit("slow", "quick")
    service.until(kept, "compiling")
    with closing(sqlite3.connect(service.folder / "state" / "jobs.sqlite")) as other:
        other.execute(
            "CREATE TRIGGER full BEFORE INSERT ON events BEGIN SELECT RAISE(FAIL, 'disk full'); END"
        )
        answer = service.ask("POST", "/v1/jobs", {"plan": plan_of_acts("quick")})
        assert answer.status == 503
        assert "disk full" in str(answer.json["detail"])
        until(lambda: service.ask("GET", "/healthz").status == 503)
        assert service.ask("GET", "/readyz").status == 503
        assert service.client.job(kept).state == "running"
        other.execute("DROP TRIGGER full")
    service.end()
    service.start()
    assert service.wait(kept).state == "done"
    assert len(service.client.jobs().jobs) == 1


def test_a_client_without_a_service_is_told_so() -> None:
    """One error with the address, no traceback of sockets."""
    with pytest.raises(ServiceError, match=r"127\.0\.0\.1:9 does not answer"):
        Client("http://127.0.0.1:9").jobs()


def test_what_a_worker_says_is_checked() -> None:
    """Lines that are no message are errors, not surprises."""
    for line in (b"", b"{}", b'{"said":"doing"}', b'{"said":"finished","row":{}}', b"\xff"):
        with pytest.raises(ValueError):
            SAID.validate_json(line)


def workers_of(service: Service) -> list[int]:
    """Process ids of its workers."""
    assert service.process is not None
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
        if parent == service.process.pid:
            found.append(int(path.parent.name))
    return found


def until_gone(pid: int) -> None:
    """Waits until a process is no more: it dies with the service."""
    deadline = time.monotonic() + PATIENCE
    while Path("/proc", str(pid)).exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
