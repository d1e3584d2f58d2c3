"""What fresh processes do in these tests: seal, try what must not be done, say what came of it."""

from __future__ import annotations

import random
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import flex_attention
from training import inputs_of, model_of
from workloads import Product, TwoLayer, rows

from compilecache import (
    CompileCacheError,
    UnexpectedCompile,
    Warm,
    WorkerFailed,
    ensure_warm,
    torch_names,
)
from compilecache.guard.probe import trace_effect
from compilecache.shapes import InputSpec
from compilecache.workload import Workload

EAGER = {"backend": "eager"}


def own_root() -> str:
    """A new folder in that of this process, which goes with it."""
    return tempfile.mkdtemp(dir=Path.cwd())


def warm_product(model: nn.Module, counts: Sequence[int] = (2, 3), **options: object) -> Warm:
    """A model of one matrix product, warm for these numbers of rows."""
    settings: dict[str, object] = {
        "store": False,
        "root": own_root(),
        "compile_options": EAGER,
    }
    return ensure_warm(model, [rows(c) for c in counts], **{**settings, **options})  # type: ignore[arg-type]


def told(function: Callable[[], object]) -> str:
    """The error a call ends with, by type and text; "" when it ends well."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def told_in_thread(function: Callable[[], object], name: str = "worker 7") -> str:
    """The same from another thread."""
    heard: list[str] = []
    thread = threading.Thread(target=lambda: heard.append(told(function)), name=name)
    thread.start()
    thread.join()
    return heard[0]


def attempts() -> dict[str, str]:
    """Everything that a sealed process refuses, by what was tried."""
    model, other = Product(), torch.compile(TwoLayer(), backend="eager")
    never = torch.compile(lambda x: x + 1, backend="eager")
    with warm_product(model) as warm:
        query = torch.ones(1, 1, 16, 16)

        def no_grad() -> None:
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                model(x=torch.ones(2, 8))

        heard = {
            "planned": told_in_thread(lambda: model(x=torch.ones(3, 8)).sum().backward()),
            "shape": told_in_thread(lambda: model(x=torch.ones(5, 8))),
            "dtype": told_in_thread(lambda: model(x=torch.ones(3, 8, dtype=torch.float64))),
            "state": told_in_thread(no_grad),
            "function": told_in_thread(lambda: never(torch.ones(3))),
            "module": told_in_thread(lambda: other(torch.ones(3, 8))),
            "symbolic_trace": told_in_thread(lambda: torch.fx.symbolic_trace(lambda x: x + 1)),
            "make_fx": told_in_thread(lambda: make_fx(lambda x: x + 1)(torch.ones(2))),
            "export": told_in_thread(lambda: torch.export.export(Product(), (torch.ones(2, 8),))),
            "flex": told_in_thread(lambda: flex_attention(query, query, query)),
            "reset": told_in_thread(torch.compiler.reset),
        }
        heard["counts"] = f"{warm.compiles_after_prime} {warm.dense_steps} {warm.refused}"
    return heard


def after_close() -> list[str]:
    """Nothing of the seal is left: what it refused works again, and the hooks are out."""
    from torch._dynamo import callback, convert_frame
    from torch.fx._symbolic_trace import Tracer

    places = [
        lambda: convert_frame.CatchErrorsWrapper.__call__,
        lambda: callback.callback_handler.install_callbacks.__func__,
        lambda: Tracer.trace,
        lambda: torch._dynamo.reset,
    ]
    warm_product(Product()).close()  # torch itself replaces some of them when it first compiles
    before = [place() for place in places]
    model = Product()
    warm = warm_product(model)
    during = [place() for place in places[:1]]
    refused = told(lambda: model(x=torch.ones(5, 8)))
    warm.close()
    warm.close()
    assert refused.startswith("UnexpectedCompile")
    assert before[:1] != during
    assert [a == b for a, b in zip(before, [p() for p in places], strict=True)] == [True] * 4
    return [
        told(lambda: model(x=torch.ones(5, 8))),
        told(lambda: torch.fx.symbolic_trace(lambda x: x + 1)),
        told(torch.compiler.reset),
    ]


class ForwardOnly(Workload):
    """A workload that forgets the backward (141790)."""

    def make_inputs(
        self, spec: InputSpec, module: nn.Module, device: torch.device
    ) -> Mapping[str, object]:
        return {"x": torch.ones(spec.size("batch"), 8, device=device)}

    def step(
        self, spec: InputSpec, module: nn.Module, inputs: Mapping[str, object]
    ) -> torch.Tensor | None:
        module(**inputs)
        return None


def lazy_backward(folder: Path, on_miss: str) -> tuple[str, list[float], int]:
    """A forward that is warm, and a backward that torch put off until somebody calls it."""
    model = model_of("TwoLayer")
    spec = InputSpec(dims={"batch": 2})
    warm = ensure_warm(
        model, [spec], workload=ForwardOnly(), store=False, root=folder, on_miss=on_miss,  # type: ignore[arg-type]
        compile_options={"backend": "aot_eager"},
    )  # fmt: skip
    with warm:

        def step() -> None:
            with warm.step():
                model(x=inputs_of(2)).sum().backward()

        heard = told_in_thread(step)
    gradient = model.second.weight.grad
    assert isinstance(model, TwoLayer)
    return heard, [] if gradient is None else gradient.flatten().tolist(), warm.compiles_after_prime


def workers(folder: Path) -> dict[str, str]:
    """What ``warm.worker`` and ``warm.attach`` let through, and what they do not."""
    model = Product()
    heard: dict[str, str] = {}
    many = list(range(1, 13))
    with warm_product(model, many) as warm:
        limits = torch_names.limits()

        def all_shapes() -> None:
            with warm.worker("cpu"):
                assert torch_names.limits() == limits
                for count in many:
                    model(x=torch.ones(count, 8)).sum().backward()

        heard["twelve shapes"] = told_in_thread(all_shapes)
        with ThreadPoolExecutor(2, initializer=warm.attach, initargs=("cpu",)) as pool:
            done = list(pool.map(lambda count: model(x=torch.ones(count, 8)).shape[0], many))
        heard["pool"] = "" if done == many else str(done)

        def odd_state() -> None:
            torch.set_default_dtype(torch.float64)
            try:
                with warm.worker("cpu"):
                    pass
            finally:
                torch.set_default_dtype(torch.float32)

        heard["device"] = told_in_thread(lambda: warm.attach("cuda:3"))

    warm = warm_product(Product())

    def odd_run() -> None:
        with warm:
            heard["state"] = told_in_thread(odd_state)

    heard["parent"] = told(odd_run)
    return heard


def autocast(folder: Path) -> tuple[str, str, tuple[str, ...]]:
    """Warmed in autocast, as the trainer calls it: in it a worker finds everything, outside nothing."""
    model = Product()
    with torch.autocast("cpu", torch.bfloat16):
        warm = warm_product(model, root=folder)

    def inside() -> None:
        warm.attach("cpu")
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x=torch.ones(3, 8))
        out.sum().backward()

    with warm:
        return (
            told_in_thread(inside),
            told_in_thread(lambda: model(x=torch.ones(3, 8))),
            warm.report.gave_up,
        )


def lost_in_threads(folder: Path) -> tuple[tuple[str, ...], int, str]:
    """Warmed inside a mode that only this thread has: no other thread would find anything."""
    with torch.device("cpu"):
        warm = warm_product(Product(), [3], root=folder, on_miss="serialize")
        with warm:
            counted = warm.compiles_after_prime + warm.refused
            return (
                warm.report.gave_up,
                counted,
                told(lambda: warm_product(Product(), [4], root=folder, strict=True)),
            )


def another_backend() -> tuple[str, int]:
    """A module of the same class, compiled by another backend, is warm for a shape; ours is not."""
    other, model, ran = Product(), Product(), []

    def backend(graph: torch.fx.GraphModule, _examples: object) -> Callable[..., object]:
        def run(*arguments: object) -> object:
            ran.append(1)
            return graph(*arguments)

        return run

    other.compile(backend=backend, dynamic=False)
    other(x=torch.ones(9, 8))
    before = len(ran)
    with warm_product(model):
        heard = told(lambda: model(x=torch.ones(9, 8)))
        other(x=torch.ones(9, 8))
    return heard, len(ran) - before


def hooked_later() -> str:
    """A forward hook that was not there when the model was warmed."""
    model = Product()
    with warm_product(model):
        model.register_forward_pre_hook(lambda module, arguments: None)
        return told(lambda: model(x=torch.ones(3, 8)))


def compiled_anew() -> tuple[str, bool]:
    """The user compiles the model again while it is sealed: closing does not take that away."""
    model = Product()
    warm = warm_product(model)
    model.compile(dynamic=False, backend="eager")
    own = model._compiled_call_impl
    heard = told(lambda: model(x=torch.ones(7, 8)))
    warm.close()
    return heard, model._compiled_call_impl is own


def cuda_graphs() -> list[str]:
    """A model compiled to record CUDA graphs: fine in the thread that primed it, nowhere else."""
    model = TwoLayer()
    warm = ensure_warm(
        model, [rows(2)], store=False, root=own_root(),
        compile_options={"mode": "reduce-overhead"},
    )  # fmt: skip
    with warm:
        return [told(lambda: warm.attach("cpu")), told_in_thread(lambda: warm.attach("cpu"))]


def data_parallel() -> str:
    """``nn.DataParallel`` makes replicas of its own."""
    return told(lambda: warm_product(nn.DataParallel(Product())))


def failing_worker() -> tuple[str, str, list[str], str]:
    """One worker raises while its siblings step; who waits at the end hears of it."""
    model, ended = Product(), []
    warm = warm_product(model)

    def steady() -> None:
        try:
            with warm.worker("cpu"):
                while True:
                    model(x=torch.ones(2, 8))
        except WorkerFailed as error:
            ended.append(error.worker)
            raise

    def failing() -> None:
        with warm.worker("cpu"):
            raise ValueError("bad batch")

    def run() -> None:
        with warm:
            threads = [threading.Thread(target=told, args=(steady,)) for _ in range(3)]
            for thread in threads:
                thread.start()
            told_in_thread(failing, "drafter 1")
            for thread in threads:
                thread.join(60)
                assert not thread.is_alive()

    parent = told(run)
    crewed = told(lambda: _crew(Product()))
    return parent, crewed, ended, told(lambda: warm.check())


def _crew(model: nn.Module) -> None:
    with warm_product(model) as warm, warm.crew() as crew:

        def steady() -> None:
            while True:
                with warm.step():
                    model(x=torch.ones(2, 8))

        def failing() -> None:
            model(x=torch.ones(7, 8))

        crew.start(steady, device="cpu")
        crew.start(failing, device="cpu", name="drafter 1")


def after_a_failure() -> tuple[str, str]:
    """The parent has heard of a failure and goes on: evaluates, saves, starts threads anew."""
    model = Product()

    def failing() -> None:
        raise ValueError("bad batch")

    with warm_product(model) as warm:

        def crew() -> None:
            with warm.crew() as threads:
                threads.start(failing, device="cpu")

        first = told(crew)
        with warm.crew() as threads:
            threads.start(lambda: model(x=torch.ones(2, 8)), device="cpu")
        model(x=torch.ones(3, 8))
        return first, told(warm.check)


def live_workers() -> tuple[str, str]:
    """While a worker lives: no second warm-up, and nothing compiled is dropped."""
    model = Product()
    with warm_product(model, on_miss="warn") as warm, warm.worker("cpu"):
        return (
            told(lambda: warm_product(Product())),
            told(torch.compiler.reset),
        )


def two_warm_ups() -> tuple[str, str, str]:
    """A second model is warmed while the first is sealed; closing one leaves the other sealed."""
    first, second = Product(), TwoLayer()
    one = warm_product(first)
    with warm_product(second, [4], on_miss="serialize"):
        assert first(x=torch.ones(2, 8)).shape == (2, 8)
        own = told(lambda: first(x=torch.ones(5, 8)))
        assert told(lambda: second(x=torch.ones(6, 8))) == ""
    refused = told(lambda: second(x=torch.ones(5, 8)))
    one.close()
    return own, refused, told(lambda: second(x=torch.ones(5, 8)))


def warmed_twice() -> tuple[list[str], int]:
    """One model, warm for twelve shapes and then for twelve more, the first still open."""
    model = Product()
    heard = []
    first = warm_product(model, list(range(2, 14)))
    second = warm_product(model, list(range(14, 26)))
    heard.append(told(lambda: [model(x=torch.ones(n, 8)) for n in (3, 20)]))
    first.close()
    heard.append(told(lambda: [model(x=torch.ones(n, 8)) for n in (3, 20)]))
    heard.append(told(lambda: model(x=torch.ones(40, 8))))
    second.close()
    heard.append(told(lambda: model(x=torch.ones(40, 8))))
    return heard, torch_names.entries_of(model)


def stance() -> str:
    """Somebody told torch to run everything eagerly."""
    with warm_product(Product()) as warm, torch.compiler.set_stance("force_eager"):
        return told_in_thread(lambda: warm.attach("cpu"))


def dropped_entries() -> str:
    """Somebody compiled the model anew behind our back: the next worker says so."""
    model = Product()
    with warm_product(model) as warm:
        torch._C._dynamo.eval_frame.reset_code(Product.forward.__code__)
        return told_in_thread(lambda: warm.attach("cpu"))


def warned() -> tuple[str, int, int, int]:
    """``on_miss="warn"``: torch does what it does, and it is counted."""
    model = Product()
    query = torch.ones(1, 1, 16, 16)
    with warm_product(model, on_miss="warn") as warm:
        heard = told_in_thread(lambda: model(x=torch.ones(5, 8)))
        told_in_thread(lambda: flex_attention(query, query, query))
        return heard, warm.compiles_after_prime, warm.refused, warm.dense_steps


def past_the_limit_before() -> tuple[int, str]:
    """The model met torch's limit of 8 before anybody planned it, and ran eagerly since."""
    model = Product()
    model.compile(dynamic=False, backend="eager")
    for count in range(1, 12):
        model(x=torch.ones(count, 8))
    before = torch_names.entries_of(model)
    with warm_product(model, [20, 21]):
        heard = told_in_thread(lambda: model(x=torch.ones(21, 8)).sum().backward())
        assert torch_names.entries_of(model) > before
    return before, heard


