"""The seal: every way to compile or trace in a primed process, and what becomes of it."""

from __future__ import annotations

from pathlib import Path

import guarded
import pytest
from places import Place
from processes import Template

from compilecache import torch_names
from compilecache.guard import hooks, state

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def attempts(fresh: Template) -> dict[str, str]:
    """One process that tried everything."""
    return fresh.call(guarded.attempts)


def test_the_hooks_are_where_this_torch_begins_to_compile() -> None:
    """Names that torch moved are listed here, by import path."""
    assert hooks.missing() == []
    assert state.missing() == []


def test_a_planned_call_goes_through(attempts: dict[str, str]) -> None:
    """Forward and backward, in another thread."""
    assert attempts["planned"] == ""


def test_an_unplanned_shape_is_refused_with_all_that_mends_it(attempts: dict[str, str]) -> None:
    """Automodel#2532: thread, function, shapes, nearest spec, the dimension, the way out."""
    heard = attempts["shape"]
    assert heard.startswith("UnexpectedCompile: thread worker 7 would compile Product.forward")
    assert "x [5, 8] float32 cpu" in heard
    assert "nearest planned spec is 'forward train x=[3,8]': x.shape[0] is 5, planned is 3" in heard
    assert heard.endswith(
        "Pad the batch to a planned shape (PlannedCollate), or add this one to the plan."
    )


def test_another_dtype_is_refused(attempts: dict[str, str]) -> None:
    """The dtype is named, not the shape."""
    assert "x.dtype is float64, planned is float32" in attempts["dtype"]


def test_the_same_shape_called_in_another_way_is_refused(attempts: dict[str, str]) -> None:
    """Grad mode and autocast are part of a graph; torch's own reason is quoted."""
    assert "is warm, but was called in another way" in attempts["state"]
    assert "autocast" in attempts["state"]


@pytest.mark.parametrize("what", ["function", "module"])
def test_a_function_that_nobody_planned_is_refused(attempts: dict[str, str], what: str) -> None:
    """Compiled elsewhere in the program, never called before."""
    assert attempts[what].startswith("UnexpectedCompile: thread worker 7 would compile")
    assert "It is in no plan" in attempts[what]


@pytest.mark.parametrize("what", ["symbolic_trace", "make_fx", "export"])
def test_a_trace_is_refused_by_name(attempts: dict[str, str], what: str) -> None:
    """126024, 118260: it would make every other thread's call fail."""
    assert attempts[what].startswith("UnexpectedCompile: thread worker 7 would trace with torch.fx")
    assert "no other can call a module" in attempts[what]


def test_flex_attention_never_runs_uncompiled(attempts: dict[str, str]) -> None:
    """197384: the dense path takes memory and time in silence; here it stops before it runs."""
    assert attempts["flex"].startswith(
        "UnexpectedCompile: thread worker 7 would run, uncompiled and on the dense path, flex_attention, called in"
    )


def test_what_is_compiled_cannot_be_dropped(attempts: dict[str, str]) -> None:
    """196394: a reset while a thread looks an entry up ends in a segmentation fault."""
    assert attempts["reset"].startswith(
        "UnexpectedCompile: thread worker 7 would drop everything compiled"
    )


def test_nothing_was_compiled_and_every_attempt_counted(attempts: dict[str, str]) -> None:
    """Compiles, dense steps, refusals."""
    compiles, dense, refused = map(int, attempts["counts"].split())
    assert (compiles, dense) == (0, 0)
    assert refused == len(attempts) - 2


def test_closing_takes_everything_back(fresh: Template) -> None:
    """139202: what is process-wide is undone on exit; closing twice does no harm."""
    assert fresh.call(guarded.after_close) == ["", "", ""]


def test_the_error_carries_its_parts(fresh: Template) -> None:
    """For programs, without reading the message."""
    fields = fresh.call(guarded.error_fields)
    assert fields["thread"] == "worker 7"
    assert fields["shapes"] == ("x [5, 8] float32 cpu",)
    assert fields["nearest"] == "forward train x=[3,8]"
    assert fields["target"] == "forward train x=[5,8]"


def test_a_backward_that_was_put_off_is_refused(fresh: Template, tmp_path: Path) -> None:
    """141790: only the forward was warmed; the backward would compile on its first call."""
    heard, gradient, compiles = fresh.call(guarded.lazy_backward, tmp_path, "error")
    assert "would compile the backward of" in heard
    assert (gradient, compiles) == ([], 0)


def test_a_backward_that_was_put_off_compiles_alone_when_told_to(
    fresh: Template, tmp_path: Path
) -> None:
    """In the gate it goes on, and gives a gradient."""
    heard, gradient, compiles = fresh.call(guarded.lazy_backward, tmp_path, "serialize")
    assert heard == ""
    assert len(gradient) == 8
    assert compiles == 1


