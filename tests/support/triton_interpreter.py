"""Repairs of Triton's interpreter, for this process: NumPy 2.4 refuses a loop's bound, and calls take too long."""

import ast
import dataclasses
import functools
import linecache
from collections.abc import Callable
from typing import Any

from .triton_operators import block_of, operators, targets


@functools.cache
def repair_interpreter() -> None:
    """Let a loaded scalar be a loop's bound, and make calls of one kernel function by another fast."""
    from triton.runtime import interpreter

    patch_tensor, patch_language = interpreter._patch_lang_tensor, interpreter._patch_lang
    numpy_type = interpreter._get_np_dtype
    known = functools.cache(numpy_type)
    languages = (interpreter.tl, interpreter.tl.core)
    patched = set[int]()  # indices of these
    nothing = interpreter._LangPatchScope()  # of no changes

    def with_scalar_bounds(tensor: Any, scope: Any) -> None:
        """NumPy 2.4 refuses int() of an array of one."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    @functools.cache
    def read_by(fn: Any) -> frozenset[int]:
        """Return the languages that a kernel's function reads."""
        values = [id(value) for value in fn.__globals__.values()]
        return frozenset(at for at, language in enumerate(languages) if id(language) in values)

    def once(fn: Any) -> Any:
        """Triton patches its language for each launch and each call inside a kernel, and restores it. Here it stays
        patched: this process only interprets."""
        if new := read_by(fn) - patched:
            patch_language(fn)
            patched.update(new)
        return nothing

    core = interpreter.tl.core
    type_of = core._type_for_tuple_values
    type_of_shape = functools.cache(lambda *sizes: type_of(sizes))

    def tuple_type(values: Any, fields: Any = None) -> Any:
        """Every tensor makes two tuples, of its shape."""
        sizes = [getattr(value, "value", value) for value in values]
        return type_of(values, fields) if fields or {*map(type, sizes)} - {int} else type_of_shape(*sizes)

    core._type_for_tuple_values = tuple_type
    interpreter._patch_lang_tensor, interpreter._patch_lang = with_scalar_bounds, once
    interpreter._get_np_dtype = lambda kind: known(kind) if type(kind) is interpreter.tl.dtype else numpy_type(kind)
    _leave_out_what_is_not_asserted(interpreter)
    _check_widths_once(interpreter)
    _parse_files_once(interpreter)
    _keep_types(core)
    _compare_at_once(core, interpreter.TritonSemantic)
    _call_at_once(interpreter, operators(interpreter))