def serialized(folder: Path, seed: int, rounds: int, threads: int) -> dict[str, object]:
    """Threads that ask for new shapes at random; every result is compared with the eager one."""
    model = model_of("Product")
    wrong: list[int] = []
    with warm_product(
        model,
        [2],
        store=folder / "store",
        root=folder / "root",
        on_miss="serialize",
        gate_timeout=60,
    ) as warm:

        def work(number: int) -> None:
            dice = random.Random(seed * 1000 + number)
            for _ in range(rounds):
                count = dice.randrange(2, 40)
                with warm.step():
                    made = inputs_of(count)
                    out = model(x=made)
                    (out * out).sum().backward()
                expected = made @ model.weight.detach()
                if not torch.equal(out.detach(), expected):
                    wrong.append(count)

        with warm.crew() as crew:
            for number in range(threads):
                crew.start(work, number, device="cpu")
        return {
            "wrong": wrong,
            "targets": [row.target for row in warm.report.targets],
            "planned": [str(spec) for spec in warm.plan.specs],
            "entries": torch_names.entries_of(model),
            "gave_up": warm.report.gave_up,
        }


def published_on_the_way(folder: Path) -> tuple[list[str], list[bool]]:
    """A shape that comes up in training is in the store afterwards."""
    model = model_of("TwoLayer")
    with ensure_warm(
        model, [rows(2)], store=folder / "store", root=folder / "root", on_miss="serialize"
    ) as warm:
        told_in_thread(lambda: model(x=inputs_of(5)).sum().backward())
        return [row.status for row in warm.report.targets], [
            row.published for row in warm.report.targets
        ]


