"""Which kernels torch times in a process of the GPU tests."""

from __future__ import annotations


def kernels_timed() -> list[str]:
    """Names of those that torch times from now on, to choose between their configurations."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    timed: list[str] = []
    original = CachingAutotuner.benchmark_all_configs

    def noting(self: CachingAutotuner, *args: object, **kwargs: object) -> object:
        timed.append(str(self.inductor_meta.get("kernel_name")))
        return original(self, *args, **kwargs)

    CachingAutotuner.benchmark_all_configs = noting
    return timed
