"""A module's source as a syntax tree: its text without what has no effect, what it binds, imports and does.

Nothing here executes what it reads. Imports nothing but the standard library.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def canonical(node: ast.AST) -> str:
    """A syntax tree as text, the same on every Python: without what has no effect, and f-strings in one way only."""
    if isinstance(node, ast.Constant):
        value = node.value.hex() if isinstance(node.value, (float, bytes)) else ascii(node.value)
        return f"{type(node.value).__name__}:{value}"
    parts = []
    for name in node._fields:
        told = getattr(node, name, None)
        if told is None or name in {"kind", "ctx", "type_comment"}:
            continue
        if not isinstance(told, list):
            parts.append(f"{name}={_told(told)}")
        elif told:
            listed = _merged(told) if isinstance(node, ast.JoinedStr) else told
            parts.append(f"{name}=[{','.join([_told(item) for item in listed if not is_idle(item)])}]")
    return f"{type(node).__name__}({' '.join(parts)})"


def _told(value: Any) -> str:
    return canonical(value) if isinstance(value, ast.AST) else ascii(value)


def _merged(values: list[ast.expr]) -> list[ast.expr]:
    """The parts of an f-string with neighboring texts as one: Pythons cut them in different places."""
    merged: list[ast.expr] = []
    for value in values:
        last = merged[-1] if merged else None
        if not isinstance(value, ast.Constant):
            merged.append(value)
        elif isinstance(last, ast.Constant):
            merged[-1] = ast.Constant(str(last.value) + str(value.value))
        elif value.value:
            merged.append(value)
    return merged


def _children(node: ast.AST) -> list[ast.AST]:
    """The nodes below a node, without what says that a name is read or set; `ast` has this at thrice the time."""
    found: list[ast.AST] = []
    for name in node._fields:
        value = getattr(node, name, None)
        if isinstance(value, list):
            found += [item for item in value if isinstance(item, ast.AST)]
        elif isinstance(value, ast.AST) and name != "ctx":
            found.append(value)
    return found


def within(node: ast.AST) -> list[ast.AST]:
    """A node and all that lies below it."""
    found = [node]
    for node in found:
        found += _children(node)
    return found


def is_idle(statement: Any) -> bool:
    """Whether a statement does nothing: a docstring or another bare constant, or ``pass``."""
    constant = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return constant or isinstance(statement, ast.Pass)


@dataclass
class Module:
    """A module's source, taken apart: what each name is bound by, what is imported, and what always acts."""

    name: str
    path: Path | None  #: None for a folder without ``__init__.py``
    source: bytes = b""  #: of a module that is no Python source
    bound: dict[str, list[ast.stmt]] = field(default_factory=dict)
    imports: dict[str, list[str]] = field(default_factory=dict)  #: local name: all that it may stand for, dotted
    within: dict[ast.stmt, dict[str, list[str]]] = field(default_factory=dict)  #: the same by statement
    stars: list[str] = field(default_factory=list)  #: modules of ``from x import *``
    acting: list[ast.stmt] = field(default_factory=list)  #: statements whose effect needs no name

    def __post_init__(self) -> None:
        if self.path is None:
            return
        if self.path.suffix != ".py":
            self.source = self.path.read_bytes()
            return
        for statement in ast.parse(self.path.read_bytes(), str(self.path)).body:
            self._take(statement)

    def _take(self, statement: ast.stmt) -> None:
        local = self.within.setdefault(statement, {})
        for name, target in imports(statement, self.package):
            if name == "*":
                self.stars.append(target)
                continue
            for names in (local, self.imports):  # of several (`try`, `if`, two methods) any may be what is executed
                if target not in names.setdefault(name, []):
                    names[name].append(target)
        if isinstance(statement, (ast.Import, ast.ImportFrom)) or is_idle(statement) or _is_for_types(statement):
            return
        for name in _binds(statement):
            self.bound.setdefault(name, []).append(statement)
        if not isinstance(statement, DEFINITIONS) and not _is_plain(statement):
            self.acting.append(statement)

    @property
    def package(self) -> str:
        """What a relative import starts from."""
        is_package = self.path is None or self.path.stem == "__init__"
        return self.name if is_package else self.name.rpartition(".")[0]


