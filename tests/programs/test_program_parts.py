"""The parts of programs: keys of calls, conditions, files, rewriting, the canary's arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from programmed import Nested, Scaled, rows

from compilecache import triton_names
from compilecache.engines import canary, dispatch, watched
from compilecache.engines.callkey import CallKey, Undescribed, apart
from compilecache.engines.conditions import Scope, described_value, unmet
from compilecache.engines.programfile import (
    Condition,
    Header,
    Summary,
    program_among,
    read_header,
    read_program,
    sealed,
    write_program,
)
from compilecache.errors import ChecksumMismatch
from compilecache.rewriting import kernel_sources, rewritten
from compilecache.shapes import InputSpec
from compilecache.sources import file_digest

# -- keys of calls --------------------------------------------------------------------------------


def forward(self: object, x: object, mask: object = None, *, flag: object = True) -> None:
    """What the keys below belong to."""


KEY = CallKey(forward)


def masking(width: int, table: torch.Tensor) -> Callable[[int], object]:
    """A closure such as flex_attention takes."""

    def mask(q: int) -> object:
        return table[q] < width

    return mask


@dataclass
class Mask:
    """An object with tensors in it, as a BlockMask is."""

    size: int
    blocks: torch.Tensor


TABLE, ONE = torch.arange(4), torch.ones(2, 3)

SAME: list[tuple[str, tuple[Any, ...], dict[str, Any], tuple[Any, ...], dict[str, Any]]] = [
    ("by name", (ONE,), {}, (), {"x": ONE}),
    ("other values", (ONE,), {}, (ONE * 2,), {}),
    ("a default", (ONE,), {}, (ONE, None), {"flag": True}),
    ("a new closure", (masking(2, TABLE),), {}, (masking(2, TABLE + 1),), {}),
    ("an object", (Mask(2, ONE),), {}, (Mask(2, ONE + 1),), {}),
    ("a row of one", (torch.ones(1, 3),), {}, (torch.ones(3, 1).t(),), {}),
]
OTHER: list[tuple[str, tuple[Any, ...], tuple[Any, ...]]] = [
    ("shape", (ONE,), (torch.ones(3, 2),)),
    ("dtype", (ONE,), (ONE.double(),)),
    ("strides", (ONE,), (torch.ones(3, 2).t(),)),
    ("device", (ONE,), (ONE.to("meta"),)),
    ("requires_grad", (ONE,), (ONE.clone().requires_grad_(),)),
    ("true and one", (ONE, True), (ONE, 1)),
    ("one and one point zero", (ONE, 1), (ONE, 1.0)),
    ("zero and minus zero", (ONE, 0.0), (ONE, -0.0)),
    ("list and tuple", ([ONE],), ((ONE,),)),
    ("names in a dictionary", ({"a": ONE},), ({"b": ONE},)),
    ("a number in a closure", (masking(2, TABLE),), (masking(3, TABLE),)),
    ("a shape in a closure", (masking(2, TABLE),), (masking(2, torch.arange(5)),)),
    ("a number in an object", (Mask(2, ONE),), (Mask(3, ONE),)),
    ("one tensor twice", (ONE, ONE), (ONE, ONE.clone())),
    ("a method", (rows().sum,), (rows().mean,)),
]


@pytest.mark.parametrize(("name", "args", "kwargs", "args2", "kwargs2"), SAME)
def test_calls_that_one_program_serves(
    name: str, args: Any, kwargs: Any, args2: Any, kwargs2: Any
) -> None:
    """The values of tensors never count."""
    assert KEY(args, kwargs) == KEY(args2, kwargs2), name


@pytest.mark.parametrize(("name", "args", "args2"), OTHER[:-1])
def test_calls_that_need_programs_of_their_own(name: str, args: Any, args2: Any) -> None:
    """Whatever a trace could have burned in tells them apart."""
    assert KEY(args, {}) != KEY(args2, {}), name


def test_one_tensor_passed_twice_is_served_by_a_program_for_two() -> None:
    """labels=input_ids: what was compiled for two cannot tell; the other way round it could."""
    assert apart(KEY((ONE, ONE), {})) == KEY((ONE, ONE.clone()), {})
    assert apart(KEY((ONE,), {})) == KEY((ONE,), {})
    model = Nested()
    dispatcher = dispatch.Dispatcher(model, model.forward)
    dispatcher.key = KEY
    one, two = dispatch.Program(model.forward), dispatch.Program(model.forward)
    dispatcher.table[KEY((ONE, ONE.clone()), {})] = two
    assert dispatcher.find((ONE, ONE), {}) is two
    dispatcher.table[KEY((ONE, ONE), {})] = one
    assert dispatcher.find((ONE, ONE), {}) is one
    assert dispatcher.find((ONE, ONE.clone()), {}) is two


def test_grad_mode_tells_calls_apart() -> None:
    """Training and evaluation are two programs."""
    with torch.no_grad():
        without = KEY((ONE,), {})
    assert without != KEY((ONE,), {})


class Loop:
    """Refers to itself."""

    def __init__(self) -> None:
        self.me = self


@pytest.mark.parametrize(
    "value",
    [
        torch.nn.Parameter(ONE),
        torch.nn.Linear(2, 2),
        torch.eye(3).to_sparse(),
        Loop(),
        {1, 2},
        iter([1]),
        torch.Generator(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_no_key_can_describe(value: object) -> None:
    """Then there is no program, and no wrong one."""
    with pytest.raises(Undescribed):
        KEY((value,), {})


# -- conditions -----------------------------------------------------------------------------------


def test_a_condition_holds_until_what_it_names_changes() -> None:
    """Compared by words that mean the same in every process."""
    model = Scaled()
    scope = Scope(model, {})
    sources = ["self.scale", "self.sizes.shift", "self.powers", "G['SCALE']"]
    conditions = [Condition(s, str(scope.now(s))) for s in (*sources, "self.nothing")]
    assert unmet(conditions, scope) == {}
    model.scale, model.sizes.shift = 3.0, 4.0
    model.powers.append(1)
    assert set(unmet(conditions, scope)) == {"self.scale", "self.sizes.shift", "self.powers"}
    model.nothing = 1  # type: ignore[assignment]
    assert unmet(conditions, scope)["self.nothing"] == ("absent", "int 1")


@pytest.mark.parametrize("source", ["self.", "next(iter(self))", "L['x'].shape", "self[0:1]"])
def test_an_expression_that_names_no_place_is_left_out(source: str) -> None:
    """It is listed as unchecked, not taken for true."""
    assert Scope(Scaled(), {}).now(source) is None


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (1, "int 1"),
        (True, "bool True"),
        (torch.float16, "torch.float16"),
        (torch.device("cuda:1"), "device cuda"),
        ([1, "a"], "list of 2: int 1, str 'a'"),
        ({"b": 1}, "dict of 1: str 'b'=int 1"),
        (Scaled, "class programmed.Scaled"),
        (math, "module math"),
        (len, "builtin len"),
        (ONE, "tensor [2, 3] torch.float32 (3, 1) cpu False"),
        (torch.nn.Parameter(ONE), None),
    ],
)
def test_values_in_words(value: object, words: str | None) -> None:
    """Without addresses, and without a device's index."""
    assert described_value(value) == words


