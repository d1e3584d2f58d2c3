"""The trainer: same losses whatever the timing, equal replicas, one clear end when a thread fails."""

from __future__ import annotations

import copy
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from trainees import ANCHORS, CPU, TableTarget, jittery, log_of, plan_for, rows_of, train

from compilecache import Crew
from compilecache.errors import CompileCacheError, PlanError, WorkerFailed
from dflash_model.config import DrafterConfig
from dflash_model.handover import Averaging, Delivery, Inbox, Meeting
from dflash_model.microbatch import MicroBatch, MicroBatches, longest_row, random_numbers
from dflash_model.model import Drafter
from dflash_model.optimizer import Schedule
from dflash_model.trainer import Trainer, TrainSettings
from dflash_model.workload import DFlashWorkload


def weights_of(drafter: Drafter) -> torch.Tensor:
    return torch.cat([p.flatten().float() for p in drafter.parameters() if p.requires_grad])


def delivery(number: int) -> Delivery:
    nothing = torch.zeros(1)
    return Delivery(number, nothing, nothing, nothing, 1)


# -- order ---------------------------------------------------------------------------------------


def test_losses_do_not_depend_on_which_thread_is_faster(
    small: DrafterConfig, tmp_path: Path
) -> None:
    """One quick target or three that dawdle, long queues or short: the same steps to the last bit."""
    logs = []
    for count, size in ((1, 3), (3, 1), (2, 2)):
        targets = [TableTarget(small, jittery(seed)) for seed in range(count)]
        log = tmp_path / f"{count}.jsonl"
        train(small, targets=targets, settings=TrainSettings(steps=6, queue_size=size, log=log))
        logs.append(log_of(log))
    assert logs[0] == logs[1] == logs[2]
    assert [line["step"] for line in logs[0]] == [1, 2, 3, 4, 5, 6]


def test_targets_take_turns(small: DrafterConfig) -> None:
    """Target t makes the micro-batches i with i mod T = t, each once, in order."""
    targets = [TableTarget(small, jittery(seed)) for seed in range(3)]
    train(small, targets=targets, settings=TrainSettings(steps=5))
    assert [target.made for target in targets] == [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]


def test_every_pass_has_each_row_once_in_another_order(small: DrafterConfig) -> None:
    """Rows are shuffled for every pass; those that fill no step are left out and counted."""
    rows = rows_of(*range(20, 31))
    batches = MicroBatches(rows, plan_for(small, 64, batch=2), batch_size=2, drafters=2, seed=0)
    assert (batches.steps_in_a_pass, batches.left_over) == (2, 3)
    passes = [
        [int(n) for i in range(4) for n in batches.at(turn * 4 + i).attention_mask.sum(1)]
        for turn in range(2)
    ]
    for lengths in passes:
        assert len(set(lengths)) == 8
    assert passes[0] != passes[1]


def test_micro_batch_is_padded_to_a_planned_shape(small: DrafterConfig) -> None:
    """The shortest planned length that holds the row; pads carry neither token nor loss."""
    rows = rows_of(20, 40)
    batches = MicroBatches(rows, plan_for(small, 32, 64), batch_size=1, drafters=1, seed=0)
    made = [batches.at(number) for number in range(2)]
    assert sorted(batch.input_ids.shape[1] for batch in made) == [32, 64]
    for batch in made:
        pads = ~batch.attention_mask
        assert batch.tokens in (20, 40)
        assert not batch.loss_mask[pads].any() and not batch.input_ids[pads].any()


def test_rows_that_fill_no_step_are_refused(small: DrafterConfig) -> None:
    """A run that could not make one step says so before it starts."""
    with pytest.raises(PlanError, match="3 rows do not fill one step of 4 drafters"):
        MicroBatches(rows_of(9, 9, 9), plan_for(small, 32), batch_size=1, drafters=4, seed=0)


def test_plan_without_training_shapes_is_refused(small: DrafterConfig) -> None:
    """Shapes for evaluation are not warm for training."""
    workload = DFlashWorkload(small, anchors=ANCHORS)
    specs = workload.specs([32], batch_sizes=[1], phases=["eval"])
    plan = plan_for(small, 32).model_copy(update={"specs": tuple(specs)})
    with pytest.raises(PlanError, match="no spec of 'forward' for training"):
        longest_row(plan, 1)
    with pytest.raises(PlanError, match="no shape for batches of 2 rows"):
        longest_row(plan_for(small, 32), 2)


def test_inbox_gives_in_order_and_holds_no_more_than_its_size() -> None:
    """A delivery that comes early waits for its turn; the one that is due always finds room."""
    with Crew() as crew:
        inbox = Inbox(2, crew, first=1, stride=3)
        early = threading.Event()

        def bring() -> None:
            inbox.put(delivery(4))
            inbox.put(delivery(7))
            early.set()

        crew.start(bring, name="early")
        time.sleep(0.2)
        assert not early.is_set()
        inbox.put(delivery(1))
        assert [inbox.take().number for _ in range(3)] == [1, 4, 7]


