"""Repairs of Triton's interpreter, for this process: NumPy 2.4 refuses a loop's bound, and calls take too long."""

import dataclasses
import functools
from collections.abc import Callable
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
    _keep_types(core)
    _compare_at_once(core, interpreter.TritonSemantic)
    _call_at_once(interpreter, _operators(interpreter))


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


_SPREAD: dict[tuple[int, int], tuple[Any, ...]] = {}  # by ids of two shapes, which are kept: what `_targets` returns
_BLOCKS: dict[tuple[Any, ...], Any] = {}  # types of blocks, by numbers and sizes


def _targets(left: Any, right: Any) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """Return the sizes to which two shapes are spread, None for one that has them, or that does not fit the other.

    Shapes fit where both have as many axes, or one has none. Shapes that are alike are one object.
    """
    key = id(left), id(right)
    if (found := _SPREAD.get(key)) is None:
        ours, theirs = ([size.value for size in one] for one in (left, right))
        if len(ours) == len(theirs):
            both = [max(pair) if 1 in pair else pair[0] for pair in zip(ours, theirs, strict=True)]
            sizes = zip(ours, theirs, both, strict=True)
            fits = all(one in (1, size) and other in (1, size) for one, other, size in sizes)
        else:
            both, fits = ours or theirs, not ours or not theirs
        to = (tuple(both) if fits and one != both else None for one in (ours, theirs))
        found = _SPREAD[key] = left, right, *to
    return found[2:]


def _block(core: Any, scalar: Any, sizes: tuple[int, ...]) -> Any:
    """Return the type of a block."""
    key = scalar.name, getattr(scalar, "address_space", None), sizes
    if (kind := _BLOCKS.get(key)) is None:
        kind = _BLOCKS[key] = core.block_type(scalar, list(sizes))
    return kind


def _compare_at_once(core: Any, semantic: Any) -> None:
    """Leave tensors as they are that have the type and the shape already. Shapes that are alike are one object."""
    cast, spread, equal = semantic.cast, semantic.broadcast_impl_value, core.dtype.__eq__
    to_tensor = semantic.to_tensor
    check, tensor, words = semantic.binary_op_type_checking_impl, core.tensor, (core.int32, core.int64)

    def cast_others(self: Any, given: Any, kind: Any, *more: Any) -> Any:
        return given if given.type.scalar is kind.scalar else cast(self, given, kind, *more)

    def spread_one(self: Any, given: Any, sizes: tuple[int, ...]) -> Any:
        kind = _block(core, given.dtype, sizes)
        if given.type.is_block():
            return tensor(self.builder.create_broadcast(given.handle, sizes), kind)
        return tensor(self.builder.create_splat(kind, given.handle), kind)

    def spread_others(self: Any, left: Any, right: Any) -> Any:
        if left.shape is right.shape:
            return left, right
        one, other = _targets(left.shape, right.shape)
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
        """Every assignment in a kernel calls this."""
        return given if type(given) is tensor else to_tensor(self, given, check_type)

    semantic.to_tensor = to_tensor_others
    semantic.cast, semantic.broadcast_impl_value = cast_others, spread_others
    semantic.binary_op_type_checking_impl = check_others
    core.dtype.__eq__ = lambda self, other: self is other or equal(self, other)


