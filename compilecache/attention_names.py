"""Which kernel ``scaled_dot_product_attention`` becomes: torch asks the GPU while it traces.

Where the GPU is, the questions are noted, and answered with the operations that torch calls there. Where it
is not, these operations are called, and a question without an answer is refused. ``missing()`` lists
the private names that this torch does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compilecache import undecided
from compilecache.gpuprofile import Answer
from compilecache.operations import Recorder, carry_out, word
from compilecache.torch_names import absent
from compilecache.undecided import Refused, Unplaced

_PLACES = {
    "torch": [
        "_C._get_sdp_priority_order",
        "ops.aten.scaled_dot_product_attention.default._dispatch_cache",
        "ops.aten.scaled_dot_product_attention.default._op_dk",
        "ops.aten.scaled_dot_product_attention.default.py_kernels",
    ],
    "torch._subclasses.fake_tensor": ["FakeTensorMode"],
}

INPUTS = ("query", "key", "value", "attn_mask")
"""The tensors of a question, as an answer names them."""
ATTENTION = "scaled_dot_product_attention"


def missing() -> list[str]:
    """Names used here that this torch does not have; each as an import path."""
    return absent(_PLACES)


@dataclass(frozen=True, slots=True)
class Facts:
    """What the choice of a kernel looks at of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    grad: bool
    """Whether a gradient of it is wanted."""

    @classmethod
    def of(cls, tensor: Tensor) -> Facts:
        """In this thread's grad mode."""
        grad = tensor.requires_grad and torch.is_grad_enabled()
        return cls(tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), grad)

    def __str__(self) -> str:
        shape, strides = (str(list(sizes)).replace(" ", "") for sizes in (self.shape, self.strides))
        return f"{word(self.dtype)}{shape} by {strides}{' grad' if self.grad else ''}"

    def like(self, device: torch.device) -> Tensor:
        """An empty tensor of which the same is true."""
        made = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)
        return made.requires_grad_(self.grad)


@dataclass(frozen=True, slots=True)
class Question:
    """One call of ``scaled_dot_product_attention``; as text it is the answer's key in a profile."""

    tensors: tuple[Facts | None, ...]
    """``INPUTS``."""
    dropout_p: float
    is_causal: bool
    scale: float | None
    enable_gqa: bool
    kernels: tuple[str, ...]
    """Those that are allowed, the preferred first, as ``SDPBackend`` names them."""
    chosen: bool = False
    """Whether somebody chose that order. torch's own depends on the GPU, and is no part of the text."""

    def __str__(self) -> str:
        named = zip(INPUTS, self.tensors, strict=True)
        words = [f"{name} {facts}" for name, facts in named if facts is not None]
        words += [f"dropout {self.dropout_p}"] if self.dropout_p else []
        words += ["causal"] if self.is_causal else []
        words += [f"scale {self.scale}"] if self.scale is not None else []
        words += ["gqa"] if self.enable_gqa else []
        kernels = self.kernels if self.chosen else sorted(self.kernels)
        return ", ".join([*words, f"{'first' if self.chosen else 'any'} of {' '.join(kernels)}"])


_own_order: list[int] = []


def note_own_order(device: torch.device | None = None) -> None:
    """Notes in which order torch itself prefers kernels, before anybody chooses another.

    ``device``: a GPU that is there; torch knows its order only when it has been asked once.
    """
    if device is not None and device.type == "cuda":
        like = torch.empty(1, 1, 64, 64, dtype=torch.bfloat16, device=device)
        torch._fused_sdp_choice(like, like, like)
    _own_order[:] = torch._C._get_sdp_priority_order()


def _kernels() -> tuple[tuple[str, ...], bool]:
    """Allowed in this process now, the preferred first; whether somebody chose that order."""
    from torch.nn.attention import SDPBackend

    settings: Any = torch.backends.cuda
    allowed = {
        SDPBackend.FLASH_ATTENTION: settings.flash_sdp_enabled(),
        SDPBackend.EFFICIENT_ATTENTION: settings.mem_efficient_sdp_enabled(),
        SDPBackend.CUDNN_ATTENTION: settings.cudnn_sdp_enabled(),
        SDPBackend.MATH: settings.math_sdp_enabled(),
    }
    numbers = torch._C._get_sdp_priority_order()
    kernels = tuple(k.name for k in map(SDPBackend, numbers) if allowed.get(k))
    return kernels, numbers != _own_order


# -- asking and answering ----------------------------------------------------------------------------


def noting(noted: list[Question], kind: str = "cuda") -> AbstractContextManager[None]:
    """A context in which every question about a device of this kind is noted, and torch answers it."""

    def note(question: Question, tensors: Mapping[str, Tensor]) -> None:
        noted.append(question)

    return _attending(note, kind)


def answering(
    answers: Mapping[str, Answer], asked: list[Question], kind: str = "cuda"
) -> AbstractContextManager[None]:
    """A context in which these answers stand for the device's; ``asked`` takes all questions.

    Where the kernel made of plain operations is the only one allowed, nobody needs to be asked. A
    question without an answer is refused.
    """

    def answer(question: Question, tensors: Mapping[str, Tensor]) -> Tensor | None:
        asked.append(question)
        if question.kernels == ("MATH",):
            return None
        if (known := answers.get(str(question))) is None:
            raise Unplaced(ATTENTION, undecided.ATTENTION)
        try:
            return carry_out(known, tensors)
        except ValueError as error:
            raise Unplaced(ATTENTION, f"{undecided.UNFIT}: {error}") from error

    return _attending(answer, kind)


@contextmanager
def _attending(
    answer: Callable[[Question, Mapping[str, Tensor]], Tensor | None], kind: str
) -> Iterator[None]:
    """``answer`` gives the attention while torch traces; for None torch's own code does."""
    attention: Any = torch.ops.aten.scaled_dot_product_attention.default
    place = torch._C.DispatchKey.CompositeImplicitAutograd
    if not _own_order:
        note_own_order()

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        given = (query, key, value, attn_mask)
        if query.device.type == kind:
            facts = tuple(None if tensor is None else Facts.of(tensor) for tensor in given)
            switches = (dropout_p, is_causal, scale, enable_gqa)
            question = Question(facts, *switches, *_kernels())
            tensors = {n: t for n, t in zip(INPUTS, given, strict=True) if t is not None}
            if (output := answer(question, tensors)) is not None:
                return output
        output = attention._op_dk(
            place, *given, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        assert isinstance(output, Tensor)
        return output

    attention.py_impl(place)(attend)
    attention._dispatch_cache.clear()
    try:
        yield
    finally:
        del attention.py_kernels[place]
        attention._dispatch_cache.clear()


def answer_to(question: Question, device: torch.device) -> Answer:
    """What torch calls for it on the device. Tensors are fake, the device is asked.

    Raises Refused for what cannot be written down.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kernels = [getattr(SDPBackend, name) for name in question.kernels]
    with torch.enable_grad(), sdpa_kernel(kernels, set_priority=True), FakeTensorMode():
        tensors = {
            name: facts.like(device)
            for name, facts in zip(INPUTS, question.tensors, strict=True)
            if facts is not None
        }
        try:
            with Recorder(tensors) as recorder:
                output = torch.nn.functional.scaled_dot_product_attention(
                    **tensors,
                    dropout_p=question.dropout_p,
                    is_causal=question.is_causal,
                    scale=question.scale,
                    enable_gqa=question.enable_gqa,
                )
            return recorder.leading_to(output)
        except ValueError as error:
            raise Refused(f"{ATTENTION} cannot be written down: {error}") from error
