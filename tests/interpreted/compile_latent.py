"""Compiles latent attention for sm_90 at the sizes of DeepSeek-V2-Lite and V3; prints the name of each kernel."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton import compiler
from triton.backends.compiler import GPUTarget

from quire.kernels import pdl
from quire.kernels.attention import AttentionMeta, triton_plan
from quire.kernels.latent import LatentView, triton

TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64", int: "i32",
         float: "fp32"}  # fmt: skip


class Compiling:
    """Stands for a kernel: what it is launched with is compiled for sm_90 once, and nothing runs."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.done = kernel, set[str]()

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self.launch

    def launch(self, *args: Any, **options: Any) -> None:
        """The specialization of a launch on a GPU: tensors and divisible integers are multiples of 16."""
        names, plain = self.kernel.arg_names, set(self.kernel.do_not_specialize or ())
        bound = dict(zip(names, args, strict=False)) | {n: options.pop(n) for n in names if n in options}
        assert set(bound) == set(names)
        constant = {p.name for p in self.kernel.params if p.is_constexpr}
        constant |= {n for n, v in bound.items() if v is None or type(v) is int and v == 1 and n not in plain}
        signature = {n: "constexpr" if n in constant else TYPES[getattr(bound[n], "dtype", type(bound[n]))]
                     for n in names}  # fmt: skip
        even = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names)
                if n not in constant | plain
                and (isinstance(bound[n], Tensor) or type(bound[n]) is int and bound[n] % 16 == 0)}  # fmt: skip
        constants = {(names.index(n),): bound[n] for n in constant}
        if (key := repr((signature, sorted(constants.items()), even, options))) in self.done:
            return
        self.done.add(key)
        source = compiler.ASTSource(self.kernel, signature, constants, even)
        made = compiler.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        print(self.kernel.__name__)
        assert made.metadata.shared <= triton.shared_memory(), (key, made.metadata.shared)
        wide = self.kernel.__name__ == "expanded_kernel" or bound.get("M", 0) >= 64
        assert not wide or "*bf16" not in signature.values() or "wgmma" in made.asm["ptx"], key


def launch(tokens: int, longest: int, heads: int, size: int, dtype: torch.dtype = torch.bfloat16, few: int = 1) -> None:
    """One layer of a step of 64 sequences in the middle of an arena, on tensors without storage."""
    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def ints(*shape: int) -> Tensor:
        return empty(*shape, dtype=torch.int32)

    pages = empty(9, 27, 576 * size)[:, 3]
    cache = LatentView(pages[:, : 512 * size].view(9, 1, size, 512), pages[:, 512 * size :].view(9, 1, size, 64))
    slots = empty(tokens, dtype=torch.int64)
    prompts = ((0, tokens, 0, 4096),) if longest == tokens > 1 else None
    meta = AttentionMeta(ints(65), ints(64), ints(99, 512), slots, ints(64), longest, few, None, prompts)
    down = empty(tokens, heads * 192 + 576)
    q = down[:, :-576].view(tokens, heads, 192)
    triton.prepare(q, down[:, -576:], empty(512), 1e-6, empty(tokens, 64), empty(tokens, 64), cache, slots)
    triton.absorbed(empty(tokens, heads, 512), q[..., 128:], cache, meta, 0.1)
    if prompts is not None:
        triton.expanded(q, empty(heads, 256, 512), cache, meta, 0.1, empty(tokens, heads, 128))


def compile_production() -> None:
    """Decodes, decodes that verify drafts, mixed steps and prompts; then a small GPU, and float32."""
    for module, names in ((triton, ("_prepare_kernel", "absorbed_kernel", "merge_kernel", "expanded_kernel")),
                          (triton_plan, ("_plan_kernel",))):  # fmt: skip
        for name in names:
            setattr(module, name, Compiling(vars(module)[name]))
    triton_plan.multiprocessors = lambda: 132  # type: ignore[assignment]
    triton.shared_memory = lambda: 227 << 10  # type: ignore[assignment]
    for dependent, size, heads in ((False, 64, 16), (True, 64, 16), (True, 128, 128)):
        setattr(pdl, "in_use", lambda dependent=dependent: dependent)  # noqa: B010
        for tokens, longest, few in ((64, 1, 1), (128, 2, 2), (512, 300, 1), (8192, 8192, 1)):
            launch(tokens, longest, heads, size, few=few)
    launch(8192, 8192, 16, 64, torch.float32)
    triton.shared_memory = lambda: 99 << 10  # type: ignore[assignment]
    launch(64, 1, 16, 64)


if __name__ == "__main__":
    compile_production()