def _operators(interpreter: Any) -> dict[str, Callable[[Any], Any]]:
    """Return what makes an operator of tensors, or `load`, from Triton's own one, by name.

    Numbers of one type, and whole ones of 32 and 64 bits, are computed by one call of NumPy, which also spreads shapes.
    Triton would check types several times, and write both sides spread first. All else goes Triton's way, and so does
    all with its debugging.
    """
    core, np = interpreter.tl.core, interpreter.np
    builder, handle = interpreter.interpreter_builder, interpreter.TensorHandle
    tensor, constexpr = core.tensor, core.constexpr
    words = [core.int32, core.int64]
    whole = [*words, core.int8, core.int16, core.uint8, core.uint16, core.uint32, core.uint64]
    numbers = [*whole, core.float16, core.float32, core.float64]
    wide = np.dtype(np.int64)
    constants: dict[tuple[Any, ...], Any] = {}

    def constant(value: Any, dtype: Any) -> Any:
        """A number in a tensor's type, None where Triton may choose another type."""
        if type(value) is int:
            known = any(dtype is one for one in (*words, core.float32)) and abs(value) < 1 << 31
        else:
            known = type(value) is float and dtype is core.float32 and (not value or 2**-126 <= abs(value) < 2**127)
        return handle(np.array([value or 0], np.dtype(dtype.name.replace("fp", "float"))), dtype) if known else None

    def right(left: Any, other: Any, dtype: Any) -> tuple[Any, Any]:
        """Return the numbers of the right side and the type of a result of such numbers; None for Triton's way."""
        if type(other) is tensor:
            kind = left.type
            if left.shape is not other.shape:
                one, more = _targets(left.shape, other.shape)
                if (sizes := more if one is None else one) is None:
                    return None, None
                kind = _block(core, dtype, sizes)
            elif dtype is not left.dtype:
                kind = kind.with_element_ty(dtype)
            return other.handle, kind
        if type(other) is constexpr:
            other = other.value
        key = type(other), other, id(left.dtype)
        if key not in constants:
            constants[key] = constant(other, left.dtype)
        return constants[key], left.type

    def operator(function: Any, dtypes: list[Any], compared: bool = False) -> Callable[[Any], Any]:
        known, long = {id(one) for one in dtypes}, {id(one) for one in words}

        def make(slow: Any) -> Any:
            def call(self: Any, other: Any) -> Any:
                left, dtype = self.handle, self.dtype
                number, expected = left.dtype.scalar, left.data.dtype
                if id(dtype) not in known:
                    return slow(self, other)
                if type(other) is tensor and other.dtype is not dtype:
                    if id(dtype) not in long or id(other.dtype) not in long:
                        return slow(self, other)
                    number = dtype = core.int64
                    expected = wide
                given, kind = right(self, other, dtype)
                if given is None:
                    return slow(self, other)
                found = function(left.data, given.data)
                if compared:
                    kind = kind.with_element_ty(core.int1)
                elif found.dtype != expected:
                    return slow(self, other)
                return tensor(handle(found, number), kind)

            return call

        return make

    def reverse(function: Any) -> Callable[[Any], Any]:
        """An operator whose left side is a number of Python."""
        known = {id(one) for one in numbers}

        def make(slow: Any) -> Any:
            def call(self: Any, other: Any) -> Any:
                if id(self.dtype) not in known or type(other) is tensor:
                    return slow(self, other)
                given, kind = right(self, other, self.dtype)
                if given is None:
                    return slow(self, other)
                found = function(given.data, self.handle.data)
                return tensor(handle(found, self.dtype), kind) if found.dtype == given.data.dtype else slow(self, other)

            return call

        return make

    def loaded(slow: Any) -> Any:
        def call(pointer: Any, mask: Any = None, other: Any = None, **named: Any) -> Any:
            """Masks as large as the pointers, and zeros elsewhere."""
            value = other.value if type(other) is constexpr else other
            zeros = value is None or (type(value) in (int, float) and not value)
            if named or type(pointer) is not tensor or type(pointer.dtype) is not core.pointer_type or not zeros:
                return slow(pointer, mask, other, **named)
            if mask is None:
                if value is not None:
                    return slow(pointer, mask, other)
            elif type(mask) is not tensor or mask.dtype is not core.int1 or mask.shape is not pointer.shape:
                return slow(pointer, mask, other)
            dtype, data = pointer.dtype.element_ty, pointer.handle.data
            if dtype is core.int1 or type(dtype) is core.pointer_type:
                return slow(pointer, mask, other)
            here = np.ones(data.shape, bool) if mask is None else mask.handle.data
            kind = interpreter._get_np_dtype(dtype)
            found = interpreter._interpreter.load(data, here, np.zeros(data.shape, kind), kind)
            return tensor(handle(found, dtype), pointer.type.with_element_ty(dtype))

        return call

    def added(slow: Any) -> Any:
        add, offsets = operator(np.add, numbers)(slow), {id(one) for one in (*words, core.int16, core.int8)}

        def call(self: Any, other: Any) -> Any:
            if type(self.dtype) is not core.pointer_type:
                return add(self, other)
            if type(other) is not tensor or id(other.dtype) not in offsets:
                return slow(self, other)
            given, kind = right(self, other, self.dtype)
            return slow(self, other) if given is None else tensor(builder.create_addptr(self.handle, given), kind)

        return call

    if builder.options.debug:
        return {}
    compared = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}
    compared |= {"eq": np.equal, "ne": np.not_equal}
    bits = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
    return {
        "__add__": added,
        "__sub__": operator(np.subtract, numbers),
        "__mul__": operator(np.multiply, numbers),
        "__radd__": reverse(np.add),
        "__rsub__": reverse(np.subtract),
        "__rmul__": reverse(np.multiply),
        "load": loaded,
        **{f"__{name}__": operator(function, numbers, compared=True) for name, function in compared.items()},
        **{f"__{name}__": operator(function, [*whole, core.int1]) for name, function in bits.items()},
    }


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
