"""Triton's interpreter without what it does in vain, which is more than half of its time; the results are the same."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any


def install() -> None:
    """Patch the interpreter of this process; a Triton that is built otherwise stays as it is."""
    from triton import language
    from triton.runtime import interpreter

    names = ("_LangPatchScope", "_get_np_dtype", "_patch_attr", "_patch_builtin", "_patch_lang", "interpreter_builder")
    if not all(hasattr(interpreter, name) for name in names):
        return
    inner: Any = interpreter
    core = language.core
    numpy_dtype, patch_all = inner._get_np_dtype, inner._patch_lang
    members: dict[int, list[tuple[str, Any]]] = {}
    places: dict[int, list[Any]] = {}
    dtypes: dict[str, Any] = {}

    def builtins_of(place: Any) -> list[tuple[str, Any]]:
        """Looked for once, not at every call of a function."""
        if id(place) not in members:
            members[id(place)] = [pair for pair in inspect.getmembers(place) if core.is_builtin(pair[1])]
        return members[id(place)]

    def patch_builtins(place: Any, *rest: Any) -> None:
        for name, member in builtins_of(place):
            if getattr(place, name) is member:
                inner._patch_attr(place, name, member, *rest)

    def patch_language(function: Any) -> Any:
        """Nothing, where the kernel that calls this function has patched all of it."""
        variables = function.__globals__
        if id(variables) not in places:
            modules = [module for module in (language, core) if any(each is module for each in variables.values())]
            places[id(variables)] = [*modules, language.math, core.tensor, core.tensor_descriptor_base]
        patched = all(
            getattr(place, name) is not member
            for place in places[id(variables)]
            for name, member in builtins_of(place)[:1]
        )
        return inner._LangPatchScope() if patched else patch_all(function)

    def dtype_of(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in dtypes:
            dtypes[name] = numpy_dtype(kind.scalar)
        return dtypes[name]

    inner._patch_builtin, inner._patch_lang, inner._get_np_dtype = patch_builtins, patch_language, dtype_of
    options = inner.interpreter_builder.options
    if not options.debug:  # then it tells nobody of the overflows that it looks for in every sum of integers
        inner.interpreter_builder.options = replace(options, sanitize_overflow=False)