def test_workers_find_every_shape_and_say_why_they_would_not(
    fresh: Template, tmp_path: Path
) -> None:
    """186537, unsloth#7019, mstar#167, OneTrainer#1687: limits set on main did not hold in workers."""
    heard = fresh.call(guarded.workers, tmp_path)
    assert heard["twelve shapes"] == ""
    assert heard["pool"] == ""
    assert "default_dtype" in heard["state"]
    assert "would compile everything again" in heard["state"]
    assert heard["parent"].startswith("WorkerFailed: worker 7 on cpu failed")
    assert heard["device"].startswith("PlanError: device 'cuda:3' is not warm, only cpu")


def test_autocast_belongs_to_what_is_warm(fresh: Template, tmp_path: Path) -> None:
    """Call ensure_warm in the autocast of the training; workers turn it on by themselves."""
    inside, outside, gave_up = fresh.call(guarded.autocast, tmp_path)
    assert inside == ""
    assert "this thread differs in autocast" in outside
    assert gave_up == ()


def test_what_other_threads_would_not_find_is_known_before_training(
    fresh: Template, tmp_path: Path
) -> None:
    """The last look, in a thread that did not prime; with strict it is an error."""
    gave_up, counted, strict = fresh.call(guarded.lost_in_threads, tmp_path)
    assert len(gave_up) == 2
    assert all("thread check cpu would compile Product.forward" in line for line in gave_up)
    assert counted == 0
    assert strict.startswith("UnexpectedCompile")


def test_an_entry_of_another_backend_is_none(fresh: Template) -> None:
    """Entries are shared by all modules of a class; which backend made them counts."""
    heard, ran = fresh.call(guarded.another_backend)
    assert "x.shape[0] is 9, planned is 3" in heard
    assert ran == 1


def test_a_hook_registered_later_is_named(fresh: Template) -> None:
    """torch would compile it; the message says that it is new, not that a shape is."""
    heard = fresh.call(guarded.hooked_later)
    assert heard.startswith("UnexpectedCompile")
    assert "runs inside 'forward' and did not when that was warmed" in heard


def test_closing_keeps_what_was_compiled_anew(fresh: Template) -> None:
    """And until then the seal holds for it too."""
    heard, kept = fresh.call(guarded.compiled_anew)
    assert heard.startswith("UnexpectedCompile")
    assert kept


def test_cuda_graphs_stay_in_one_thread(fresh: Template) -> None:
    """123177: they assert across threads; refused before, with the reason."""
    here, there = fresh.call(guarded.cuda_graphs)
    assert here == ""
    assert there.startswith("PlanError: 'forward' is compiled with CUDA graphs")


def test_data_parallel_is_refused(fresh: Template) -> None:
    """ModernBERT#147: a new replica in a new thread at every step."""
    heard = fresh.call(guarded.data_parallel)
    assert heard.startswith("PlanError: the model is or holds an nn.DataParallel")


def test_a_failing_worker_stops_its_siblings_and_reaches_the_parent(fresh: Template) -> None:
    """torchtitan#3898: it showed as a hang. Plain threads and a crew alike."""
    parent, crewed, siblings, later = fresh.call(guarded.failing_worker)
    assert parent.startswith("WorkerFailed: drafter 1 on cpu failed: ValueError: bad batch")
    assert siblings == ["drafter 1 on cpu"] * 3
    assert later.startswith("WorkerFailed")
    assert crewed.startswith("WorkerFailed: drafter 1 on cpu failed: UnexpectedCompile")


def test_work_goes_on_after_a_failure_was_heard(fresh: Template) -> None:
    """Once the crew has ended and the parent knows, planned calls work again."""
    first, later = fresh.call(guarded.after_a_failure)
    assert first.startswith("WorkerFailed")
    assert later == ""


def test_no_warm_up_and_no_reset_while_workers_live(fresh: Template) -> None:
    """Both would pull the ground from under them."""
    again, reset = fresh.call(guarded.live_workers)
    assert "ensure_warm was called while workers are alive: MainThread" in again
    assert "would drop everything compiled" in reset


def test_two_models_can_be_warm_at_once(fresh: Template) -> None:
    """Each judges its own calls by its own plan; the process stays sealed until the last is closed."""
    own, refused, later = fresh.call(guarded.two_warm_ups)
    assert "planned is 3" in own
    assert refused.startswith("UnexpectedCompile")
    assert later == ""