def test_functions_in_words_know_what_they_do() -> None:
    """Not where they stand."""
    one, two, three = (lambda x: x + 1), (lambda x: x + 1), (lambda x: x + 2)
    assert described_value(one) == described_value(two)
    assert described_value(one) != described_value(three)
    assert described_value("x" * 500) == described_value("x" * 500)
    assert len(str(described_value("x" * 500))) < 60


# -- files ----------------------------------------------------------------------------------------


def header(data: bytes) -> Header:
    """Of some program."""
    return Header(
        spec=InputSpec(),
        device="cuda:0",
        hardware="a GPU",
        torch="2.0",
        parameters="0",
        sources={},
        imports={},
        state={},
        conditions=(Condition("self.scale", "float 1.0"),),
        reference={"output 0": Summary(1, 1.0, (1.0, 1.0, 1.0))},
        **sealed(data),
    )


def test_a_program_file_comes_back(tmp_path: Path) -> None:
    """Named by its content, so that equal ones are one."""
    path = write_program(tmp_path, header(b"code"), b"code")
    assert read_program(tmp_path / path) == (header(b"code"), b"code")
    assert read_header(tmp_path / path) == header(b"code")
    assert write_program(tmp_path, header(b"code"), b"code") == path
    assert program_among(["ab/x.so", path]) == path
    assert program_among(["ab/x.so"]) is None


@pytest.mark.parametrize("cut", [0, 5, 30, 200, -1])
def test_a_truncated_program_is_refused(tmp_path: Path, cut: int) -> None:
    """Wherever it ends."""
    path = tmp_path / write_program(tmp_path, header(b"code"), b"code")
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ChecksumMismatch, match="is damaged"):
        read_program(path)


