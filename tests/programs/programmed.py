"""Models for programs, and what fresh processes do with them."""

from __future__ import annotations

import copy
import functools
import pickle
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from uuid import uuid4

import torch
from torch import nn
from torch.nn.utils import parametrize
from workloads import Doubling, Product

from compilecache import torch_names
from compilecache.artifact import Record, hash_files
from compilecache.engines import dispatch
from compilecache.engines.programfile import Header, program_among, read_program, write_program
from compilecache.engines.watched import refuse_unwatchable
from compilecache.ensure import ensure_warm
from compilecache.errors import FingerprintMismatch, PlanError, UnexpectedCompile
from compilecache.examples import ExampleWorkload, specs_of_examples
from compilecache.guard.warm import Warm
from compilecache.report import Report
from compilecache.torch_names import original

SCALE = 1.0
"""A global that a model reads."""


class Scaled(Product):
    """Reads a number of its own, one of a list, one of a config, and a global."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.powers = [2, 3]
        self.sizes = Sizes()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, width] → [B, width]."""
        return super().forward(x) * self.scale * SCALE + self.powers[0] + self.sizes.shift


class Sizes:
    """A config whose fields lie in slots."""

    __slots__ = ("shift",)

    def __init__(self) -> None:
        self.shift = 1.0


class Dropping(Product):
    """Does something else in training than in evaluation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, width] → [B, width]."""
        return super().forward(x) * (2.0 if self.training else 1.0)


class Nested(nn.Module):
    """A layer in a layer, tied to another."""

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        with torch.no_grad():
            self.first.weight.copy_(torch.eye(8) * 2)
            self.second.weight.copy_(torch.eye(8) * 2)
        if tied:
            self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, 8] → [B, 8]."""
        return self.second(self.first(x))


class Frozen(Product):
    """Nothing of it is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


class TwoDeep(nn.Module):
    """A layer in a layer: its parameters are not its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Product()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, 8] → [B, 8]."""
        return x @ self.inner.weight


class Stack(nn.Module):
    """Goes through a list of layers, a list of numbers, and a tensor that is neither kind of state."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8, bias=False) for _ in range(2)])
        self.factors = [2.0, 3.0]
        self.table = torch.ones(8)
        with torch.no_grad():
            for layer in self.layers:
                layer.weight.copy_(torch.eye(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, 8] → [B, 8]."""
        for layer in self.layers:
            x = layer(x)
        for factor in self.factors:
            x = x * factor
        return x + self.table.to(x.dtype)


def closing() -> nn.Module:
    """A model whose forward closes over a number."""
    factor = 2.0

    class Closing(Product):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight * factor

        def choose(self, number: float) -> None:
            nonlocal factor
            factor = number

    return Closing()


Forward = Callable[..., torch.Tensor]


def doubling(scale: int) -> Callable[[Forward], Forward]:
    """What decorates a forward, as transformers does with those of all its models."""

    def decorate(forward: Forward) -> Forward:
        @functools.wraps(forward)
        def wrapper(self: nn.Module, *args: object, **kwargs: object) -> torch.Tensor:
            return forward(self, *args, **kwargs) * scale

        return wrapper

    return decorate


class Decorated(Product):
    """Its forward is a closure over another function."""

    @doubling(2)
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, width] → [B, width]."""
        return x @ self.weight


class Breaking(Product):
    """A graph break in the middle."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, width] → [B, width]."""
        y = super().forward(x)
        torch._dynamo.graph_break()
        return y + 1


class Deciding(Product):
    """Which way it goes depends on the data."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, width] → [B, width]."""
        y = super().forward(x)
        return y + 1 if y.sum() > 0 else y - 1


class Custom(Product):
    """A custom autograd function in the middle."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, width] → [B, width]."""
        return Doubling.apply(super().forward(x))  # type: ignore[no-untyped-call, no-any-return]


class Writing(Product):
    """Changes its input in place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, width] → [B, width]."""
        x.add_(1)
        return super().forward(x)


