"""The main job through ``ensure_warm``: cold, published, lost, restored in a fresh process, trained."""

from __future__ import annotations

import os
import pwd
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from places import Cold, Place, S3Server
from processes import Template
from torch import nn
from training import Trained, inputs_of, model_of, train, warm_and_train
from workloads import Conv, Learning, Product, TwoLayer, plan, rows

from compilecache.ensure import ensure_warm
from compilecache.errors import CompileFailed
from compilecache.progress import LogProgress
from compilecache.report import Report, TargetReport
from compilecache.shapes import InputSpec, plan_of

EAGER = {"backend": "eager"}


def assert_restored(trained: Trained, cold: Trained) -> None:
    """Nothing was compiled, and the numbers are those of the process that compiled."""
    report = trained.report
    assert [row.status for row in report.targets] == ["restored"] * len(report.targets)
    for row in report.targets:
        assert row.evidence is not None
        assert row.evidence.hits > 0
        assert (row.evidence.misses, row.evidence.bypasses, row.evidence.launches) == (0, 0, 0)
        assert row.evidence.foreign_files == ()
    assert report.gave_up == ()
    assert trained.losses == cold.losses
    for mine, theirs in zip(trained.gradients, cold.gradients, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    assert (trained.later.frames, trained.later.misses) == (0, 0)


def test_a_cold_warm_up_compiles_and_publishes_every_target(cold: Cold) -> None:
    """Evidence says miss, the artifacts are in the store, and training compiles nothing more."""
    report = cold.trained.report
    assert [row.status for row in report.targets] == ["compiled"] * 3
    assert all(row.published and row.bytes for row in report.targets)
    assert report.targets[0].evidence is not None
    assert report.targets[0].evidence.launches > 0
    assert report.compiles == 3
    assert cold.trained.later.frames == 0


def test_a_lost_root_is_restored_and_trains_with_the_same_numbers(
    fresh: Template, warmed: Place, cold: Cold
) -> None:
    """The incident: the cache was deleted, and a fresh process has it back without one compile."""
    shutil.rmtree(warmed.root)
    again = fresh.call(warm_and_train, warmed.plan_file, warmed.root, warmed.store)
    assert_restored(again, cold.trained)
    assert again.report.restored_files > 0


def test_the_same_round_trip_over_s3(
    fresh: Template, warmed: Place, cold: Cold, s3_server: S3Server
) -> None:
    """Published from one root to a server over HTTP, restored into another from there."""
    store, env = s3_server.bucket(), s3_server.environment
    sent = fresh.command(
        "publish", warmed.plan_file, "--device", "cpu", "--root", warmed.root, "--store", store,
        "--json", env=env,
    )  # fmt: skip
    assert sent.code == 0, sent.err
    assert len(sent.json["published"]) == 3
    shutil.rmtree(warmed.root)
    again = fresh.call(warm_and_train, warmed.plan_file, warmed.root, store, env=env)
    assert_restored(again, cold.trained)


def _twice_through_memory(folder: Path) -> list[Report]:
    found = []
    for name in ("root", "other"):
        torch.compiler.reset()
        with ensure_warm(
            Product(), [rows(2)], store="memory://tests", root=folder / name, strict=True
        ) as warm:
            found.append(warm.report)
    return found


def test_a_store_in_memory(fresh: Template, seeded: Place) -> None:
    """``memory://`` serves a second root of the same process."""
    first, second = fresh.call(_twice_through_memory, seeded.folder)
    assert first.count("compiled") == 2
    assert second.count("restored") == 2
    assert second.compiles == 0


def _examples(folder: Path) -> tuple[Report, int]:
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    warm = ensure_warm(
        net,
        [torch.empty(2, 4, device="meta"), (torch.ones(3, 4),), {"input": torch.ones(5, 4)}],
        store=folder / "store",
        root=folder / "root",
        compile_options=EAGER,
        strict=True,
    )
    from compilecache import torch_names

    before = torch_names.counts()
    calls: list[Callable[[], torch.Tensor]] = [
        lambda: net(torch.ones(2, 4)),
        lambda: net(torch.ones(3, 4)),
        lambda: net(input=torch.ones(5, 4)),
    ]
    for call in calls:
        net.train()
        call().sum().backward()
        net.eval()
        with torch.no_grad():
            call()
    return warm.report, torch_names.counts().since(before).frames


def test_plain_examples_of_any_module(fresh: Template, tmp_path: Path) -> None:
    """A tensor without data, positional and named arguments; training and evaluation of each."""
    report, later = fresh.call(_examples, tmp_path)
    assert len(report.targets) == 6
    assert {row.key.split("-")[2] for row in report.targets} == {"train", "eval"}
    assert later == 0


def _conv(folder: Path) -> tuple[Report, bool]:
    net = Conv()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    warm = ensure_warm(
        net, [{"x": torch.empty(2, 1, 8, 8, device="meta")}],
        store=folder / "store", root=folder / "root", strict=True,
    )  # fmt: skip
    after = net.state_dict()
    return warm.report, all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.slow
def test_a_convolutional_net_with_batch_norm(fresh: Template, seeded: Place) -> None:
    """Running statistics are untouched by the warm-up, and the second process compiles nothing."""
    first, kept = fresh.call(_conv, seeded.folder)
    assert kept
    assert first.compiles == 2
    shutil.rmtree(seeded.folder / "root")
    second, kept = fresh.call(_conv, seeded.folder)
    assert kept
    assert second.count("restored") == 2
    assert second.compiles == 0


def _replicas(folder: Path) -> tuple[Report, int]:
    from compilecache import torch_names

    models = [model_of("Product"), model_of("Product")]
    warm = ensure_warm(
        models, [rows(2), rows(3)], store=folder / "store", root=folder / "root", strict=True
    )
    before = torch_names.counts()
    for model in models:
        train(model, [2, 3], warm.report)
    return warm.report, torch_names.counts().since(before).frames


def test_several_replicas_on_one_device(fresh: Template, seeded: Place) -> None:
    """Each instance is primed: neither compiles when it trains."""
    report, later = fresh.call(_replicas, seeded.folder)
    assert report.warm
    assert later == 0


def _compiled_already(folder: Path, way: str) -> tuple[Report, int, int]:
    model = model_of("Product")
    if way == "in place":
        model.compile(dynamic=False)
        called: nn.Module = model
    else:
        called = torch.compile(model, dynamic=False)
        called.eval()
        model.train()
    modes = [module.training for module in called.modules()]
    warm = ensure_warm(
        called, [rows(2), rows(3)], store=folder / "store", root=folder / "root", strict=True
    )
    assert [module.training for module in called.modules()] == modes
    trained = train(called, [2, 3], warm.report)
    return warm.report, trained.later.frames, trained.later.misses


@pytest.mark.parametrize("way", ["in place", "wrapped"])
def test_modules_that_are_compiled_already(fresh: Template, seeded: Place, way: str) -> None:
    """``module.compile()`` and ``torch.compile(module)`` are used as they are, and share artifacts."""
    report, frames, misses = fresh.call(_compiled_already, seeded.folder, way)
    assert report.count("compiled") == 4
    assert (frames, misses) == (0, 0)


def _steps(root: Path | None) -> list[float]:
    model, losses = model_of("TwoLayer"), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for step in range(6):
        if step == 3 and root is not None:
            ensure_warm(model, [rows(2)], store=False, root=root, compile_options=EAGER)
        optimizer.zero_grad()
        loss = model(inputs_of(2) + torch.rand(2, 8)).pow(2).sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_training_goes_on_as_if_nothing_had_happened(fresh: Template, tmp_path: Path) -> None:
    """Loss by loss equal to a run without ensure_warm, random numbers and optimizer included."""
    assert fresh.call(_steps, tmp_path / "root") == fresh.call(_steps, None)


def _learning(folder: Path, *, strict: bool) -> Report:
    return ensure_warm(
        Product(), plan("product", [2]).model_copy(update={"specs": _batches()}),
        workload=Learning(), store=False, root=folder, compile_options=EAGER, strict=strict,
    ).report  # fmt: skip


def _batches() -> tuple[InputSpec, ...]:
    return (InputSpec(dims={"batch": 2}),)


def _refused(folder: Path) -> str:
    with pytest.raises(CompileFailed, match="changed parameters in place: weight") as caught:
        _learning(folder, strict=True)
    return str(caught.value)


def test_a_step_that_learns_is_refused(fresh: Template, tmp_path: Path) -> None:
    """A warm-up step that changes parameters cannot be undone, so it is an error and said."""
    assert "no optimizer" in fresh.call(_refused, tmp_path)
    report = fresh.call(_learning, tmp_path, strict=False)
    assert report.count("failed") == 1
    assert not report.warm
    assert "weight" in report.gave_up[0]


def _frozen(folder: Path, kind: str) -> tuple[Report, bool]:
    if kind == "inference":
        with torch.inference_mode():
            model = model_of("TwoLayer")
    else:
        model = model_of("TwoLayer").requires_grad_(False)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    report = ensure_warm(
        model, plan("two_layer", [2], ("eval",)), workload="workloads:two_layer", store=False,
        root=folder, compile_options=EAGER, strict=True,
    ).report  # fmt: skip
    pairs = zip(model.parameters(), before, strict=True)
    return report, all(p.grad is None and torch.equal(p, b) for p, b in pairs)


@pytest.mark.parametrize("kind", ["frozen", "inference"])
def test_parameters_that_take_no_gradient(fresh: Template, tmp_path: Path, kind: str) -> None:
    """Frozen parameters, and tensors made in inference mode, which count no versions."""
    report, kept = fresh.call(_frozen, tmp_path, kind)
    assert report.warm
    assert kept


@pytest.mark.slow
def test_a_drafter(fresh: Template, seeded: Place) -> None:
    """The tiny DFlash by its name: compiled by a command, lost, restored, proven by another."""
    from dflash_model.workload import tiny

    specs = tiny.specs([128], batch_sizes=[1], phases=["train"])
    seeded.write(plan_of(specs, workload="dflash_model.workload:tiny"))
    first = fresh.command("warm", *seeded.words, "--strict", "--json")
    assert first.code == 0, first.err
    assert {row["status"] for row in first.json["targets"]} == {"compiled"}
    shutil.rmtree(seeded.root)
    second = fresh.command("warm", *seeded.words, "--strict", "--json")
    assert second.code == 0, second.err
    assert {row["status"] for row in second.json["targets"]} == {"restored"}
    assert all(row["evidence"]["launches"] == 0 for row in second.json["targets"])


class _Blocking(LogProgress):
    """Notes, when a target is done, whether the caller has gone on."""

    def __init__(self) -> None:
        super().__init__()
        self.returned = False
        self.seen: list[bool] = []

    def done(self, row: TargetReport) -> None:
        self.seen.append(self.returned)


def _blocks(place: Place) -> list[bool]:
    progress = _Blocking()
    ensure_warm(
        TwoLayer(), place.plan, store=place.store, root=place.root, progress=progress,
        workload="workloads:two_layer", strict=True,
    )  # fmt: skip
    progress.returned = True
    return progress.seen


def test_it_returns_only_when_all_is_warm(fresh: Template, warmed: Place) -> None:
    """optimum-neuron#271: the job started before the fetch had ended."""
    shutil.rmtree(warmed.root)
    assert fresh.call(_blocks, warmed) == [False] * 3


def _no_name(folder: Path) -> str:
    os.setuid(54321)
    with pytest.raises(KeyError):
        pwd.getpwuid(os.getuid())
    os.environ["TMPDIR"] = str(folder)
    report = ensure_warm(
        Product(), [rows(2)], store=folder / "store", compile_options=EAGER, strict=True
    ).report
    return report.root


def test_a_user_without_a_passwd_entry(fresh: Template) -> None:
    """140765: the uid of a container has no name; torch's default root works all the same."""
    if os.getuid() != 0:
        pytest.skip("only root can become a user without a name")
    env = {"HOME": None, "USER": None, "LOGNAME": None}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o1777)
        root = Path(fresh.call(_no_name, folder, env=env, cwd=folder))
        assert (root / ".compilecache").is_dir()