def restored_later(folder: Path) -> list[str]:
    """Another process plans what the first one met."""
    with ensure_warm(
        TwoLayer(), [rows(2), rows(5)], store=folder / "store", root=folder / "other"
    ) as warm:
        return [row.status for row in warm.report.targets]


def ended_worker(folder: Path) -> str:
    """A worker that ended, and one that raised, keep nobody from compiling."""
    model = Product()
    with warm_product(model, root=folder, on_miss="serialize", gate_timeout=30) as warm:

        def quick() -> None:
            with warm.worker("cpu"), warm.step():
                model(x=torch.ones(2, 8))

        def raising() -> None:
            with warm.step():
                raise ValueError("this step failed")

        assert told_in_thread(quick) == ""
        assert told_in_thread(raising).startswith("ValueError")
        return told_in_thread(lambda: model(x=torch.ones(9, 8)))


def traced_in_the_gate(folder: Path) -> tuple[list[str], list[str]]:
    """A callback thread traces while workers step: it waits for its turn, nobody is refused."""
    model, heard, traced = Product(), [], []
    with warm_product(model, root=folder, on_miss="serialize", gate_timeout=60) as warm:
        stop = threading.Event()

        def work() -> None:
            while not stop.is_set():
                with warm.step():
                    plain(torch.ones(1))
                    model(x=torch.ones(2, 8)).sum().backward()

        plain = nn.Identity()
        threads = [threading.Thread(target=lambda: heard.append(told(work))) for _ in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(20):
            traced.append(told(lambda: torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2)))))
        stop.set()
        for thread in threads:
            thread.join()
    return heard, traced