@pytest.mark.parametrize("place", [2, 26, 40, -1])
def test_a_program_with_a_flipped_bit_is_refused(tmp_path: Path, place: int) -> None:
    """In its magic, the length of its header, the header, the function."""
    path = tmp_path / write_program(tmp_path, header(b"code"), b"code")
    content = bytearray(path.read_bytes())
    content[place] ^= 0x80
    path.write_bytes(content)
    with pytest.raises(ChecksumMismatch, match="is damaged"):
        read_program(path)


# -- rewriting ------------------------------------------------------------------------------------

GENERATED = """
async_compile.triton('triton_poi', '''
@triton_heuristics.pointwise(
    triton_meta={'device': DeviceProperties(type='cuda', index=0, multi_processor_count=132)},
)
def triton_poi(in_ptr0, xnumel): pass
''', device_str='cuda')
def call(args):
    with torch.cuda._DeviceGuard(0):
        torch.cuda.set_device(0)
        buf0 = empty_strided_cuda((8, 8), (8, 1), torch.float32)
        stream0 = get_raw_stream(0)
        # %arg : Tensor "f32[8, 8]cuda:0"
        triton_poi.run(buf0, 0, stream=stream0)
        buf1 = torch.ops.aten.full.default([0], device=device(type='cuda', index=0))
        buf2 = some_new_stream_pool(0, buf1)
"""


def test_every_name_of_the_old_index_is_rewritten() -> None:
    """And a line that still names it is told."""
    source, count, left = rewritten(GENERATED, 0, 3)
    assert count == 6
    assert "_DeviceGuard(3)" in source
    assert "get_raw_stream(3)" in source
    assert "index=3, multi" in source
    assert "cuda:3" in source
    assert "triton_poi.run(buf0, 0, " in source
    assert left == ("buf2 = some_new_stream_pool(0, buf1)",)


@pytest.mark.parametrize(
    "line",
    [
        "torch.device('cuda', index = 0)",
        "x.to(device=0)",
        "DeviceX(0)",
        "f(device_idx=0)",
        "cuda:0",
    ],
)
def test_other_ways_to_name_an_index_are_not_overlooked(line: str) -> None:
    """Rewritten, or told."""
    _, count, left = rewritten(line, 0, 1)
    assert count == 1 or left == (line,)
    assert rewritten(line, 1, 0)[1:] == (0, ())


def test_rewriting_back_gives_what_was() -> None:
    """Both ways, and for indices of two digits."""
    clean = "\n".join(GENERATED.splitlines()[:-1])
    there = rewritten(clean, 0, 12)[0]
    assert rewritten(there, 12, 0)[0] == clean
    assert rewritten(there, 1, 0)[1] == 0


def test_a_bundle_is_moved_with_its_launchers() -> None:
    """Same binaries; keys of the rewritten kernels; the index that launching loads them on."""
    properties = _properties(0)
    kernel = SimpleNamespace(
        device_props=properties,
        triton_meta={"device": properties, "signature": {}},
        compile_results=[SimpleNamespace(compile_meta={"device": 0, "device_type": "cuda"})],
    )
    bundle = _Bundle((_Kernel(0), _Kernel(5)), (_Autotuner("old", kernel), _Autotuner("x", kernel)))
    moved = triton_names.moved_bundle(bundle, {"old": "new"}, 0, 1)
    assert [one.device for one in moved.kernel_artifacts] == [1, 5]
    assert [one.cache_key for one in moved.static_autotuners] == ["new", "x"]
    assert kernel.device_props.index == kernel.triton_meta["device"].index == 1
    assert kernel.compile_results[0].compile_meta == {"device": 1, "device_type": "cuda"}


def test_kernels_are_found_by_the_source_that_torch_hashes() -> None:
    """As Python would read it, escapes and all."""
    after = rewritten(GENERATED, 0, 1)[0]
    (before_key,), (after_key,) = ([kernel_sources(text)[0]] for text in (GENERATED, after))
    assert "index=0" in before_key
    assert "index=1" in after_key
    assert len(triton_names.renamed_kernels(GENERATED, after)) == 1
    assert kernel_sources("async_compile.triton('k', '''a\\nb''', device_str='cuda')") == ["a\nb"]


@dataclass(frozen=True)
class _Config:
    """Of a Triton kernel."""

    kwargs: dict[str, int]
    num_warps: int = 4
    num_stages: int = 1


