"""Parses a module's source: its canonical text, the names that it binds and imports, and its import effects.

The source is never executed. This module imports only the standard library.
"""

from __future__ import annotations

import ast
import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
IMPORTS = (ast.Import, ast.ImportFrom)


def convert_node_to_canonical_text(node: ast.AST) -> str:
    """Convert a syntax tree to text that is equal for all Python versions, without docstrings and comments."""
    if isinstance(node, ast.Constant):
        value = node.value.hex() if isinstance(node.value, (float, bytes)) else ascii(node.value)
        return f"{type(node.value).__name__}:{value}"
    parts = []
    for name in node._fields:
        field_value = getattr(node, name, None)
        if field_value is None or name in {"kind", "ctx", "type_comment"}:
            continue
        if not isinstance(field_value, list):
            parts.append(f"{name}={_format_field_value(field_value)}")
        elif field_value:
            items = _merge_adjacent_constants(field_value) if isinstance(node, ast.JoinedStr) else field_value
            parts.append(f"{name}=[{','.join([_format_field_value(item) for item in items if not is_noop(item)])}]")
    return f"{type(node).__name__}({' '.join(parts)})"


def _format_field_value(value: Any) -> str:
    return convert_node_to_canonical_text(value) if isinstance(value, ast.AST) else ascii(value)


def _merge_adjacent_constants(values: list[ast.expr]) -> list[ast.expr]:
    """Merge adjacent texts of an f-string, because Python versions split them differently."""
    parts: list[ast.expr] = []
    for value in values:
        last = parts[-1] if parts else None
        if not isinstance(value, ast.Constant):
            parts.append(value)
        elif isinstance(last, ast.Constant):
            parts[-1] = ast.Constant(str(last.value) + str(value.value))
        elif value.value:
            parts.append(value)
    return parts


def _list_child_nodes(node: ast.AST) -> list[ast.AST]:
    """Child nodes without contexts (load, store). `ast.iter_child_nodes` takes three times as long."""
    children: list[ast.AST] = []
    for name in node._fields:
        value = getattr(node, name, None)
        if isinstance(value, list):
            children += [item for item in value if isinstance(item, ast.AST)]
        elif isinstance(value, ast.AST) and name != "ctx":
            children.append(value)
    return children


def list_descendant_nodes(root: ast.AST) -> list[ast.AST]:
    """List a node and all its descendants."""
    nodes = [root]
    for node in nodes:
        nodes += _list_child_nodes(node)
    return nodes


def is_noop(statement: Any) -> bool:
    """Whether a statement has no effect: a docstring or another constant, or ``pass``."""
    is_constant = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return is_constant or isinstance(statement, ast.Pass)


@dataclass
class ParsedModule:
    """A parsed module: the statements that bind each name, its imports, and its statements with effects."""

    name: str
    path: Path | None  #: None for a folder without ``__init__.py``
    has_typing_imports: bool = True  #: whether imports in ``if TYPE_CHECKING:``, which never run, are included
    sha256: str = ""  #: of the file
    bindings: dict[str, list[ast.stmt]] = field(default_factory=dict)
    imports: dict[str, list[str]] = field(default_factory=dict)  #: by local name, the dotted names that it may refer to
    imports_by_statement: dict[ast.stmt, dict[str, list[str]]] = field(default_factory=dict)  #: imports by statement
    star_imports: list[str] = field(default_factory=list)  #: modules of ``from x import *``
    effect_statements: list[ast.stmt] = field(default_factory=list)  #: statements with an effect on import

    def __post_init__(self) -> None:
        if self.path is None:
            return
        content = self.path.read_bytes()
        self.sha256 = hashlib.sha256(content).hexdigest()
        if self.path.suffix == ".py":
            for statement in ast.parse(content, str(self.path)).body:
                self._index_statement(statement)

    def _index_statement(self, statement: ast.stmt) -> None:
        if not self.has_typing_imports and _is_type_checking_block(statement):
            return
        statement_imports = self.imports_by_statement.setdefault(statement, {})
        for name, target in find_imports(statement, self.package):
            if name == "*":
                self.star_imports.append(target)
                continue
            for names in (statement_imports, self.imports):  # any branch of `try` or `if` may be executed
                if target not in names.setdefault(name, []):
                    names[name].append(target)
        if isinstance(statement, IMPORTS) or is_noop(statement) or _is_type_checking_block(statement):
            return
        for name in _list_bound_names(statement):
            self.bindings.setdefault(name, []).append(statement)
        if not isinstance(statement, DEFINITIONS) and not _is_plain_assignment(statement):
            self.effect_statements.append(statement)

    def list_imported_names(self, on_import: bool = False) -> list[str]:
        """List the dotted names of all imports, or only of those that run when the module is imported."""
        return [
            target
            for statement, imports in self.imports_by_statement.items()
            if not (on_import and isinstance(statement, DEFINITIONS))
            for target in itertools.chain(*imports.values())
        ]

    @property
    def package(self) -> str:
        """Package that relative imports start from."""
        is_package = self.path is None or self.path.stem == "__init__"
        return self.name if is_package else self.name.rpartition(".")[0]