def past_every_limit(folder: Path) -> str:
    """A limit that the caller gave and that new shapes exceed is an error, never the slow path."""
    model = Product()
    model.compile(dynamic=False, backend="eager", recompile_limit=3)
    with ensure_warm(
        model, [rows(2)], store=False, root=folder, on_miss="serialize", gate_timeout=30
    ) as warm:
        for count in range(3, 9):
            if heard := told(lambda count=count: model(x=torch.ones(count, 8))):  # type: ignore[misc]
                return heard
        return str(warm.report.gave_up)


def with_and_without(folder: Path) -> tuple[list[float], list[float], bool]:
    """The same training with ``ensure_warm`` before it and in the middle of it, and without."""
    return _train(None), _train(folder), True


def _train(folder: Path | None) -> list[float]:
    torch.manual_seed(3)
    model = model_of("TwoLayer")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = []
    for step in range(6):
        if folder is not None and step in (0, 3):
            with ensure_warm(
                model, [rows(4)], store=False, root=folder, compile_options={"backend": "aot_eager"}
            ):
                pass
        loss = model(torch.randn(4, 8)).square().sum()
        loss.backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return [*losses, *torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()]


def stressed(calls: int) -> dict[str, object]:
    """Eight threads of sealed calls, while others try without end to compile and to trace."""
    model = model_of("Product")
    counts = [2, 3, 4]
    expected = {count: inputs_of(count) @ model.weight.detach() for count in counts}
    wrong: list[int] = []
    tried: list[str] = []
    with warm_product(model, counts) as warm:
        stop = threading.Event()

        def call(number: int) -> None:
            inputs = {count: inputs_of(count) for count in counts}
            with torch.no_grad():
                for index in range(calls):
                    count = counts[(index + number) % 3]
                    if not torch.equal(model(x=inputs[count]), expected[count]):
                        wrong.append(count)

        def attempt(what: Callable[[], object]) -> None:
            while not stop.wait(0.001):  # else it keeps the interpreter from the threads that call
                tried.append(told(what)[:17])

        others = [
            threading.Thread(target=attempt, args=(what,))
            for what in (
                lambda: model(x=torch.ones(9, 8)),
                lambda: torch.fx.symbolic_trace(lambda x: x + 1),
            )
        ]
        for thread in others:
            thread.start()
        with warm.crew() as crew:
            for number in range(8):
                crew.start(call, number, device="cpu")
        stop.set()
        for thread in others:
            thread.join()
        return {
            "wrong": wrong,
            "kinds": sorted(set(tried)),
            "tried": len(tried) > 10,
            "compiles": warm.compiles_after_prime,
        }


