"""Observing real runs, each in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import compilecache
from compilecache.errors import PlanError
from compilecache.observe import observe, plan_files
from compilecache.shapes import InputSpec, ShapePlan, TensorSpec

ROOT = Path(compilecache.__file__).parents[1]
COMMAND = "from compilecache.cli import main; main()"

TRAIN = """
    import torch
    from torch import nn

    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x, *, scale=1.0):
            return self.linear(x) * scale

    net = Net()
    net.compile(backend="eager", fullgraph=True)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Where a test writes what it runs."""
    return tmp_path / "train.py"


def write(script: Path, body: str) -> Path:
    """The common beginning, and the test's own body."""
    script.write_text(textwrap.dedent(TRAIN) + textwrap.dedent(body))
    return script


def planned(*words: str, cwd: Path, **options: object) -> subprocess.CompletedProcess[str]:
    """``compilecache plan --observe -- python …`` as a user runs it."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", COMMAND, "plan", "--output", "plan.yaml", "--observe", "--"]
    return subprocess.run(
        [*command, sys.executable, *words],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **options,  # type: ignore[call-overload]
    )


def tensor(*shape: int, dtype: str = "float32", requires_grad: bool = False) -> TensorSpec:
    """A contiguous tensor of these sizes."""
    return TensorSpec(shape=shape, dtype=dtype, requires_grad=requires_grad)


def test_a_run_becomes_a_plan_and_runs_on_as_it_is(script: Path) -> None:
    """Same output, same losses and random numbers, same exit code; every shape and phase is there."""
    write(
        script,
        """
        import sys
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for line in sys.stdin:
            loss = net(torch.randn(int(line), 4), scale=2.0).square().mean()
            loss.backward()
            optimizer.step()
            print(loss.item(), torch.rand(1).item())
        with torch.no_grad():
            net(torch.randn(5, 4))
        print(sys.path[1:], "sitecustomize" in sys.modules, file=sys.stderr)
        sys.exit(7)
        """,
    )
    plain = subprocess.run(
        [sys.executable, str(script)],
        input="2\n3\n2\n",
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    seen = planned("train.py", cwd=script.parent, input="2\n3\n2\n")
    assert seen.returncode == plain.returncode == 7, seen.stderr
    assert seen.stdout == plain.stdout
    assert seen.stdout.count("\n") == 3
    assert plain.stderr.split(" ")[0] == seen.stderr.split(" ")[0]
    assert "Wrote plan.yaml: 3 specs of __main__:Net." in seen.stderr
    plan = ShapePlan.load(script.with_name("plan.yaml"))
    assert plan.specs == (
        InputSpec(phase="train", example={"x": tensor(2, 4), "scale": 2.0}, positional=1),
        InputSpec(phase="train", example={"x": tensor(3, 4), "scale": 2.0}, positional=1),
        InputSpec(phase="eval", example={"x": tensor(5, 4)}, positional=1),
    )
    assert plan.lengths == {
        "source": "observed: train.py",
        "module": "__main__:Net",
        "devices": ["cpu"],
        "calls": 4,
    }


def test_every_way_to_compile_is_seen(script: Path) -> None:
    """A compiled module stays what it is; decorators and nested compiled functions work as before."""
    write(
        script,
        """
        import copy, inspect
        inner = torch.compile(net, backend="eager")
        assert isinstance(inner, nn.Module) and inner._orig_mod is net
        assert list(inner.state_dict()) == ["_orig_mod.linear.weight", "_orig_mod.linear.bias"]
        assert inner.linear is net.linear and copy.deepcopy(inner).linear is not net.linear

        @torch.compile(backend="eager")
        def double(x, by=2):
            "Doubles."
            return x * by

        assert double.__name__ == "double" and double.__doc__ == "Doubles."
        assert list(inspect.signature(double).parameters) == ["x", "by"]
        bound = torch.compile(net.forward, backend="eager")
        outer = torch.compile(lambda x: double(inner(x)), backend="eager", fullgraph=True)

        def broken(x):
            x = x + 1
            torch._dynamo.graph_break()
            return double(x)

        x = torch.ones(1, 4)
        assert torch.equal(outer(x), 2 * net.linear(x))
        assert torch.equal(torch.compile(broken, backend="eager")(x), 2 * (x + 1))
        inner(torch.ones(2, 4))
        bound(torch.ones(3, 4))
        double(torch.ones(4), 3)
        assert torch.compile(double, disable=True)(x, 2).shape == (1, 4)
        """,
    )
    seen = planned("train.py", cwd=script.parent)
    assert seen.returncode == 0, seen.stderr
    assert "compiled modules were seen: one plan for each" in seen.stderr
    net = ShapePlan.load(script.with_name("plan-Net.yaml"))
    assert [str(spec) for spec in net.specs] == ["forward train x=[2,4]", "forward train x=[3,4]"]
    double = ShapePlan.load(script.with_name("plan-double.yaml"))
    assert (
        InputSpec(function="double", phase="eval", example={"x": tensor(4), "by": 3}, positional=2)
        in double.specs
    )


def test_observing_compiles_nothing_more(script: Path) -> None:
    """As many graphs and frames as without: the recorder is never traced."""
    write(
        script,
        """
        graphs = []

        def counter(graph, inputs):
            graphs.append([node.name for node in graph.graph.nodes])
            return graph.forward

        inner = torch.compile(lambda x: x.sin(), backend=counter)

        def outer(x):
            x = x.cos()
            torch._dynamo.graph_break()
            return inner(x) + 1

        outer = torch.compile(outer, backend=counter)
        for size in (2, 2):
            outer(torch.ones(size))
            inner(torch.ones(size))
        print(graphs)
        """,
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    plain = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env=environment, check=True
    )
    seen = planned("train.py", cwd=script.parent)
    assert seen.returncode == 0, seen.stderr
    assert seen.stdout == plain.stdout


def test_threads_and_processes_are_merged(script: Path) -> None:
    """Two threads, a forked child and a spawned one; each call counts once."""
    write(
        script,
        """
        import os, subprocess, sys, threading

        def work(rows):
            for _ in range(50):
                net(torch.ones(rows, 4))

        if "child" in sys.argv:
            work(5)
            sys.exit()
        net(torch.ones(1, 4))
        threads = [threading.Thread(target=work, args=(1,)) for _ in range(4)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        child = os.fork()
        if child == 0:
            with torch.no_grad():
                net.linear(torch.ones(4, 4)), net(torch.ones(1, 4))
            os._exit(0)
        os.waitpid(child, 0)
        subprocess.run([sys.executable, __file__, "child"], check=True)
        """,
    )
    # Python 3.12 warns of a fork beside torch's threads.
    seen = planned("-W", "ignore", "train.py", cwd=script.parent)
    assert seen.returncode == 0, seen.stderr
    plan = ShapePlan.load(script.with_name("plan.yaml"))
    assert {str(spec) for spec in plan.specs} == {
        "forward train x=[1,4]",
        "forward eval x=[1,4]",
        "forward train x=[5,4]",
    }
    assert plan.lengths["calls"] == 1 + 4 * 50 + 1 + 50


def test_a_killed_run_keeps_every_shape(script: Path) -> None:
    """SIGKILL at any moment: what ran before it is in the plan, and the exit code is the signal's."""
    write(
        script,
        """
        import os, signal
        for rows in (1, 2, 3):
            net(torch.ones(rows, 4))
        os.kill(os.getpid(), signal.SIGKILL)
        """,
    )
    seen = planned("train.py", cwd=script.parent)
    assert seen.returncode == 128 + signal.SIGKILL
    assert len(ShapePlan.load(script.with_name("plan.yaml")).specs) == 3


def test_signals_are_passed_on(script: Path) -> None:
    """SIGTERM to the observer reaches the run, which ends as it likes; the plan is still written."""
    write(
        script,
        """
        import signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
        net(torch.ones(1, 4))
        print("ready", flush=True)
        time.sleep(60)
        """,
    )
    command = [sys.executable, "-c", COMMAND, "plan", "--output", "plan.yaml", "--observe", "--"]
    with subprocess.Popen(
        [*command, sys.executable, "train.py"],
        cwd=script.parent,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 3, errors
    assert script.with_name("plan.yaml").is_file()


def test_the_modules_own_workload_names_the_specs(script: Path) -> None:
    """Its dims, its separately compiled functions, its name and settings; parts need no plan of theirs."""
    write(
        script,
        """
        from compilecache.shapes import InputSpec
        from compilecache.workload import Workload

        class Own(Workload):
            def origin(self):
                return "train:Own", {"layers": 2}

            def functions(self, module):
                return {"forward": module, "head": module.head}

            def make_inputs(self, spec, module, device):
                raise NotImplementedError

            def spec_of(self, function, inputs, phase):
                rows = next(iter(inputs.values())).shape[0]
                return InputSpec(function=function, phase=phase, dims={"batch": rows})

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.head = nn.Linear(4, 4)

            def compile_workload(self):
                return Own()

            def forward(self, x, helper=None):
                return x.sin()

        model = Model()
        model.compile(backend="eager")
        model.head.compile(backend="eager")
        model(torch.ones(2, 4), helper=object())
        model.head(torch.ones(3, 4))
        """,
    )
    seen = planned("train.py", cwd=script.parent)
    assert seen.returncode == 0, seen.stderr
    plan = ShapePlan.load(script.with_name("plan.yaml"))
    assert plan.specs == (
        InputSpec(function="forward", phase="train", dims={"batch": 2}),
        InputSpec(function="head", phase="train", dims={"batch": 3}),
    )
    assert (plan.workload, plan.settings) == ("train:Own", {"layers": 2})


def test_what_no_plan_can_hold_is_told(script: Path) -> None:
    """A call with an object in it is left out by name; the others are planned, here as JSON."""
    write(
        script,
        """
        net(torch.ones(1, 4))
        odd = torch.compile(lambda x, how: x, backend="eager")
        odd(torch.ones(1), object())
        """,
    )
    command = [sys.executable, "-c", COMMAND, "plan", "--json", "--observe", "--", sys.executable]
    seen = subprocess.run(
        [*command, "train.py"],
        cwd=script.parent,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "is in no plan, because of its how (builtins.object)" in seen.stderr
    plan = ShapePlan.parse(json.loads(seen.stdout)["plans"]["plan.yaml"])
    assert plan == ShapePlan.load(script.with_name("plan.yaml"))
    assert len(plan.specs) == 1


@pytest.mark.parametrize(("code", "expected"), [(0, 1), (7, 7)])
def test_a_run_without_compiled_calls_is_told(tmp_path: Path, code: int, expected: int) -> None:
    """Exit code 1 with the next step; the run's own fault comes first."""
    seen = planned("-c", f"raise SystemExit({code})", cwd=tmp_path)
    assert seen.returncode == expected
    assert "nothing compiled was called" in seen.stderr
    assert not (tmp_path / "plan.yaml").exists()


def test_another_sitecustomize_still_runs(tmp_path: Path) -> None:
    """The one that would have run without us, and sys.path is as without us."""
    (tmp_path / "sitecustomize.py").write_text("print('theirs')\nmark = 1\n")
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    code = "import sys, sitecustomize; print(sitecustomize.mark, sys.path)"
    command = [sys.executable, "-c", COMMAND, "plan", "--observe", "--", sys.executable, "-c", code]
    plain = subprocess.run(
        command[-3:], env=environment, capture_output=True, text=True, check=True
    )
    seen = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    # The observer is a Python of its own, with that sitecustomize too.
    assert seen.stdout == "theirs\n" + plain.stdout


def test_torch_is_imported_by_the_program_alone(tmp_path: Path) -> None:
    """Observing imports nothing that the program did not; torch's loader is left as it was."""
    code = (
        "import sys; print(sorted({'torch', 'compilecache', 'inspect'} & set(sys.modules)));"
        "import torch; print(type(torch.__spec__.loader).__name__, vars(torch.__spec__.loader).keys())"
    )
    seen = planned("-c", code, cwd=tmp_path)
    lines = seen.stdout.splitlines()
    assert lines[0] == "[]"
    assert "SourceFileLoader" in lines[1]
    assert "exec_module" not in lines[1]


def test_a_command_that_does_not_exist_is_named() -> None:
    """Before anything else happens."""
    with pytest.raises(PlanError, match="command 'no-such-command' cannot be run: No such file"):
        observe(["no-such-command"])


def test_several_plans_get_names_that_tell_them_apart() -> None:
    """By class; by module and class where two classes share a name."""
    plan = ShapePlan(specs=(InputSpec(),))
    files = plan_files({"a:Net": plan, "b:Net": plan, "b:Head.inner": plan}, Path("d/plan.yaml"))
    assert [str(path) for path in files] == [
        "d/plan-a-Net.yaml",
        "d/plan-b-Net.yaml",
        "d/plan-Head.inner.yaml",
    ]
    assert list(plan_files({"a:Net": plan}, Path("plan.yaml"))) == [Path("plan.yaml")]
