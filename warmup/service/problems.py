"""What the API answers when it does not do what was asked: RFC 9457 problems with a next step."""

from __future__ import annotations

from http import HTTPStatus

from pydantic import BaseModel, ConfigDict, Field

from compilecache.errors import CompileCacheError

MEDIA_TYPE = "application/problem+json"


class Problem(BaseModel):
    """The body of every answer from 400 on."""

    model_config = ConfigDict(frozen=True)

    type: str = "about:blank"
    """Always ``about:blank``: the status says what kind it is."""
    title: str = Field(examples=["Forbidden"])
    """The status in words."""
    status: int = Field(ge=400, le=599, examples=[403])
    """The HTTP status."""
    detail: str = Field(examples=["workload 'os:system' is not on the allow-list"])
    """What is wrong, with the name of the thing."""
    next_step: str = Field(examples=["Add it to 'workloads' in the service's settings"])
    """What to do about it."""

    @classmethod
    def of(cls, status: int, detail: str, next_step: str) -> Problem:
        """A problem with the title of its status."""
        title = HTTPStatus(status).phrase
        return cls(title=title, status=status, detail=detail, next_step=next_step)


class Refusal(CompileCacheError):
    """A request that is not carried out; ``status`` is what HTTP says of it."""

    def __init__(self, status: int, problem: str, *, next_step: str) -> None:
        self.status = status
        super().__init__(problem, next_step=next_step)

    def as_problem(self) -> Problem:
        """The body to answer with."""
        return Problem.of(self.status, self.problem, self.next_step)