def _binds(statement: ast.stmt) -> Iterator[str]:
    """The names of the module that a statement binds, its own and those of blocks within it."""
    if isinstance(statement, DEFINITIONS):
        yield statement.name
        return
    for node in within(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, DEFINITIONS):
            yield node.name


def _is_plain(statement: ast.stmt) -> bool:
    """Whether a statement gives names a value and does nothing else: ``SIZE = 3``."""
    if isinstance(statement, ast.Assign):
        names = [node for target in statement.targets for node in within(target) if isinstance(node, ast.expr)]
        plain = all(isinstance(node, (ast.Name, ast.Tuple, ast.List)) for node in names)
    else:
        plain = isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    return plain and not any(isinstance(node, (ast.Call, ast.NamedExpr)) for node in within(statement))


def _is_for_types(statement: ast.stmt) -> bool:
    """Whether it is ``if TYPE_CHECKING:``, which never runs."""
    if not isinstance(statement, ast.If) or statement.orelse:
        return False
    told = statement.test
    return (told.id if isinstance(told, ast.Name) else getattr(told, "attr", "")) == "TYPE_CHECKING"


def imports(node: ast.AST, package: str) -> Iterator[tuple[str, str]]:
    """What is imported anywhere within a statement: the local name, and what it stands for."""
    for found in within(node):
        if isinstance(found, ast.Import):
            for alias in found.names:
                yield (alias.asname, alias.name) if alias.asname else (alias.name.partition(".")[0],) * 2
                if not alias.asname and "." in alias.name:
                    yield f"{alias.name}!", alias.name  # no name by itself, but the submodule is executed
        elif isinstance(found, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - found.level + 1] if found.level else []
            module = ".".join([*base, *([found.module] if found.module else [])])
            for alias in found.names:
                yield alias.asname or alias.name, module if alias.name == "*" else f"{module}.{alias.name}"
        elif isinstance(found, ast.Call):
            called = found.func.attr if isinstance(found.func, ast.Attribute) else getattr(found.func, "id", "")
            told = [*found.args[:1], *(word.value for word in found.keywords if word.arg == "name")]
            for name in (part.value for part in told if isinstance(part, ast.Constant) and isinstance(part.value, str)):
                if called in {"import_module", "__import__"} and name.strip("."):
                    level = len(name) - len(name.lstrip("."))
                    base = package.split(".")[: len(package.split(".")) - level + 1] if level else []
                    yield f"{name}()", ".".join([*base, name.lstrip(".")])


def used(statement: ast.AST) -> Iterator[tuple[str, list[str]]]:
    """Names that a statement reads, each with the attributes taken of it: ``helper.TABLE.shape``."""
    stack = [statement]
    while stack:
        node = stack.pop()
        attributes: list[str] = []
        inner: ast.AST = node
        while isinstance(inner, ast.Attribute):
            attributes.insert(0, inner.attr)
            inner = inner.value
        if isinstance(inner, ast.Name):
            yield inner.id, attributes
        elif inner is not node:
            stack.append(inner)
        else:
            stack += _children(node)


def waits(statement: ast.stmt) -> bool:
    """Whether nothing of it is evaluated where it stands: a function without defaults and decorators."""
    if not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return False
    return not (statement.decorator_list or statement.args.defaults or statement.args.kw_defaults)


def sets_elsewhere(statement: ast.stmt) -> bool:
    """Whether it sets something of another object: ``helper.table = 3``, ``TABLE["mu"] = 3``."""
    found = within(statement)
    return any(isinstance(node, (ast.Attribute, ast.Subscript)) and isinstance(node.ctx, ast.Store) for node in found)
