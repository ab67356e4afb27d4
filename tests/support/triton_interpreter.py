"""Repairs of Triton's interpreter, for this process: NumPy 2.4 refuses a loop's bound, and calls take too long."""

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
