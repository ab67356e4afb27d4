"""Repairs of Triton's interpreter, for this process: NumPy 2.4 refuses a loop's bound, and calls take too long."""

import dataclasses
import functools
from typing import Any


@functools.cache
def repair_interpreter() -> None:
    """Let a loaded scalar be a loop's bound, and make calls of one kernel function by another fast."""
    from triton.runtime import interpreter

    patch_tensor, patch_language = interpreter._patch_lang_tensor, interpreter._patch_lang
    numpy_type = interpreter._get_np_dtype
    known = functools.cache(numpy_type)
    languages = (interpreter.tl, interpreter.tl.core)
    patched = set[int]()  # indices of these

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
        """Triton patches its language again for each call inside a kernel, which is a third of all time."""
        if not (new := read_by(fn) - patched):
            return interpreter._LangPatchScope()  # of no changes
        scope = patch_language(fn)
        patched.update(new)
        restore = scope.restore

        def restored() -> None:  # called for a kernel; changes for a call inside stay
            patched.difference_update(new)
            restore()

        scope.restore = restored
        return scope

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
    _keep_types(core)
    _compare_at_once(core, interpreter.TritonSemantic)
    _call_at_once(interpreter)


def _leave_out_what_is_not_asserted(interpreter: Any) -> None:
    """Do not compute sums and products of integers again in 64 bits for an assertion that only debugging makes."""
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


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
    check, tensor, words = semantic.binary_op_type_checking_impl, core.tensor, (core.int32, core.int64)

    def cast_others(self: Any, given: Any, kind: Any, *more: Any) -> Any:
        return given if given.type.scalar is kind.scalar else cast(self, given, kind, *more)

    kinds: dict[tuple[str, tuple[int, ...]], Any] = {}  # by names of numbers, and sizes
    targets: dict[tuple[int, int], tuple[Any, ...]] = {}  # by two shapes: theirs, and that of both for each, or None

    def target(left: Any, right: Any) -> tuple[Any, ...]:
        """Shapes that are spread to one, where both have as many axes, or one has none."""
        ours, theirs = ([size.value for size in one.shape] for one in (left, right))
        if len(ours) == len(theirs):
            both = [max(pair) if 1 in pair else pair[0] for pair in zip(ours, theirs, strict=True)]
            fits = all(
                one in (1, size) and other in (1, size) for one, other, size in zip(ours, theirs, both, strict=True)
            )
        else:
            both, fits = ours or theirs, not ours or not theirs
        to = (tuple(both) if one != both else None for one in (ours, theirs))
        return (left.shape, right.shape, *to) if fits else (left.shape, right.shape, None, None)

    def spread_one(self: Any, given: Any, sizes: tuple[int, ...]) -> Any:
        scalar = given.type.scalar
        if (kind := kinds.get((scalar.name, sizes))) is None:
            kind = kinds[scalar.name, sizes] = core.block_type(scalar, list(sizes))
        if given.type.is_block():
            return tensor(self.builder.create_broadcast(given.handle, sizes), kind)
        return tensor(self.builder.create_splat(kind, given.handle), kind)

    def spread_others(self: Any, left: Any, right: Any) -> Any:
        if left.shape is right.shape:
            return left, right
        key = id(left.shape), id(right.shape)
        if (found := targets.get(key)) is None:
            found = targets[key] = target(left, right)
        one, other = found[2:]
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

    semantic.cast, semantic.broadcast_impl_value = cast_others, spread_others
    semantic.binary_op_type_checking_impl = check_others
    core.dtype.__eq__ = lambda self, other: self is other or equal(self, other)


def _call_at_once(interpreter: Any) -> None:
    """Call functions of the language with their semantics, without a check that these are given."""

    def patch(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        semantic, function = interpreter.TritonSemantic(builder), getattr(member, "__wrapped__", member)

        def call(*given: Any, **named: Any) -> Any:
            named["_semantic"] = semantic
            return function(*given, **named)

        scope.set_attr(owner, name, call)

    interpreter._patch_attr = patch
