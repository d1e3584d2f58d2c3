"""Digests of the Python code that gets traced: of its syntax trees, so that wording does not count.

Importing this module does not import torch.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import inspect
import sys
import textwrap
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path


def source_digest(module_name: str) -> str:
    """Over the syntax tree of a module's source: comments, blank lines, docstrings do not count."""
    module = importlib.import_module(module_name)
    path = getattr(module, "__file__", None)
    if path is None or not path.endswith(".py"):
        return f"no source: {getattr(module, '__version__', 'unversioned')}"
    return _digest(ast.parse(Path(path).read_text(encoding="utf-8")).body)


def file_digest(module_name: str) -> str:
    """The same without importing it: a training script would run. Raises ImportError, OSError."""
    path = source_file(module_name)
    if path is None:
        found = sys.modules.get(module_name)
        return f"no source: {getattr(found, '__version__', 'unversioned')}"
    return _digest(ast.parse(path.read_text(encoding="utf-8")).body)


def source_file(module_name: str) -> Path | None:
    """Where the source of a module lies; None when it has none. Raises ImportError."""
    if module_name in sys.modules or module_name != import_name("__main__"):
        found = sys.modules.get(module_name) or importlib.util.find_spec(module_name)
    else:
        found = sys.modules["__main__"]
    if found is None:
        raise ModuleNotFoundError(module_name)
    path = getattr(found, "__file__", None) or getattr(found, "origin", None)
    return Path(path) if path is not None and path.endswith(".py") else None


def classes_digest(classes: Collection[type]) -> str:
    """Over classes of one module and whatever they reach in it: bases, functions, constants, imports.

    The same whether the module is imported or run as a script, and untouched by what a training
    script does besides.
    """
    module = sys.modules.get(next(iter(classes)).__module__)
    path = getattr(module, "__file__", None)
    if path is None or not path.endswith(".py"):
        return _digest(_one_by_one(classes))
    tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    return _digest(_reached(tree, {cls.__qualname__.partition(".")[0] for cls in classes}))


def import_name(module_name: str) -> str:
    """What ``__main__`` would be called if it were imported, so that both ways agree."""
    if module_name != "__main__":
        return module_name
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    return spec.name if spec else Path(getattr(main, "__file__", None) or "interactive").stem


def _one_by_one(classes: Collection[type]) -> Iterator[ast.stmt]:
    """Of a notebook or a console, as far as Python has kept it."""
    for cls in sorted(classes, key=lambda cls: cls.__qualname__):
        try:
            yield from ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        except (OSError, TypeError):
            yield ast.Expr(ast.Constant(f"no source: {cls.__qualname__}"))


def _reached(tree: ast.Module, names: set[str]) -> list[ast.stmt]:
    """The statements of a module that define these names, and what those use, in their order."""
    statements = [(node, set(_bound(node))) for node in tree.body if not _only_as_script(node)]
    found: set[int] = set()
    wanted = set(names)
    while new := [
        i for i, (_, bound) in enumerate(statements) if i not in found and bound & wanted
    ]:
        found.update(new)
        for index in new:
            wanted |= set(_used(statements[index][0]))
    return [node for index, (node, _) in enumerate(statements) if index in found]


def _only_as_script(node: ast.stmt) -> bool:
    """``if __name__ == "__main__":``"""
    return isinstance(node, ast.If) and "__name__" in _used(node.test)


def _used(node: ast.AST) -> Iterator[str]:
    yield "*"
    yield from (n.id for n in ast.walk(node) if isinstance(n, ast.Name))


def _bound(node: ast.AST) -> Iterator[str]:
    """Names that a statement defines, or changes an attribute or item of."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
        return
    if isinstance(node, ast.Import | ast.ImportFrom):
        yield from ((a.asname or a.name).partition(".")[0] for a in node.names)
    elif isinstance(getattr(node, "ctx", None), ast.Store | ast.Del):
        yield _root(node)
    for child in ast.iter_child_nodes(node):
        yield from _bound(child)


def _root(node: ast.AST) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _digest(statements: Iterable[ast.stmt]) -> str:
    tree = _without_docstrings(ast.Module(list(statements), []))
    text = ast.dump(tree, annotate_fields=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and _is_text(first.value):
                node.body = node.body[1:]
    return tree


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)
