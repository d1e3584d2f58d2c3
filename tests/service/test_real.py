"""The service with its real worker: real compiles, killed in the middle, and nothing made twice."""

from __future__ import annotations

import json
import signal

import pytest
from places import Cold
from services import Service, plan_json
from workloads import plan

from compilecache.errors import FingerprintMismatch
from compilecache.picture.last import last_report
from compilecache.store import ArtifactStore
from warmup.service.runner import WORKER
from warmup.service.worker import refuse_other


@pytest.mark.slow
def test_a_plan_survives_a_kill_and_ends_up_in_the_store(service: Service, cold: Cold) -> None:
    """SIGKILL while the second of three targets compiles: the first is not made again."""
    cold.seed(service.folder / "root")
    service.settings["workloads"] = ["workloads:product"]
    service.worker = WORKER
    service.start()
    wanted = plan("product", [2, 3, 4])
    answer = service.ask("POST", "/v1/jobs", {"plan": plan_json(wanted)})
    assert answer.status == 201, answer.body
    job_id = str(answer.json["id"])
    before = service.until(job_id, "compiled")
    service.end(signal.SIGKILL)
    service.start()
    job = service.wait(job_id)
    assert job.state == "done", (job, service.log)
    assert job.attempts == 2
    made = [row.state for row in before.rows].count("compiled")
    assert job.rows[:made] == before.rows[:made]
    assert {row.state for row in job.rows[made:]} <= {"compiled", "local"}
    store = ArtifactStore.open(service.folder / "store")
    assert store.keys(str(job.fingerprint)) == {row.key for row in job.rows}
    report = last_report(service.folder / "root")
    assert {row.key for row in report.targets} <= {row.key for row in job.rows}
    explained = service.ask("POST", "/v1/jobs", {"plan": plan_json(wanted), "kind": "explain"})
    found = service.wait(str(explained.json["id"]))
    assert [row.state for row in found.rows] == ["local"] * 3
    assert "Nothing to do" in json.dumps(found.explanation)


def test_another_fingerprint_than_the_one_asked_for_ends_the_job() -> None:
    """Both are named; the first digits are enough."""
    refuse_other(None, "ab" * 16)
    refuse_other("abababab", "ab" * 16)
    with pytest.raises(FingerprintMismatch, match=r"abababababab, and cdcdcdcd was asked for"):
        refuse_other("cdcdcdcd", "ab" * 16)
