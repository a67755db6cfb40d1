"""Triton's interpreter with NumPy 2.4 and later, which no longer turns an array of one element into an int."""

from __future__ import annotations


def allow_scalar_arrays() -> None:
    """Lets loop bounds be one-element arrays, which is what the interpreter holds program ids and loads in."""
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched
