"""Compiles routing and experts for sm_90, at the sizes of real models; prints the name of each kernel."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton import compiler
from triton.backends.compiler import GPUTarget

from quire.config.experts import Routing
from quire.kernels import pdl
from quire.kernels.experts import triton
from quire.kernels.routing import triton as routing

DEEPSEEK = Routing(num_experts=256, top_k=8, scoring="sigmoid", bias=True, num_groups=8, top_groups=4,
                   group_score="top2", normalize=True, normalize_eps=1e-20, scaling=2.5)  # fmt: skip
QWEN = Routing(num_experts=128, top_k=8, scoring="softmax", normalize=True)


class Compiling:
    """Stands for a kernel: what it is launched with is compiled for sm_90 once, and nothing runs."""

    types = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32", int: "i32", float: "fp32"}

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.done = kernel, set[str]()

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self.launch

    def launch(self, *args: Any, **options: Any) -> None:
        """The specialization of a launch on a GPU: tensors and divisible integers are multiples of 16."""
        names, plain = self.kernel.arg_names, set(self.kernel.do_not_specialize or ())
        bound = dict(zip(names, args, strict=True))
        constant = {p.name for p in self.kernel.params if p.is_constexpr}
        constant |= {n for n, v in bound.items() if v is None or type(v) is int and v == 1 and n not in plain}
        signature = {n: "constexpr" if n in constant else self.types[v.dtype if isinstance(v, Tensor) else type(v)]
                     for n, v in bound.items()}  # fmt: skip
        even = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names)
                if n not in constant | plain
                and (isinstance(bound[n], Tensor) or type(bound[n]) is int and bound[n] % 16 == 0)}  # fmt: skip
        constants = {(names.index(n),): bound[n] for n in constant}
        if (key := repr((signature, constants, even, options))) in self.done:
            return
        self.done.add(key)
        source = compiler.ASTSource(self.kernel, signature, constants, even)
        made = compiler.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        print(self.kernel.__name__)
        assert made.metadata.shared <= 227 << 10
        if self.kernel.__name__ == "_product_kernel" and options["num_stages"] > 1:
            assert ("wgmma" if bound["TALL"] or bound["ROWS"] >= 64 else "mma.sync") in made.asm["ptx"]


def compile_production() -> None:
    """Decodes and prompts: Qwen3-30B-A3B with and without dependent launches, DeepSeek-V2-Lite, Mixtral 8x7B, and
    a rank of eight of DeepSeek-V3."""
    for module in (triton, routing):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            setattr(module, name, Compiling(vars(module)[name]))
    triton.shared_memory = lambda: 227 << 10

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def launch(tokens: int, experts: int, k: int, hidden: int, inner: int, mapped: bool = False) -> None:
        x, ids = empty(tokens, hidden), empty(tokens, k, dtype=torch.int32)
        packed = empty(experts, 2 * inner, hidden), empty(experts, hidden, inner)
        places = empty(2 * experts, dtype=torch.int32) if mapped else None
        triton.run(x, empty(tokens, k, dtype=torch.float32), ids, packed, places, x)

    for plan in (QWEN, DEEPSEEK):
        routing.route(empty(4, plan.num_experts, dtype=torch.float32),
                      empty(plan.num_experts, dtype=torch.float32) if plan.bias else None, plan)  # fmt: skip
    for dependent in (False, True):
        setattr(pdl, "in_use", lambda dependent=dependent: dependent)  # noqa: B010
        for tokens in (1, 16, 256, 512, 8192):
            launch(tokens, 128, 8, 2048, 768)
    for tokens in (1, 64, 16384):
        launch(tokens, 64, 6, 2048, 1408)
        launch(tokens, 8, 2, 4096, 14336)
        launch(tokens, 32, 8, 7168, 2048, mapped=True)


if __name__ == "__main__":
    compile_production()