class Counting(Product):
    """Counts in a buffer, as batch norm does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, width] → [B, width]."""
        self.count += 1
        return super().forward(x) + self.count.clamp(max=1)


def hooked() -> nn.Module:
    """A model with a hook from the start."""
    model = Product()
    model.register_forward_hook(lambda module, args, output: output * 3)
    return model


def hooked_inside() -> nn.Module:
    """The same, on a layer of it."""
    model = Nested()
    model.first.register_forward_pre_hook(lambda module, args: (args[0] * 3,))
    return model


def patched() -> nn.Module:
    """A model whose instance has a forward of its own."""
    model = Product()
    model.forward = lambda x: x @ model.weight * 5  # type: ignore[method-assign]
    return model


def parametrized() -> nn.Module:
    """A weight that is computed anew at every use."""
    model = Product()
    parametrize.register_parametrization(model, "weight", nn.ReLU())
    return model


def compiled_before() -> nn.Module:
    """A model that its owner compiled."""
    model = Product()
    model.compile(dynamic=False)
    return model


def rows(count: int = 2) -> torch.Tensor:
    """[count, 8]."""
    return torch.arange(count * 8, dtype=torch.float32).reshape(count, 8) / 10


def make_warm(
    model: nn.Module,
    root: Path,
    *,
    counts: tuple[int, ...] = (2,),
    store: Path | None = None,
    engine: str = "program",
    phases: tuple[str, ...] = ("train", "eval"),
    **options: object,
) -> Warm:
    """``ensure_warm`` with rows of eight."""
    examples = [{"x": rows(count)} for count in counts]
    return ensure_warm(
        model,
        specs_of_examples(examples, original(model), phases),
        workload=ExampleWorkload(examples, module=original(model)),
        store=store or False,
        root=root,
        engine=engine,  # type: ignore[arg-type]
        **options,  # type: ignore[arg-type]
    )


@dataclass
class Saw:
    """What a process saw of one model."""

    report: Report
    right: bool
    """Output and gradients are those of the module without its compiled call."""
    frames: int
    """That Dynamo traced since the warm-up."""


def warm_and_compare(make: Callable[[], nn.Module], root: Path, **options: object) -> Saw:
    """Makes a model warm and compares a training step with an eager one."""
    model = make()
    with make_warm(model, root, **options) as warm:  # type: ignore[arg-type]
        before = torch_names.counts()
        model.train()
        right = same_values(model)
        return Saw(warm.report, right, torch_names.counts().since(before).frames)


def warm_and_compare_all(names: Sequence[str], root: Path) -> dict[str, Saw]:
    """Several models, one after the other in one process."""
    found = {}
    for name in names:
        torch._dynamo.reset()
        found[name] = warm_and_compare(globals()[name], root / name, phases=("train",))
    return found


class Adapter(nn.Module):
    """What LoRA puts around a layer."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, 8] → [B, 8]."""
        return self.base(x) + x


