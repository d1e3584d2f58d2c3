"""What the API takes: checked before anything else sees it."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from compilecache.errors import PlanError
from compilecache.shapes import ShapePlan
from warmup.service.jobs import JobKind
from warmup.service.policy import Policy, check_text
from warmup.service.problems import Refusal
from warmup.service.queue import Request

PLAN_EXAMPLE: dict[str, JsonValue] = {
    "workload": "dflash_model.workload:tiny",
    "specs": [{"dims": {"seq_len": 512, "batch": 1, "anchors": 8, "block": 16, "mask": "full"}}],
}


PASSED_OVER = "Printed by 'compilecache plan --json'; not used."


class Submission(BaseModel):
    """A plan to warm, or to explain."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    plan: Annotated[
        dict[str, JsonValue],
        Field(
            description="A plan as a plan file holds it, and as 'compilecache plan --json' prints it "
            "under 'plan'. Its workload must be on the service's allow-list.",
            examples=[PLAN_EXAMPLE],
        ),
    ]
    devices: Annotated[
        tuple[Annotated[str, Field(max_length=32)], ...],
        Field(
            max_length=64,
            description="With the index the trainer uses. Empty: all that the service has.",
        ),
    ] = ()
    kind: Annotated[
        JobKind,
        Field(description="warm, or explain: say what there is of each target, compile nothing."),
    ] = "warm"
    name: Annotated[str, Field(max_length=200, description="For people.")] = ""
    priority: Annotated[int, Field(ge=-100, le=100, description="Higher goes first.")] = 0
    fingerprint: Annotated[
        str | None,
        Field(
            pattern=r"^[0-9a-f]{8,32}$",
            description="First digits of the fingerprint that the host must have; the job fails on "
            "another, before anything is compiled.",
        ),
    ] = None

    curve: Annotated[JsonValue, Field(description=PASSED_OVER)] = None
    targets: Annotated[JsonValue, Field(description=PASSED_OVER)] = None

    def request(self, policy: Policy) -> Request:
        """What the queue takes. Raises Refusal for what is no plan, or is not allowed."""
        try:
            plan = ShapePlan.parse(self.plan).model_copy(update={"lengths": {}})
        except PlanError as error:
            raise Refusal(422, error.problem, next_step=error.next_step) from error
        devices = tuple(dict.fromkeys(self.devices)) or policy.devices
        if self.name:
            check_text("name", self.name, may_name_paths=True)
        policy.check(plan, devices)
        return Request(
            plan=plan,
            devices=devices,
            kind=self.kind,
            name=self.name,
            priority=self.priority,
            expected=self.fingerprint,
        )


class Health(BaseModel):
    """Whether the service is alive, or takes work."""

    ok: bool
    why: str = ""
    """What is in the way; empty when nothing is."""


class Login(BaseModel):
    """The token, once, for a cookie."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    token: Annotated[str, Field(max_length=1000)]


class About(BaseModel):
    """What this service is and may do."""

    version: str
    devices: tuple[str, ...]
    workloads: tuple[str, ...]
    """The allow-list."""
    store: str | None
    """Address of the store; None without one."""
    needs_token: bool
    listeners: int
    """Clients that listen to events."""