def _result(block: int, folder: str) -> Any:
    kernel = SimpleNamespace(hash=folder, function=7, cubin_path="x", cubin_raw=b"x", name="k")
    return SimpleNamespace(config=_Config({"RBLOCK": block}), kernel=kernel)


def _tuner(key: str, *blocks: int) -> Any:
    kernel = SimpleNamespace(
        compile_results=[_result(b, f"{b:x}" * 16) for b in blocks], inductor_meta={}
    )
    return SimpleNamespace(cache_key=key, kernel=kernel, kernel_name=f"triton_{key}")


def _live(won: int, *blocks: int) -> Any:
    results = [_result(block, f"{block:x}" * 16) for block in blocks]
    launcher = SimpleNamespace(config=_Config({"RBLOCK": won}))
    return SimpleNamespace(launchers=[launcher], compile_results=results)


def test_kernels_travel_in_the_configuration_that_won(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of several; one that torch compiled while loading, with its binary; none where it is unsure.

    What stays as it was is named, with the reason.
    """
    from torch._inductor.runtime.runtime_utils import triton_hash_to_path_key
    from torch._inductor.triton_bundler import TritonBundle, TritonKernelArtifacts

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    folder = tmp_path / triton_hash_to_path_key("2" * 16)
    folder.mkdir()
    (folder / "k.cubin").write_bytes(b"binary")
    (folder / "k.ttir").write_bytes(b"a step on the way")
    (folder / "__grp__k.json").write_text(f'{{"child": "{folder}/k.cubin"}}')
    tuners = [_tuner("one", 4, 8), _tuner("new", 4), _tuner("gone", 4), _tuner("open", 4, 8)]
    undecided = SimpleNamespace(launchers=[1, 2], compile_results=[])
    new = _live(2, 4, 2)
    live = [("one", undecided), ("one", _live(8, 4, 8)), ("new", new), ("gone", _live(1, 4, 1))]
    live.append(("open", undecided))
    bundle = TritonBundle([TritonKernelArtifacts("k", 0, [])], tuners)
    found, untuned = triton_names.tuned_bundle(bundle, live)
    blocks = [[r.config.kwargs["RBLOCK"] for r in t.kernel.compile_results] for t in tuners]
    assert blocks == [[8], [2], [4], [4, 8]]
    settled = [t.kernel.inductor_meta.get("dynamic_scale_rblock") for t in tuners]
    assert settled == [False, False, None, None]
    assert tuners[1].kernel.compile_results[0].kernel.function is None
    assert new.compile_results[1].kernel.function == 7
    assert [text.partition(":")[0] for text in untuned] == ["triton_gone", "triton_open"]
    assert "launchers: [2]" in untuned[1]
    names = {a.filename: a.payload for a in found.kernel_artifacts[1].artifacts}
    assert names["k.cubin"] == b"binary"
    assert names.keys() == {"k.cubin", "__grp__k.json"}
    assert str(tmp_path).encode() not in names["__grp__k.json"]


def test_kernels_that_are_built_while_loading_are_settled_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last code of that key counts; what comes ready is not built; an unknown winner changes nothing."""
    from torch._inductor.codecache import PyCodeCache

    ready, open_kernel = _live(4, 4, 8), _live(4, 4, 8)
    open_kernel.launchers = [SimpleNamespace(config=_Config({"RBLOCK": b})) for b in (4, 8)]
    code = SimpleNamespace(key="key", ready=ready, red=open_kernel, call=len)
    older, other = SimpleNamespace(key="key", red=ready), SimpleNamespace(key="other", red=ready)
    monkeypatch.setattr(PyCodeCache, "modules", [older, code, other])
    bundle = SimpleNamespace(static_autotuners=[SimpleNamespace(cache_key="k", kernel=ready)])
    graph = SimpleNamespace(cache_key="key", _triton_bundle=bundle)
    assert dict(triton_names.built(graph)) == {"red": open_kernel}
    assert not dict(triton_names.built(SimpleNamespace(cache_key="none", _triton_bundle=None)))
    assert triton_names.winner(open_kernel) is None
    won = triton_names.winner(_live(8, 4, 8))
    assert won is not None
    triton_names.settle(open_kernel, "something else")
    assert len(open_kernel.launchers) == 2
    triton_names.settle(open_kernel, won)
    assert [launcher.config.kwargs for launcher in open_kernel.launchers] == [{"RBLOCK": 8}]
    assert triton_names.winner(open_kernel) == won


def _properties(index: int) -> Any:
    from torch._inductor.runtime.hints import DeviceProperties

    return DeviceProperties(type="cuda", index=index, multi_processor_count=1, cc=90)


@dataclass
class _Kernel:
    device: int


@dataclass
class _Autotuner:
    cache_key: str
    kernel: Any


@dataclass
class _Bundle:
    kernel_artifacts: tuple[_Kernel, ...]
    static_autotuners: tuple[_Autotuner, ...]


# -- the canary -----------------------------------------------------------------------------------


def summary(tensor: torch.Tensor) -> Summary:
    """What the canary keeps of a tensor."""
    return canary._summary(tensor)


def test_the_canary_sees_an_error_of_a_hundredth() -> None:
    """Wherever in the tensor it is; and rounding is far below what is allowed (vllm#38962)."""
    torch.manual_seed(0)
    tensor = torch.randn(1000)
    rounded = tensor.bfloat16().float()
    wrong = tensor.clone()
    wrong[7:17] *= -1
    theirs = {"gradient w": summary(tensor)}
    assert canary.difference({"gradient w": summary(rounded)}, theirs)[1] < canary.TOLERANCE
    assert canary.difference({"gradient w": summary(wrong)}, theirs)[1] > canary.TOLERANCE
    assert canary.difference(theirs, theirs) == ("", 0.0)


def test_the_canary_refuses_what_is_missing_or_not_finite() -> None:
    """No gradient, one more, another size."""
    one = summary(torch.ones(4))
    assert canary.difference({}, {"output 0": one}) == ("output 0", math.inf)
    assert canary.difference({"output 0": one}, {}) == ("output 0", math.inf)
    assert canary.difference({"a": one}, {"a": summary(torch.ones(5))})[1] == math.inf
    assert canary.difference({"a": one}, {"a": replace(one, norm=math.nan)})[1] == math.inf
    with pytest.raises(ValueError, match="not finite"):
        summary(torch.tensor([math.inf]))


def test_noise_beside_large_gradients_does_not_count() -> None:
    """A bias whose gradient is zero but for rounding."""
    large, noise, other = torch.ones(100), torch.full((4,), 1e-7), torch.full((4,), -1e-7)
    theirs = {"gradient w": summary(large), "gradient b": summary(noise)}
    mine = {"gradient w": summary(large), "gradient b": summary(other)}
    assert canary.difference(mine, theirs)[1] < 1e-3


def test_exact_outputs_are_compared_exactly() -> None:
    """Masks and indices."""
    mask = torch.rand(100) > 0.5
    assert canary.difference({"o": summary(mask)}, {"o": summary(mask)})[1] == 0
    assert canary.difference({"o": summary(~mask)}, {"o": summary(mask)})[1] > 0.1


# -- what is looked at in every call --------------------------------------------------------------


def test_live_tensors_may_be_exchanged_but_not_changed_in_kind() -> None:
    """Same shape, dtype, strides, ties; frozen is fine, unfrozen is not."""
    model = Nested()
    live = watched.LiveTensors(model)
    assert live.fit()
    weight = torch.nn.Parameter(torch.zeros(8, 8))
    model.first.weight = model.second.weight = weight
    assert live.fit()
    model.second.weight = torch.nn.Parameter(torch.zeros(8, 8))
    assert not live.fit()
    assert live.why() == ["parameters are tied in another way"]
    model.second.weight = weight.requires_grad_(False)
    assert live.fit()
    del model.first.weight
    assert not live.fit()
    assert live.why() == ["first.weight is gone"]


# -- the rest -------------------------------------------------------------------------------------


def test_a_call_that_makes_no_key_is_told_while_warming() -> None:
    """Else it would be traced in silence and reported as a program."""
    model = Nested()
    dispatcher = dispatch.Dispatcher(model, model.forward)
    assert dispatcher.find((torch.nn.Parameter(ONE),), {}) is None
    dispatcher.provide = lambda args, kwargs, key: pytest.fail("there is no key")
    with pytest.raises(dispatch.NoProgram, match="looked up by"):
        dispatcher.find((torch.nn.Parameter(ONE),), {})


def test_the_digest_of_a_script_does_not_run_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training script that was traced under its name may run as the main module here."""
    (tmp_path / "trained_script.py").write_text("raise SystemExit('it ran')\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = file_digest("trained_script")
    (tmp_path / "trained_script.py").write_text("# a comment\nraise SystemExit('it ran')\n")
    assert file_digest("trained_script") == before
    (tmp_path / "trained_script.py").write_text("raise SystemExit('it runs')\n")
    assert file_digest("trained_script") != before
    with pytest.raises(ImportError):
        file_digest("no_such_script")