def probed() -> tuple[bool, bool]:
    """What this torch does to the other threads while one traces."""
    effect = trace_effect()
    return effect.refuses_compiled_calls, effect.disturbs_modules


def drafter_lengths(folder: Path) -> dict[str, str]:
    """The DFlash drafter, warm for one length: what a longer one meets."""
    from dflash_model.workload import dflash

    workload = dflash(preset="tiny", anchors=2, attention="dense")
    drafter = workload.build(torch.device("cpu")).eval()
    specs = workload.specs([64], batch_sizes=[1], phases=["eval"])
    with ensure_warm(
        drafter, list(specs), workload=workload, store=False, root=folder, compile_options=EAGER
    ):

        def step(length: int) -> None:
            shape = (1, length, drafter.config.context_size)
            with torch.no_grad():
                batch = drafter.prepare(
                    torch.ones(1, length, dtype=torch.long),
                    torch.ones(shape),
                    torch.ones(1, length),
                )
                drafter(**batch)

        return {
            "planned": told_in_thread(lambda: step(64)),
            "longer": told_in_thread(lambda: step(96)),
        }


def error_fields() -> dict[str, object]:
    """What a program finds in the error."""
    model, found = Product(), {}
    with warm_product(model):

        def call() -> None:
            try:
                model(x=torch.ones(5, 8))
            except UnexpectedCompile as error:
                found.update(vars(error))
                assert isinstance(error, CompileCacheError)

        thread = threading.Thread(target=call, name="worker 7")
        thread.start()
        thread.join()
    return {name: value for name, value in found.items() if isinstance(value, str | tuple | None)}
