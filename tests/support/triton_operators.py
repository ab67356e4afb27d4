"""Operators of tensors in Triton's interpreter as few calls of NumPy, for `triton_interpreter.py`.

Numbers of one type, and whole ones of 32 and 64 bits, are computed by one call, which also spreads shapes. Triton would
check types several times, and write both sides spread first. All else goes Triton's way, and so does all with its
debugging. `tests/interpreted/test_operators.py` compares the results with Triton's own.
"""

from collections.abc import Callable
from typing import Any

_SPREAD: dict[tuple[int, int], tuple[Any, ...]] = {}  # by ids of two shapes, which are kept: what `targets` returns
_BLOCKS: dict[tuple[Any, ...], Any] = {}  # types of blocks, by numbers and sizes
_WHOLE = slice(None)


def targets(left: Any, right: Any) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
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


def block_of(core: Any, scalar: Any, sizes: tuple[int, ...]) -> Any:
    """Return the type of a block."""
    key = scalar.name, getattr(scalar, "address_space", None), sizes
    if (kind := _BLOCKS.get(key)) is None:
        kind = _BLOCKS[key] = core.block_type(scalar, list(sizes))
    return kind


def operators(interpreter: Any) -> dict[str, Callable[[Any], Any]]:
    """Return what makes an operator of tensors, or a function of the language, from Triton's own one, by name."""
    return {} if interpreter.interpreter_builder.options.debug else Operators(interpreter).by_name()