# -- gradients -----------------------------------------------------------------------------------


def test_averaged_gradient_is_that_of_one_process(small: DrafterConfig) -> None:
    """Three replicas with a micro-batch each have the gradient of one with all three."""
    target = TableTarget(small)
    rows = rows_of(*range(30, 50))
    batches = MicroBatches(rows, plan_for(small, 64), batch_size=1, drafters=3, seed=0)
    alone = Drafter.random(small, CPU, anchors=ANCHORS)
    replicas = [copy.deepcopy(alone) for _ in range(3)]

    def learn(drafter: Drafter, batch: MicroBatch) -> torch.Tensor:
        hidden = target.hidden(batch)
        numbers = random_numbers(0, batch.number, CPU)
        step = drafter.prepare(batch.input_ids, hidden, batch.loss_mask, generator=numbers)
        loss: torch.Tensor = drafter(**step)
        return loss

    torch.stack([learn(alone, batches.at(i)) for i in range(3)]).mean().backward()
    trained = [[p for p in one.parameters() if p.requires_grad] for one in replicas]
    with Crew() as crew:
        averaging = Averaging(trained, crew)

        def work(place: int) -> None:
            learn(replicas[place], batches.at(place)).backward()
            averaging.average(place)

        for place in range(3):
            crew.start(work, place)
    expected = [p.grad for p in alone.parameters() if p.requires_grad]
    gradients = [[parameter.grad for parameter in replica] for replica in trained]
    torch.testing.assert_close(gradients[0], expected, rtol=1e-4, atol=1e-7)
    for others in gradients[1:]:
        assert all(torch.equal(*pair) for pair in zip(others, gradients[0], strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_replicas_start_equal_and_stay_equal(small: DrafterConfig, dtype: str) -> None:
    """Whatever weights they come with, after some steps all replicas are the same, and changed."""
    config = replace(small, dtype=dtype)
    before = weights_of(Drafter.random(config, CPU, seed=0, anchors=ANCHORS))
    run = train(config, drafters=3, settings=TrainSettings(steps=4))
    after = [weights_of(drafter) for drafter in run.drafters]
    assert torch.equal(after[0], after[1]) and torch.equal(after[0], after[2])
    assert not torch.equal(after[0], before)
    assert run.drafters[0].fc.weight.dtype == getattr(torch, dtype)


def test_training_learns(small: DrafterConfig) -> None:
    """On rows of one repeated token the loss falls: gradients reach the weights with their sign."""
    rows = rows_of(*[40] * 8, vocab_size=1)
    run = train(small, rows=rows, settings=TrainSettings(steps=60, lr=5e-2))
    assert run.summary.last_loss < run.summary.first_loss - 1


def test_learning_rate_rises_in_a_line_and_falls_along_a_cosine() -> None:
    """4% of the steps rise to the peak; half-way through the rest it is half, at the end near 0."""
    schedule = Schedule(1.0, 100, 0.04)
    assert [schedule.rate(step) for step in (1, 2, 4)] == [0.25, 0.5, 1.0]
    rates = [schedule.rate(step) for step in range(4, 101)]
    assert rates == sorted(rates, reverse=True)
    assert schedule.rate(52) == pytest.approx(0.5, abs=0.02)
    assert 0 < schedule.rate(100) < 0.001
    assert Schedule(1.0, 3, 0.0).rate(1) > 0.5


def test_small_steps_of_bfloat16_weights_add_up(small: DrafterConfig) -> None:
    """Updates too small for bfloat16 are kept in float32 until they show."""
    config = replace(small, dtype="bfloat16")
    before = weights_of(Drafter.random(config, CPU, seed=0, anchors=ANCHORS))
    tiny = TrainSettings(steps=1, lr=2e-6)
    once = weights_of(train(config, settings=tiny).drafters[0])
    often = weights_of(train(config, settings=replace(tiny, steps=40)).drafters[0])
    changed = [(weights != before).float().mean().item() for weights in (once, often)]
    assert changed[1] > 2 * changed[0]


# -- failures ------------------------------------------------------------------------------------


class FailingTarget(TableTarget):
    """Fails at one micro-batch."""

    def hidden(self, batch: MicroBatch) -> torch.Tensor:
        if batch.number == 5:
            raise RuntimeError("out of milk")
        return super().hidden(batch)


def fail_at_third_step(drafters: list[Drafter]) -> None:
    """Makes the last replica fail."""
    seen: list[int] = []

    def refuse(*_: object) -> None:
        seen.append(1)
        if len(seen) == 3:
            raise RuntimeError("out of milk")

    drafters[-1].register_forward_pre_hook(refuse)


def assert_ends_at_once(began: float, before: int) -> None:
    assert time.monotonic() - began < 3.0
    assert threading.active_count() == before


@pytest.mark.parametrize("targets", [1, 3])
def test_failing_target_ends_the_run(small: DrafterConfig, targets: int) -> None:
    """Its error is the cause, every thread is gone within a second or so, nothing hangs."""
    before, began = threading.active_count(), time.monotonic()
    others = [FailingTarget(small) for _ in range(targets)]
    with pytest.raises(
        WorkerFailed, match=r"target \d failed: RuntimeError: out of milk"
    ) as caught:
        train(small, targets=list(others), settings=TrainSettings(steps=50))
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert_ends_at_once(began, before)


def test_failing_drafter_ends_the_run(small: DrafterConfig) -> None:
    """The others wait for its gradient, the targets for room: all of them stop."""
    before, began = threading.active_count(), time.monotonic()
    targets = [TableTarget(small) for _ in range(2)]
    with pytest.raises(WorkerFailed, match="drafter 2 failed: RuntimeError: out of milk"):
        train(
            small,
            drafters=3,
            targets=targets,
            settings=TrainSettings(steps=50, queue_size=1),
            spoil=fail_at_third_step,
        )
    assert_ends_at_once(began, before)


def test_loss_that_is_no_number_ends_the_run_before_it_is_saved(
    small: DrafterConfig, tmp_path: Path
) -> None:
    """A run does not go on from broken weights, nor leave them as its newest checkpoint."""

    class Broken(TableTarget):
        def hidden(self, batch: MicroBatch) -> torch.Tensor:
            return super().hidden(batch) * (float("nan") if batch.number >= 6 else 1.0)

    with pytest.raises(WorkerFailed, match="step 4 has the loss nan") as caught:
        settings = TrainSettings(steps=6, save=tmp_path, save_every=1)
        train(small, targets=[Broken(small)], settings=settings)
    assert isinstance(caught.value.__cause__, CompileCacheError)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-00000{n}" for n in (1, 2, 3)]


def test_thread_that_waits_gives_way_when_the_run_is_told_to_stop() -> None:
    """Without any error, too: that is how an interrupted run ends."""
    crew = Crew()
    ended: list[WorkerFailed] = []

    def wait() -> None:
        try:
            Meeting(2, crew).wait()
        except WorkerFailed as error:
            ended.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    crew.stopping.set()
    thread.join(1.0)
    assert not thread.is_alive()
    assert "the run was stopped" in str(ended[0])


# -- what a run says -----------------------------------------------------------------------------


def test_summary_adds_up(small: DrafterConfig, tmp_path: Path) -> None:
    """Steps, tokens, losses and speed are those of the log; what a CPU cannot tell is None."""
    log = tmp_path / "log.jsonl"
    run = train(small, settings=TrainSettings(steps=8, log=log))
    lines, summary = log_of(log), run.summary
    assert (summary.steps, summary.last_step) == (8, 8)
    assert summary.tokens == sum(line["tokens"] for line in lines)
    assert (summary.first_loss, summary.last_loss) == (lines[0]["loss"], lines[-1]["loss"])
    assert summary.tokens_per_second == pytest.approx(summary.tokens / summary.seconds)
    assert summary.steady_tokens_per_second is not None
    assert (summary.compiles_after_prime, summary.memory_spread) == (None, None)
    assert summary.memory_peak == {} and summary.checkpoint is None
    assert summary.dropped == {"left_over": 0}
    assert run.log[0] == "14 rows to train on"
    assert run.log[-1].startswith("step 8/8  loss ")


def test_without_steps_a_run_is_one_pass(small: DrafterConfig) -> None:
    """Fourteen rows for three replicas are four steps; two rows are left out and said."""
    run = train(small, drafters=3, settings=TrainSettings())
    assert run.summary.steps == 4
    assert run.summary.dropped == {"left_over": 2}
    assert "2 rows of each pass do not fill a step and are left out" in run.log


def test_rows_longer_than_the_plan_are_refused(small: DrafterConfig) -> None:
    """Rows that were not read with the plan's longest length end the run with the planned shapes."""
    with pytest.raises(WorkerFailed, match="fits no planned shape"):
        train(small, rows=rows_of(30, 90, 90, 90))


def test_trainer_needs_no_threads_before_run(small: DrafterConfig) -> None:
    """Making one starts nothing: ensure_warm comes between the two."""
    before = threading.active_count()
    Trainer(
        TrainSettings(),
        plan=plan_for(small, 64),
        rows=rows_of(30, 40),
        drafters=[Drafter.random(small, CPU, anchors=ANCHORS)],
        targets=[TableTarget(small)],
    )
    assert threading.active_count() == before