def _list_bound_names(statement: ast.stmt) -> Iterator[str]:
    """Names that a statement binds in the module, including its blocks."""
    if isinstance(statement, DEFINITIONS):
        yield statement.name
        return
    for node in list_descendant_nodes(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, DEFINITIONS):
            yield node.name


def _is_plain_assignment(statement: ast.stmt) -> bool:
    """Whether a statement only assigns values to names, such as ``SIZE = 3``."""
    if isinstance(statement, ast.Assign):
        nodes = [node for target in statement.targets for node in list_descendant_nodes(target)]
        is_plain = all(isinstance(node, (ast.Name, ast.Tuple, ast.List)) for node in nodes)
    else:
        is_plain = isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    return is_plain and not any(
        isinstance(node, (ast.Call, ast.NamedExpr)) for node in list_descendant_nodes(statement)
    )


def _is_type_checking_block(statement: ast.stmt) -> bool:
    """Whether a statement is ``if TYPE_CHECKING:``, which never runs."""
    if not isinstance(statement, ast.If) or statement.orelse:
        return False
    condition = statement.test
    return (condition.id if isinstance(condition, ast.Name) else getattr(condition, "attr", "")) == "TYPE_CHECKING"


def find_imports(node: ast.AST, package: str) -> Iterator[tuple[str, str]]:
    """Imports anywhere in a statement: pairs of a local name and the dotted name that it refers to."""
    for child in list_descendant_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield (alias.asname, alias.name) if alias.asname else (alias.name.partition(".")[0],) * 2
                if not alias.asname and "." in alias.name:
                    yield f"{alias.name}!", alias.name  # binds no name, but executes the submodule
        elif isinstance(child, ast.ImportFrom):
            module = _resolve_relative_name(package, child.level, child.module)
            for alias in child.names:
                yield alias.asname or alias.name, module if alias.name == "*" else f"{module}.{alias.name}"
        elif isinstance(child, ast.Call):
            function_name = child.func.attr if isinstance(child.func, ast.Attribute) else getattr(child.func, "id", "")
            arguments = [*child.args[:1], *(word.value for word in child.keywords if word.arg == "name")]
            for name in (
                part.value for part in arguments if isinstance(part, ast.Constant) and isinstance(part.value, str)
            ):
                if function_name in {"import_module", "__import__"} and (stripped_name := name.lstrip(".")):
                    yield f"{name}()", _resolve_relative_name(package, len(name) - len(stripped_name), stripped_name)


def _resolve_relative_name(package: str, level: int, name: str | None) -> str:
    """Dotted name of a module that is imported with this number of leading dots."""
    parts = package.split(".")
    return ".".join([*(parts[: len(parts) - level + 1] if level else ()), *([name] if name else ())])


def find_used_names(statement: ast.AST) -> Iterator[tuple[str, list[str]]]:
    """Names that a statement reads, each with its chain of attributes, such as ``helper.TABLE.shape``."""
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
            stack += _list_child_nodes(node)


def is_inert_on_import(statement: ast.stmt) -> bool:
    """Whether a statement is a function without defaults and decorators, which evaluates nothing on import."""
    if not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return False
    return not (statement.decorator_list or statement.args.defaults or statement.args.kw_defaults)


def has_attribute_or_item_assignment(statement: ast.stmt) -> bool:
    """Whether a statement changes another object: ``helper.table = 3``, ``TABLE["mu"] = 3``."""
    nodes = list_descendant_nodes(statement)
    return any(isinstance(node, (ast.Attribute, ast.Subscript)) and isinstance(node.ctx, ast.Store) for node in nodes)