def _leave_out_what_is_not_asserted(interpreter: Any) -> None:
    """Do not compute sums and products of integers again in 64 bits for an assertion that only debugging makes."""
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _check_widths_once(interpreter: Any) -> None:
    """Check once that numbers of a width fit a type: each tensor would ask it."""
    fits, seen = interpreter._validate_np_data_size, set[tuple[int, int]]()

    def init(self: Any, data: Any, dtype: Any, attr: dict[str, Any] | None = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        if (key := (data.itemsize, id(dtype))) not in seen:
            if not fits(data, dtype):
                raise ValueError(f"numbers of {8 * data.itemsize} bits for {dtype}")
            seen.add(key)

    interpreter.TensorHandle.__init__ = init


def _parse_files_once(interpreter: Any) -> None:
    """Rewrite a kernel's function from the tree of its file: Triton would read its lines twice, and parse these."""
    rewriter = interpreter.FunctionRewriter
    rewrite = rewriter.rewrite_ast

    @functools.cache
    def functions_of(path: str) -> dict[tuple[int, str], ast.FunctionDef]:
        """Return the functions of a file, outside all others, by their first line and name."""
        tree = ast.parse("".join(linecache.getlines(path)))
        found = (one for one in tree.body if isinstance(one, ast.FunctionDef))
        return {(min([one.lineno, *(d.lineno for d in one.decorator_list)]), one.name): one for one in found}

    class Assignments(interpreter.ASTTransformer):  # type: ignore[misc]
        def visit_Assign(self, node: ast.Assign) -> Any:
            value, made = node.value, super().visit_Assign(node)
            call = ast.copy_location(made.value, value)
            for part in (call.func, call.func.value, call.args[1]):
                ast.copy_location(part, value)
            return made

    def rewrite_tree(self: Any) -> Any:
        code = self.fn.__code__
        node = functions_of(code.co_filename).pop((code.co_firstlineno, self.fn.__name__), None)
        if node is None:
            return rewrite(self)
        node.decorator_list, self.filename = [], code.co_filename
        return self._compile_and_exec(ast.Module([Assignments().visit(node)], []))

    rewriter.rewrite_ast = rewrite_tree


def _keep_types(core: Any) -> None:
    """Make types and shapes that are alike once: every tensor would make its type, and its shape twice."""
    shapes: dict[tuple[int, ...], tuple[Any, Any, Any]] = {}  # shape of types, number, and shape of tensors
    blocks: dict[tuple[Any, ...], dict[str, Any]] = {}  # attributes
    make_block, constexpr, Tuple = core.block_type.__init__, core.constexpr, core.tuple
    alone = constexpr(1), Tuple([])

    def shape_of(block: Any) -> tuple[Any, Any, Any]:
        sizes = tuple(block.shape.values)
        if sizes not in shapes:
            shapes[sizes] = block.shape, constexpr(block.numel), Tuple([constexpr(size) for size in sizes])
        return shapes[sizes]

    def make_block_once(self: Any, element_ty: Any, shape: Any) -> None:
        given = shape.value if type(shape) is constexpr else shape
        sizes = [size.value if type(size) is constexpr else size for size in given]
        key = element_ty.name, getattr(element_ty, "address_space", None), *sizes
        if key not in blocks:
            make_block(self, element_ty, shape)
            self.shape, *self.of_tensor = shape_of(self)
            blocks[key] = dict(vars(self))
        vars(self).update(blocks[key])

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = type.of_tensor if type.is_block() else alone

    others: dict[tuple[Any, ...], Any] = {}

    def with_element(self: Any, element: Any) -> Any:
        key = element.name, getattr(element, "address_space", None), id(self.shape)
        if (found := others.get(key)) is None:
            found = others[key] = core.block_type(element, self.shape)
        return found

    core.block_type.__init__, core.tensor.__init__ = make_block_once, make_tensor
    core.block_type.with_element_ty = with_element
    core.block_type.to_ir = lambda self, builder: self  # what the interpreter's builder makes anew


def _compare_at_once(core: Any, semantic: Any) -> None:
    """Leave tensors as they are that have the type and the shape already. Shapes that are alike are one object."""
    cast, spread, equal = semantic.cast, semantic.broadcast_impl_value, core.dtype.__eq__
    to_tensor, numbers = semantic.to_tensor, dict[tuple[type, float], Any]()
    check, tensor, words = semantic.binary_op_type_checking_impl, core.tensor, (core.int32, core.int64)

    def cast_others(self: Any, given: Any, kind: Any, *more: Any) -> Any:
        return given if given.type.scalar is kind.scalar else cast(self, given, kind, *more)

    def spread_one(self: Any, given: Any, sizes: tuple[int, ...]) -> Any:
        kind = block_of(core, given.dtype, sizes)
        if given.type.is_block():
            return tensor(self.builder.create_broadcast(given.handle, sizes), kind)
        return tensor(self.builder.create_splat(kind, given.handle), kind)

    def spread_others(self: Any, left: Any, right: Any) -> Any:
        if left.shape is right.shape:
            return left, right
        one, other = targets(left.shape, right.shape)
        if (one is other is None) or left.type.scalar.is_ptr() or right.type.scalar.is_ptr():
            return spread(self, left, right)
        return (
            left if one is None else spread_one(self, left, one),
            right if other is None else spread_one(self, right, other),
        )

    def check_others(self: Any, left: Any, right: Any, *given: Any, **named: Any) -> Any:
        """Two numbers of a type have that type but in divisions, and a small integer has the other's."""
        if type(left) is tensor and len(given) < 4 and "div_or_mod" not in named:
            if type(right) is int and left.dtype in words and abs(right) < 1 << 31:
                right = self.scalar_constant(right, left.dtype)
            if type(right) is tensor and left.dtype is right.dtype and not left.dtype.is_ptr():
                return spread_others(self, left, right)
        return check(self, left, right, *given, **named)

    def to_tensor_others(self: Any, given: Any, check_type: bool = True) -> Any:
        """Every assignment in a kernel calls this. Tensors of a number share its array, which nothing writes to."""
        if type(given) is tensor:
            return given
        if type(given) is not int and type(given) is not float:
            return to_tensor(self, given, check_type)
        if (made := numbers.get((type(given), given))) is None:
            made = to_tensor(self, given, check_type)
            if given == given:
                numbers[type(given), given] = made
        return tensor(type(made.handle)(made.handle.data, made.handle.dtype), made.type)

    semantic.to_tensor = to_tensor_others
    semantic.cast, semantic.broadcast_impl_value = cast_others, spread_others
    semantic.binary_op_type_checking_impl = check_others
    core.dtype.__eq__ = lambda self, other: self is other or equal(self, other)


def _call_at_once(interpreter: Any, operators: dict[str, Callable[[Any], Any]]) -> None:
    """Call functions of the language with their semantics, without a check that these are given."""
    owners = interpreter.tl.core.tensor, interpreter.tl.core, interpreter.tl

    def patch(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        semantic, function = interpreter.TritonSemantic(builder), getattr(member, "__wrapped__", member)

        def call(*given: Any, **named: Any) -> Any:
            named["_semantic"] = semantic
            return function(*given, **named)

        made = call
        if name in operators and owner in owners:
            made = operators[name](call)
            made.__wrapped__ = call
        scope.set_attr(owner, name, made)

    interpreter._patch_attr = patch