class Operators:
    """Makers of operators and functions. Types are compared by identity: the language has one object of each."""

    def __init__(self, interpreter: Any) -> None:
        core, np = interpreter.tl.core, interpreter.np
        self.core, self.np, self.interpreter = core, np, interpreter
        self.words = [core.int32, core.int64]
        self.whole = [*self.words, core.int8, core.int16, core.uint8, core.uint16, core.uint32, core.uint64]
        self.numbers = [*self.whole, core.float16, core.float32, core.float64]
        self.dtypes = {id(one): np.dtype(one.name.replace("fp", "float")) for one in self.numbers}
        self.bounds = {id(one): (1 - (1 << 31), (1 << 31) - 1) for one in (*self.words, core.float32)}
        for one in self.whole[2:]:
            info = np.iinfo(self.dtypes[id(one)])
            self.bounds[id(one)] = int(info.min), min(int(info.max), (1 << 32) - 1)
        sources = {*self.dtypes, id(core.int1)} - {id(core.float16)}
        self.casts = {(one, other) for one in sources for other in self.dtypes}
        self.casts.add((id(core.float16), id(core.float32)))
        self.constants: dict[tuple[Any, ...], Any] = {}

    def by_name(self) -> dict[str, Callable[[Any], Any]]:
        core, np = self.core, self.np
        compared = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}
        compared |= {"eq": np.equal, "ne": np.not_equal}
        bits = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
        divided = {"floordiv": lambda one, other: (one - np.fmod(one, other)) // other, "mod": np.fmod}
        return {
            "__add__": self.added,
            "__sub__": self.operator(np.subtract, self.numbers),
            "__mul__": self.operator(np.multiply, self.numbers),
            "__truediv__": self.operator(np.divide, [core.float32]),
            "__radd__": self.reverse(np.add),
            "__rsub__": self.reverse(np.subtract),
            "__rmul__": self.reverse(np.multiply),
            "__lshift__": self.shift(np.left_shift),
            "__rshift__": self.shift(np.right_shift),
            **{f"__{name}__": self.operator(one, self.numbers, compared=True) for name, one in compared.items()},
            **{f"__{name}__": self.operator(one, [*self.whole, core.int1]) for name, one in bits.items()},
            **{f"__{name}__": self.operator(one, self.whole) for name, one in divided.items()},
            "__getitem__": self.item,
            "to": self.cast,
            "where": self.where,
            "load": self.loaded,
            "store": self.stored,
        }

    def constant(self, value: Any, dtype: Any) -> Any:
        """Return the handle of a number of Python in a tensor's type; None where Triton may choose another type."""
        if type(value) is self.core.constexpr:
            value = value.value
        if value != value:
            return None
        key = type(value), value, id(dtype)
        if key not in self.constants:
            known = False
            if type(value) is int and id(dtype) in self.bounds:
                least, most = self.bounds[id(dtype)]
                known = least <= value <= most
            elif type(value) is float and dtype is self.core.float32:
                known = not value or 2**-126 <= abs(value) < 2**127 or abs(value) == float("inf")
            make = self.interpreter.TensorHandle
            self.constants[key] = make(self.np.array([value or 0], self.dtypes[id(dtype)]), dtype) if known else None
        return self.constants[key]

    def right(self, left: Any, other: Any, dtype: Any) -> tuple[Any, Any]:
        """Return the numbers of the right side and the type of a result of such numbers; None for Triton's way."""
        if type(other) is not self.core.tensor:
            return self.constant(other, left.dtype), left.type
        kind = left.type
        if left.shape is not other.shape:
            one, more = targets(left.shape, other.shape)
            if (sizes := more if one is None else one) is None:
                return None, None
            kind = block_of(self.core, dtype, sizes)
        elif dtype is not left.dtype:
            kind = kind.with_element_ty(dtype)
        return other.handle, kind

    def operator(self, function: Any, dtypes: list[Any], compared: bool = False) -> Callable[[Any], Any]:
        """An operator of tensors, or of a tensor and a number of Python."""
        known, long = {id(one) for one in dtypes}, {id(one) for one in self.words}
        core, handle, right, wide = self.core, self.interpreter.TensorHandle, self.right, self.np.dtype(self.np.int64)
        tensor = core.tensor
        # A number that is compared with fewer bits is one of 32 bits for Triton.
        narrow = {id(one) for one in self.whole if compared and one.primitive_bitwidth < 32}

        def make(slow: Any) -> Any:
            def call(self: Any, other: Any) -> Any:
                left, dtype = self.handle, self.dtype
                number, expected = left.dtype.scalar, left.data.dtype
                if id(dtype) not in known or (id(dtype) in narrow and type(other) is not tensor):
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

    def reverse(self, function: Any) -> Callable[[Any], Any]:
        """An operator whose left side is a number of Python."""
        known, tensor, handle = {id(one) for one in self.numbers}, self.core.tensor, self.interpreter.TensorHandle
        right = self.right

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

    def shift(self, function: Any) -> Callable[[Any], Any]:
        """A shift by a number of Python that is smaller than the type is wide."""
        constexpr = self.core.constexpr

        def make(slow: Any) -> Any:
            quick = self.operator(function, self.whole)(slow)

            def call(self: Any, other: Any) -> Any:
                by = other.value if type(other) is constexpr else other
                small = type(by) is int and 0 <= by < self.dtype.primitive_bitwidth
                return quick(self, other) if small else slow(self, other)

            return call

        return make

    def added(self, slow: Any) -> Any:
        """A sum of numbers, or of pointers and numbers of elements."""
        add, core, np, right = self.operator(self.np.add, self.numbers)(slow), self.core, self.np, self.right
        handle, offsets, steps = self.interpreter.TensorHandle, {id(one) for one in self.whole}, dict[int, Any]()

        def call(self: Any, other: Any) -> Any:
            dtype, kind = self.dtype, self.type
            if type(dtype) is not core.pointer_type:
                return add(self, other)
            if type(dtype.element_ty) is not core.dtype:
                return slow(self, other)
            size = max(1, dtype.element_ty.primitive_bitwidth // 8)
            if type(other) is core.tensor:
                given, kind = right(self, other, dtype) if id(other.dtype) in offsets else (None, None)
                if given is None:
                    return slow(self, other)
                by = given.data.astype(np.uint64)
                if size > 1:
                    by *= np.uint64(size)
            else:
                number = other.value if type(other) is core.constexpr else other
                if type(number) is not int or abs(number) >= 1 << 31:
                    return slow(self, other)
                if (by := steps.get(number * size)) is None:
                    by = steps[number * size] = np.array([number * size % (1 << 64)], np.uint64)
            return core.tensor(handle(self.handle.data + by, self.handle.dtype), kind)

        return call

    def item(self, slow: Any) -> Any:
        """New axes of a block: x[:, None]."""
        core, handle, every = self.core, self.interpreter.TensorHandle, slice(None)

        def call(self: Any, places: Any) -> Any:
            data = self.handle.data
            plain = type(places) is tuple and self.type.is_block()
            plain = plain and all(one is None or (type(one) is slice and one == every) for one in places)
            if not plain or len(places) - places.count(None) != data.ndim:
                return slow(self, places)
            found = data[places]
            return core.tensor(handle(found, self.handle.dtype.scalar), block_of(core, self.dtype, found.shape))

        return call

    def cast(self, slow: Any) -> Any:
        """Numbers in another type, without a rounding that is asked for; bfloat16 and 8 bits go Triton's way."""
        core, handle, dtypes, casts = self.core, self.interpreter.TensorHandle, self.dtypes, self.casts

        def call(self: Any, dtype: Any, *more: Any, **named: Any) -> Any:
            if type(dtype) is core.constexpr:
                dtype = dtype.value
            if more or named or type(self) is not core.tensor:
                return slow(self, dtype, *more, **named)
            if dtype is self.dtype:
                return self
            if (id(self.dtype), id(dtype)) not in casts:
                return slow(self, dtype)
            found = self.handle.data.astype(dtypes[id(dtype)])
            return core.tensor(handle(found, dtype), self.type.with_element_ty(dtype))

        return call

    def where(self, slow: Any) -> Any:
        """A choice of two blocks of one type and shape, or of a block and a number of Python."""
        core, handle, constant, np = self.core, self.interpreter.TensorHandle, self.constant, self.np
        known = {id(one) for one in self.numbers}

        def side(one: Any, like: Any) -> Any:
            if type(one) is not core.tensor:
                return constant(one, like.dtype)
            return one.handle if one.dtype is like.dtype and one.shape is like.shape else None

        def call(condition: Any, x: Any, y: Any) -> Any:
            like = x if type(x) is core.tensor else y
            if type(condition) is not core.tensor or condition.dtype is not core.int1 or type(like) is not core.tensor:
                return slow(condition, x, y)
            if id(like.dtype) not in known or condition.shape is not like.shape:
                return slow(condition, x, y)
            one, other = side(x, like), side(y, like)
            if one is None or other is None or one.data.dtype != other.data.dtype:
                return slow(condition, x, y)
            return core.tensor(handle(np.where(condition.handle.data, one.data, other.data), like.dtype), like.type)

        return call

    def elements(self, pointer: Any, mask: Any, named: dict[str, Any], modifiers: tuple[str, ...]) -> Any:
        """Return the type of what pointers point to, and their mask; None for Triton's way."""
        core, np = self.core, self.np
        if type(pointer) is not core.tensor or type(pointer.dtype) is not core.pointer_type:
            return None, None
        allowed = {"cache_modifier": modifiers, "eviction_policy": ("", "evict_last", "evict_first")}
        for name, value in named.items():
            if (value.value if type(value) is core.constexpr else value) not in allowed.get(name, ()):
                return None, None
        dtype, data = pointer.dtype.element_ty, pointer.handle.data
        if type(dtype) is not core.dtype or dtype is core.int1:
            return None, None
        if mask is None:
            return dtype, np.ones(data.shape, bool)
        if type(mask) is not core.tensor or mask.dtype is not core.int1:
            return None, None
        if mask.shape is pointer.shape:
            return dtype, mask.handle.data
        own, sizes = targets(pointer.shape, mask.shape)
        if own is not None or sizes is None:
            return None, None
        return dtype, np.broadcast_to(mask.handle.data, sizes)

    def loaded(self, slow: Any) -> Any:
        """Numbers at pointers; at masked ones zeros, or a number of Python."""
        core, np, interpreter, constant = self.core, self.np, self.interpreter, self.constant
        modifiers = ("", ".ca", ".cg", ".cv")

        def call(pointer: Any, mask: Any = None, other: Any = None, **named: Any) -> Any:
            dtype, here = self.elements(pointer, mask, named, modifiers)
            value = other.value if type(other) is core.constexpr else other
            if dtype is None or (mask is None and value is not None):
                return slow(pointer, mask, other, **named)
            kind, data = interpreter._get_np_dtype(dtype), pointer.handle.data
            if value is None or (type(value) in (int, float) and not value):
                elsewhere = np.zeros(data.shape, kind)
            else:
                given = None if type(value) is core.tensor else constant(value, dtype)
                if given is None:
                    return slow(pointer, mask, other, **named)
                elsewhere = np.full(data.shape, given.data, kind)
            found = interpreter._interpreter.load(data, here, elsewhere, kind)
            return core.tensor(interpreter.TensorHandle(found, dtype), pointer.type.with_element_ty(dtype))

        return call

    def stored(self, slow: Any) -> Any:
        """Numbers of the pointers' type, or of one that `cast` knows, and numbers of Python."""
        core, np, interpreter, constant = self.core, self.np, self.interpreter, self.constant
        modifiers = ("", ".wb", ".cg", ".cs", ".wt")

        def numbers(value: Any, dtype: Any, pointer: Any) -> Any:
            shape = pointer.handle.data.shape
            if type(value) is not core.tensor:
                given = constant(value, dtype)
                return None if given is None else np.full(shape, given.data)
            data = value.handle.data
            if value.dtype is not dtype:
                if (id(value.dtype), id(dtype)) not in self.casts:
                    return None
                data = data.astype(self.dtypes[id(dtype)])
            if value.shape is not pointer.shape:
                own, sizes = targets(pointer.shape, value.shape)
                return None if own is not None or sizes is None else np.broadcast_to(data, sizes)
            return data

        def call(pointer: Any, value: Any, mask: Any = None, **named: Any) -> Any:
            dtype, here = self.elements(pointer, mask, named, modifiers)
            data = None if dtype is None or pointer.dtype.const else numbers(value, dtype, pointer)
            if data is None:
                return slow(pointer, value, mask, **named)
            return interpreter._interpreter.store(pointer.handle.data, data, here)

        return call
