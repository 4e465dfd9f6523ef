"""Speed up Triton's interpreter by caching, more than twofold; results are the same."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any


def install() -> None:
    """Patch the interpreter of this process, unless this version of Triton lacks the patched internals."""
    from triton import language
    from triton.runtime import interpreter

    names = ("_LangPatchScope", "_get_np_dtype", "_patch_attr", "_patch_builtin", "_patch_lang", "interpreter_builder")
    if not all(hasattr(interpreter, name) for name in names):
        return
    inner: Any = interpreter
    core: Any = language.core
    numpy_dtype, patch_all = inner._get_np_dtype, inner._patch_lang
    members: dict[int, list[tuple[str, Any]]] = {}
    namespaces: dict[int, list[Any]] = {}
    dtypes: dict[str, Any] = {}

    def builtins_of(namespace: Any) -> list[tuple[str, Any]]:
        """Return the builtins of a module or class, cached instead of searched at every call of a function."""
        if id(namespace) not in members:
            members[id(namespace)] = [pair for pair in inspect.getmembers(namespace) if core.is_builtin(pair[1])]
        return members[id(namespace)]

    def patch_builtins(namespace: Any, *rest: Any) -> None:
        for name, member in builtins_of(namespace):
            if getattr(namespace, name) is member:
                inner._patch_attr(namespace, name, member, *rest)

    def patch_language(function: Any) -> Any:
        """Patch the language for a function, unless the kernel that calls it has done so already."""
        variables = function.__globals__
        if id(variables) not in namespaces:
            modules = [module for module in (language, core) if any(each is module for each in variables.values())]
            namespaces[id(variables)] = [*modules, language.math, core.tensor, core.tensor_descriptor_base]
        is_patched = all(
            getattr(namespace, name) is not member
            for namespace in namespaces[id(variables)]
            for name, member in builtins_of(namespace)[:1]
        )
        return inner._LangPatchScope() if is_patched else patch_all(function)

    def dtype_of(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in dtypes:
            dtypes[name] = numpy_dtype(kind.scalar)
        return dtypes[name]

    def init_tensor(self: Any, handle: Any, kind: Any) -> None:
        """Initialize a tensor; what follows from its type is computed once for each type."""
        if "of_tensors" not in vars(kind):
            inner_init(self, handle, kind)
            kind.of_tensors = self.shape, self.numel, self.dtype
        self.handle, self.type = handle, kind
        self.shape, self.numel, self.dtype = kind.of_tensors

    def new_block_type(kind: Any, element: Any, shape: Any, *rest: Any) -> Any:
        """Return the only type of these elements and this shape; new ones of Gluon's, which have a layout too."""
        if kind is not block_type:
            return object.__new__(kind)
        sizes = tuple([each.value if isinstance(each, core.constexpr) else each for each in shape])
        key = element.name, getattr(element, "address_space", None), sizes
        if key not in block_types:
            new = object.__new__(kind)
            inner_init_type(new, element, shape)
            block_types[key] = new
        return block_types[key]

    def init_block_type(self: Any, *arguments: Any) -> None:
        if type(self) is not block_type:  # the others were initialized when they were made
            inner_init_type(self, *arguments)

    block_type = core.block_type
    inner_init, inner_init_type = core.tensor.__init__, block_type.__init__
    block_types: dict[Any, Any] = {}
    inner._patch_builtin, inner._patch_lang, inner._get_np_dtype = patch_builtins, patch_language, dtype_of
    core.tensor.__init__ = init_tensor
    block_type.__new__, block_type.__init__ = new_block_type, init_block_type
    options = inner.interpreter_builder.options
    if not options.debug:  # without debug the result of its overflow check of integer additions is not used
        inner.interpreter_builder.options = replace(options, sanitize_overflow=False)