class Mixed(Nested):
    """Computes in the dtype of its second layer, whatever that of the first is."""

    def __init__(self) -> None:
        super().__init__(tied=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, 8] → [B, 8]."""
        return self.second(x @ self.first.weight.to(x.dtype))


def _cast_first(model: nn.Module) -> None:
    assert isinstance(model, Mixed)
    model.first.double()


def _scale_global(model: nn.Module) -> None:
    global SCALE
    SCALE = 7.0


def _adapt(model: nn.Module) -> None:
    assert isinstance(model, Nested)
    model.first = Adapter(model.first)  # type: ignore[assignment]


def _untie(model: nn.Module) -> None:
    assert isinstance(model, Nested)
    model.second.weight = nn.Parameter(torch.eye(8))


def _hook_inside(model: nn.Module) -> None:
    assert isinstance(model, Nested)
    model.first.register_forward_hook(lambda module, args, output: output * 2)


def _hook(model: nn.Module) -> None:
    model.register_forward_hook(lambda module, args, output: output * 2)


def _patch(model: nn.Module) -> None:
    model.forward = lambda x: x * 9  # type: ignore[method-assign]


def _reload(model: nn.Module) -> None:
    model.load_state_dict({"weight": torch.eye(8) * 3}, assign=True)


def _copy(model: nn.Module) -> None:
    model.load_state_dict({"weight": torch.eye(8) * 3})


def _optimize(model: nn.Module) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        model(rows()).sum().backward()
        optimizer.step()


def _reshape(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = torch.ones(8, 4)


CHANGES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], object], str]] = {
    "cast to double": (Product, nn.Module.double, "dtype is float64, planned is float32"),
    "cast to half": (Product, nn.Module.bfloat16, "dtype is bfloat16, planned is float32"),
    "cast beside its inputs": (Mixed, _cast_first, "first.weight has dtype torch.float64, had"),
    "an attribute": (Scaled, lambda m: setattr(m, "scale", 9.0), "self.scale is 9.0, was 1.0"),
    "in a list": (Scaled, lambda m: m.powers.__setitem__(0, 5), "self.powers[0] is 5, was 2"),
    "in a slot": (Scaled, lambda m: setattr(m.sizes, "shift", 5.0), "shift is 5.0, was 1.0"),
    "a config": (Scaled, lambda m: setattr(m, "sizes", Sizes()), "self.sizes was replaced"),
    "a global": (Scaled, _scale_global, "G['SCALE'] is 7.0, was 1.0"),
    "a layer more": (
        Stack,
        lambda m: m.layers.append(nn.Linear(8, 8, bias=False)),
        "a ModuleList holds 3 items, held 2",
    ),
    "an item more": (Stack, lambda m: m.factors.append(5.0), "factors holds 3 items, held 2"),
    "a tensor beside": (
        Stack,
        lambda m: setattr(m, "table", m.table.double()),
        "table has dtype torch.float64, had torch.float32",
    ),
    "its values": (Stack, lambda m: m.table.mul_(7), ""),
    "a closure": (closing, lambda m: m.choose(5.0), "C['factor'] is 5.0, was 2.0"),
    "the mode": (Dropping, nn.Module.eval, "self.training is False, was True"),
    "an adapter": (Nested, _adapt, "first was replaced"),
    "untied": (Nested, _untie, "tied in another way"),
    "a hook inside": (Nested, _hook_inside, "a hook was registered"),
    "a hook": (Product, _hook, "a hook was registered"),
    "a forward": (Product, _patch, "a forward of its own"),
    "a shape": (Product, _reshape, "weight has shape [8, 4], had [8, 8]"),
    "a trained buffer": (Frozen, lambda m: m.requires_grad_(True), "was frozen and is trained"),
    "frozen": (Product, lambda m: m.requires_grad_(False), ""),
    "a checkpoint": (Product, _copy, ""),
    "a checkpoint assigned": (Product, _reload, ""),
    "an optimizer": (Product, _optimize, ""),
    "nothing": (Scaled, lambda m: None, ""),
}
"""What is done to a warm model, and what the refusal of its next call says; "" for a call that is fine."""


@dataclass(frozen=True)
class Called:
    """What a call said after a change."""

    said: str
    """The refusal; empty when it went through."""
    right: bool
    """Whether the call gives what the changed model gives eagerly: sealed, or else unsealed."""


def call_after_changes(root: Path) -> dict[str, Called]:
    """Every change, each on a model of its own."""
    global SCALE
    found = {}
    for name, (make, change, _) in CHANGES.items():
        torch._dynamo.reset()
        SCALE = 1.0
        found[name] = called_after(make, change, root)
    return found


def called_after(
    make: Callable[[], nn.Module], change: Callable[[nn.Module], object], root: Path
) -> Called:
    """What the next call of a warm model says after a change."""
    model, said = make(), ""
    with make_warm(model, root, phases=("train",)):
        model.train()
        change(model)
        try:
            right = same_values(model)
        except UnexpectedCompile as error:
            said, right = str(error), False
    return Called(said, right or same_values(model))


def same_values(model: nn.Module) -> bool:
    """Whether a training step gives what the same module gives without its compiled call."""
    dtype = list(model.parameters())[-1].dtype
    mine = _step(model, dtype)
    compiled, model._compiled_call_impl = model._compiled_call_impl, None
    try:
        expected = _step(model, dtype)
    finally:
        model._compiled_call_impl = compiled
    return len(mine) == len(expected) and all(
        torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(mine, expected, strict=True)
    )


def _step(model: nn.Module, dtype: torch.dtype) -> list[torch.Tensor]:
    """Output, then the gradients that there are."""
    model.zero_grad(set_to_none=True)
    out = model(x=rows().to(dtype))
    if out.requires_grad:
        out.sum().backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [out.detach(), *(gradient.clone() for gradient in grads)]


def surroundings(root: Path) -> dict[str, str]:
    """What a call of a warm model says in other surroundings than those it was warmed in."""
    found = {}
    model = Product()
    with make_warm(model, root):
        model.train()

        def call(name: str, x: torch.Tensor, *, positional: bool = True) -> None:
            try:
                model(x) if positional else model(x=x)
                found[name] = ""
            except UnexpectedCompile as error:
                found[name] = str(error)

        call("by position", rows())
        call("by name", rows(), positional=False)
        with torch.no_grad():
            call("no_grad", rows())
        with torch.inference_mode():
            call("inference", rows())
        with torch.autocast("cpu", torch.bfloat16):
            call("autocast", rows())
        torch.set_default_dtype(torch.float64)
        call("default dtype", rows())
        torch.set_default_dtype(torch.float32)
        call("another shape", rows(3))
        call("another dtype", rows().double())
        call("strides", rows(8).t()[:2])
        call("wants a gradient", rows().requires_grad_())
    return found


def mismatch(make: Callable[[], nn.Module], root: Path, store: Path) -> tuple[str, bool, str]:
    """What a strict start says of a program that does not fit; what an ordinary one does instead."""
    said = ""
    try:
        make_warm(make(), root, store=store, strict=True).close()
    except FingerprintMismatch as error:
        said = f"{error} {sorted(error.changed)}"
    torch._dynamo.reset()
    model = make()
    with make_warm(model, root, store=store) as warm:
        model.train()
        return said, same_values(model), " ".join(warm.report.gave_up)


def scaled_twice() -> nn.Module:
    """As ``Scaled``, with another number: nothing that a fingerprint without a config shows."""
    return Scaled(2.0)


def calls_while_tracing(root: Path, calls: int) -> tuple[int, list[str]]:
    """Calls in threads while another thread traces without pause: how many went well, and errors."""
    model = TwoDeep()
    make_warm(model, root).close()
    done, tracing, errors = threading.Event(), threading.Event(), []
    counted = [0, 0]

    def work(place: int) -> None:
        x = rows()
        while counted[place] < calls // 2 and not errors:
            try:
                model(x).sum().backward()
                counted[place] += 1
            except Exception as error:
                errors.append(f"{type(error).__name__}: {error}")

    tracer = threading.Thread(target=trace_without_pause, args=(done, tracing), daemon=True)
    tracer.start()
    tracing.wait(60)
    workers = [threading.Thread(target=work, args=(place,)) for place in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    done.set()
    tracer.join()
    return sum(counted), errors


def trace_without_pause(done: threading.Event, tracing: threading.Event) -> None:
    """What a thread does that disturbs every other: torch.fx traces, again and again."""
    stack = nn.Sequential(*[nn.Linear(4, 4) for _ in range(20)])
    while not done.is_set():
        torch.fx.symbolic_trace(stack)
        tracing.set()


def _alone() -> None:
    """A process group of one."""
    if not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)


def distributed() -> nn.Module:
    """Wrapped for data-parallel training."""
    _alone()
    return nn.parallel.DistributedDataParallel(Product())


def sharded() -> nn.Module:
    """Its parameters are sharded."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    _alone()
    model = Nested(tied=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    return model


def why_not_sharded() -> str:
    """What is said of it."""
    try:
        refuse_unwatchable(sharded())
    except PlanError as error:
        return str(error)
    return ""


def change_programs(root: Path, change: Callable[[Header], Header]) -> None:
    """Every program of a root as if it had been written with another header; records agree."""
    for path in root.glob(".compilecache/records/*/*.json"):
        record = Record.parse(path.read_bytes())
        name = program_among([entry.path for entry in record.files])
        if name is None:
            continue
        header, data = read_program(root / name)
        (root / write_program(root, change(header), data)).replace(root / name)
        size, digest = hash_files(root, [name])[name]
        files = [
            replace(entry, size=size, xxh3_128=digest) if entry.path == name else entry
            for entry in record.files
        ]
        path.write_bytes(record.model_copy(update={"files": tuple(files)}).dump())


def of_another_torch(header: Header) -> Header:
    """As if another build had made it."""
    return header.model_copy(update={"torch": "2.99.0 0123456"})


def of_other_sources(header: Header) -> Header:
    """As if a traced file had been edited since."""
    return header.model_copy(update={"sources": {**header.sources, "workloads": "0"}})


def of_other_hardware(header: Header) -> Header:
    """As if another machine had made it."""
    return header.model_copy(update={"hardware": "NVIDIA B200 sm_100, 148 processors"})


def serialized(root: Path) -> tuple[list[str], int, bool]:
    """A shape that comes up in a worker: which engine it went by, programs there are, and whether right."""
    model = Product()
    with make_warm(model, root, on_miss="serialize") as warm:
        model.train()
        right: list[bool] = []

        def work() -> None:
            with warm.step():
                right.append(torch.allclose(model(x=rows(5)), rows(5) @ model.weight))

        with warm.crew() as crew:
            crew.start(work, device="cpu")
        dispatcher = dispatch.of(model)
        assert dispatcher is not None
        engines = [row.engine for row in warm.report.targets]
        return engines, len(dispatcher.table), right == [True]


def two_replicas(root: Path) -> tuple[list[str], bool]:
    """Two models on one device."""
    models = [Product(), Product()]
    with ensure_warm(models, [{"x": rows()}], store=False, root=root, engine="program") as warm:
        before = torch_names.counts()
        with torch.no_grad():
            models[1].weight.mul_(2)
        right = [torch.equal(m(x=rows()), rows() @ m.weight) for m in models]
        frames = torch_names.counts().since(before).frames
        return [row.engine for row in warm.report.targets], all(right) and not frames


def copied(root: Path) -> bool:
    """Copies and pickles of a model with programs are plain models."""
    model = Product()
    with make_warm(model, root):
        twin, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    plain = twin._compiled_call_impl is None and pickled._compiled_call_impl is None
    return plain and torch.equal(twin(rows()), pickled(rows()))


def trace_after_program(root: Path) -> tuple[set[str], bool]:
    """The same model made warm again, by the other engine."""
    model = Product()
    make_warm(model, root).close()
    with make_warm(model, root, engine="trace") as warm:
        model.train()
        return {row.engine for row in warm.report.targets}, dispatch.of(model) is None


def made_after(*faults: str) -> tuple[str, list[str]]:
    """Compiles with a pass that fails so often; the error in the end, and faults that never came up."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    from compilecache import aot_names

    class Failing(CustomGraphPass):
        def __init__(self) -> None:
            self.words = list(faults)

        def __call__(self, graph: torch.fx.Graph) -> None:
            if self.words:
                raise RuntimeError(self.words.pop(0))

        def uuid(self) -> str:
            return uuid4().hex  # else torch would find what an earlier one has compiled

    failing = Failing()
    options = {"options": {"post_grad_custom_pre_pass": failing}}
    try:
        assert aot_names.make(Nested(), (torch.ones(2, 8),), {}, options).data
    except Exception as error:
        return str(error), failing.words
    return "", failing.words
