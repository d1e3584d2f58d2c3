"""From the options of a command to a trainer: plan, rows, targets, replicas."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch
from pydantic import JsonValue

from compilecache import Warm, ensure_warm
from compilecache.errors import PlanError
from compilecache.lengths import parse_sizes
from compilecache.planning import check_devices, parse_settings
from compilecache.progress import LineProgress
from compilecache.replicas import refuse_absent
from compilecache.shapes import ShapePlan, plan_of
from compilecache.workload import load_workload
from dflash_model.checkpoint import load_target
from dflash_model.metrics import Say
from dflash_model.microbatch import longest_row, training_plan
from dflash_model.model import Drafter
from dflash_model.rows import read_rows
from dflash_model.target import HfTarget
from dflash_model.trainer import Trainer, TrainSettings
from dflash_model.workload import DFlashWorkload

WORKLOAD = "dflash_model.workload:dflash"


class Assembly:
    """What the options of ``python -m dflash_model.train`` name, checked before anything is loaded."""

    def __init__(self, options: argparse.Namespace, say: Say) -> None:
        """Raises PlanError naming the option that cannot be used."""
        self._options = options
        self._say = say
        given = None if options.plan is None else ShapePlan.load(options.plan)
        self._workload = _workload(options, given)
        self.plan = training_plan(given or self._planned())
        """The shapes that training runs."""
        for spec in self.plan.specs:
            self._workload.check(spec)
        self._batch_size: int = options.batch_size or max(self.plan.sizes("batch"))
        self._target_devices = _devices(options.target_devices)
        self._drafter_devices = _devices(options.drafter_devices)

    def trainer(self) -> Trainer:
        """Reads the rows, loads the targets, makes the replicas. Raises CompileCacheError."""
        options, config = self._options, self._workload.drafter_config
        rows = read_rows(
            options.data,
            vocab_size=config.vocab_size,
            max_length=longest_row(self.plan, self._batch_size),
            too_long=options.too_long,
        )
        targets = [HfTarget.load(options.target, config, d) for d in self._target_devices]
        return Trainer(
            self._settings(),
            plan=self.plan,
            rows=rows,
            drafters=[self._drafter(device) for device in self._drafter_devices],
            targets=targets,
            say=self._say,
        )

    def warm(self, drafters: Sequence[Drafter]) -> Warm:
        """Makes every planned shape warm on the devices of the replicas. Raises CompileCacheError."""
        options = self._options
        return ensure_warm(
            drafters,
            self.plan,
            store=False if options.store == "none" else options.store,
            root=options.root,
            strict=options.strict,
            on_miss=options.on_miss,
            progress=None if sys.stderr.isatty() else LineProgress(),
        )

    def _planned(self) -> ShapePlan:
        if self._options.seq_lens is None:
            raise PlanError(
                "there are no shapes to train with",
                next_step="Pass --plan FILE, or --seq-lens 512,1024",
                field="plan",
            )
        lengths = parse_sizes(self._options.seq_lens, field="--seq-lens")
        sizes = [self._options.batch_size or 1]
        return plan_of(self._workload.specs(lengths, batch_sizes=sizes, phases=["train"]))

    def _drafter(self, device: torch.device) -> Drafter:
        workload = self._workload
        drafter = Drafter.random(
            workload.drafter_config,
            device,
            seed=self._options.seed,
            anchors=workload.anchors,
            attention=workload.attention,
        )
        load_target(drafter, self._options.target)
        return drafter

    def _settings(self) -> TrainSettings:
        options = self._options
        return TrainSettings(
            steps=options.steps,
            batch_size=self._batch_size,
            lr=options.lr,
            warmup_ratio=options.warmup_ratio,
            clip=options.clip,
            seed=options.seed,
            queue_size=options.queue_size,
            save=options.save,
            save_every=options.save_every,
            resume=options.resume,
            log=options.log,
        )


def _workload(options: argparse.Namespace, plan: ShapePlan | None) -> DFlashWorkload:
    """The drafter of --preset or --config, else that of the plan; --set changes either."""
    chosen = {"preset": options.preset, "config": options.config}
    settings: dict[str, JsonValue] = {k: v for k, v in chosen.items() if v is not None}
    name = WORKLOAD
    if not settings and plan is not None and plan.workload is not None:
        name, settings = plan.workload, dict(plan.settings)
    workload = load_workload(name, {**settings, **parse_settings(options.set)})
    if not isinstance(workload, DFlashWorkload) or workload.packed:
        raise PlanError(
            f"'{name}' is {'a packed drafter' if settings.get('packed') else 'no DFlash drafter'}",
            next_step="Name an unpacked drafter with --preset or --config",
            field="workload",
        )
    return workload


def _devices(text: str) -> list[torch.device]:
    """One for each thread; the same one may be named again. Raises PlanError for one not here."""
    names = [name.strip() for name in text.split(",")]
    for name in check_devices(names):
        refuse_absent(name)
    return [torch.device(name) for name in names]