def test_one_model_can_be_warmed_twice(fresh: Template) -> None:
    """The limit that travels grows; closing in any order takes only its own seal away."""
    heard, entries = fresh.call(guarded.warmed_twice)
    assert heard[:2] == ["", ""]
    assert heard[2].startswith("UnexpectedCompile")
    assert heard[3] == ""
    assert entries == 49


def test_a_stance_that_runs_everything_eagerly_is_noticed(fresh: Template) -> None:
    """``set_stance`` is process-wide and silent; a worker says so."""
    assert "stance (force_eager)" in fresh.call(guarded.stance)


def test_entries_that_are_gone_are_noticed_before_the_first_step(fresh: Template) -> None:
    """A worker checks that its device's entries are still there."""
    heard = fresh.call(guarded.dropped_entries)
    assert "its compiled entries were dropped" in heard


def test_warn_counts_and_lets_go_on(fresh: Template) -> None:
    """What torch does by itself, with numbers."""
    heard, compiles, refused, dense = fresh.call(guarded.warned)
    assert heard == ""
    assert compiles >= 1
    assert refused == 0
    assert dense >= 1


def test_a_model_that_met_the_limit_before_is_compiled_again(fresh: Template) -> None:
    """137081, vllm#27178: torch never compiled it again, and said so in one log line."""
    before, heard = fresh.call(guarded.past_the_limit_before)
    assert before == 8
    assert heard == ""


@pytest.mark.skipif(not torch_names.takes_recompile_limit(), reason="torch.compile takes no limit")
def test_new_shapes_past_a_given_limit_are_an_error(fresh: Template, tmp_path: Path) -> None:
    """The limit travels with the function; past it torch would run eagerly for ever."""
    heard = fresh.call(guarded.past_every_limit, tmp_path)
    assert heard.startswith("RecompileBudgetExceeded")


def test_training_is_the_same_with_and_without(fresh: Template, tmp_path: Path) -> None:
    """Parameters, accumulated gradients, optimizer and random numbers, step for step."""
    without, with_it, _ = fresh.call(guarded.with_and_without, tmp_path)
    assert without == with_it


def test_sealed_calls_are_right_while_others_try_to_compile_and_trace(fresh: Template) -> None:
    """Every attempt is refused by our error; no call is refused, none is wrong."""
    seen = fresh.call(guarded.stressed, 4000)
    assert seen == {"wrong": [], "kinds": ["UnexpectedCompile"], "tried": True, "compiles": 0}


def test_the_probe_tells_what_a_trace_does_to_others(fresh: Template) -> None:
    """Plain modules are disturbed in every torch so far; compiled calls are refused in some."""
    refuses, disturbs = fresh.call(guarded.probed)
    assert disturbs or refuses in (True, False)


@pytest.mark.parametrize("seed", range(2))
def test_the_gate_compiles_one_new_shape_at_a_time(
    fresh: Template, tmp_path: Path, seed: int
) -> None:
    """Six threads that ask at random: no deadlock, right results, each shape compiled once."""
    seen = fresh.call(guarded.serialized, tmp_path, seed, 50, 6)
    assert seen["wrong"] == []
    assert seen["gave_up"] == ()
    targets = seen["targets"]
    assert isinstance(targets, list)
    assert len(targets) == len(set(targets)) > 20
    assert seen["entries"] == len(targets)


def test_a_shape_met_in_training_is_published(fresh: Template, seeded: Place) -> None:
    """The next start plans it and finds it in the store."""
    status, published = fresh.call(guarded.published_on_the_way, seeded.folder)
    assert status == ["compiled"] * 3
    assert published == [True] * 3
    assert fresh.call(guarded.restored_later, seeded.folder) == [
        "restored", "restored", "restored", "compiled",
    ]  # fmt: skip


def test_a_worker_that_ended_or_raised_holds_nobody_up(fresh: Template, tmp_path: Path) -> None:
    """The gate counts only who is in a step."""
    assert fresh.call(guarded.ended_worker, tmp_path) == ""


def test_a_trace_waits_for_its_turn_in_the_gate(fresh: Template, tmp_path: Path) -> None:
    """A user's own tracing beside running workers: neither is refused."""
    workers, traces = fresh.call(guarded.traced_in_the_gate, tmp_path)
    assert workers == [""] * 3
    assert traces == [""] * 20


def test_the_drafter_names_the_length(fresh: Template, tmp_path: Path) -> None:
    """TorchSpec's bucket comment: a length off the plan is refused by the name of its dimension."""
    heard = fresh.call(guarded.drafter_lengths, tmp_path)
    assert heard["planned"] == ""
    assert "would compile Drafter.forward" in heard["longer"]
    assert "seq_len is 96, planned is 64" in heard["longer"]
