"""Digests of the code that defines a component, and of the code that all runs share.

A digest covers the syntax trees of a class, its bases and everything that they use, transitively, without comments,
docstrings and formatting. It is the same for all Python versions that fedpipe supports. Digests follow the user's
modules and fedpipe's modules that define components. Other code (PyTorch, the shared code) enters a digest only by
name. The code is never executed. This module imports only the standard library.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedpipe.core.components import syntax
from fedpipe.core.components.module_graph import (
    COMPONENT_PACKAGES,
    DATA_FILES_VARIABLE,
    PACKAGE,
    find_dynamic_imports,
    find_source_file,
    followed_packages,
    is_external_package,
    is_first_party_module,
    is_hashed_module,
    is_shared_module,
    is_user_module,
    list_declared_data_files,
    parse_module,
    reject_stale_bytecode,
)
from fedpipe.core.errors import ArtifactError, SettingsError
from fedpipe.core.storage.files import compute_file_sha256, write_bytes

PACKAGE_FOLDER = Path(__file__).resolve().parents[2]


def hash_package_files() -> dict[Path, str]:
    """Hash fedpipe's files."""
    return {path: compute_file_sha256(path) for path in sorted(PACKAGE_FOLDER.rglob("*.py")) if path.is_file()}


HASHES_ON_IMPORT = hash_package_files()  #: of the code that this process executes
SHARED_ENTRY_POINTS = (  #: entry points of the shared code
    ("fedpipe.engine.run", "Run"),
    ("fedpipe.planning.download", "load_and_save_dataset"),
    ("fedpipe.planning.partition", "partition_dataset"),
)
#: Modules that jobs execute without an effect on numbers. Plans of other studies only decide which states are deleted.
MODULES_WITHOUT_NUMBERS = ("fedpipe.planning.combined",)
DIAGNOSTIC_MODULES = {  #: module that computes each kind of diagnostic
    "head-norms": "fedpipe.engine.diagnostics.head_norms",
    "features": "fedpipe.engine.diagnostics.features",
    "surface": "fedpipe.engine.diagnostics.surface",
    "gradients": "fedpipe.engine.diagnostics.gradients",
    "locals": "fedpipe.engine.diagnostics.step_traces",
}
DIGEST_DIGITS = 12
INTROSPECTION_ATTRIBUTES = {"__globals__", "__subclasses__"}  #: attributes that reach objects without a name
DYNAMIC_BUILTINS = {"globals", "locals", "vars", "eval", "exec"}  #: functions that may read any name of a module


@dataclass(frozen=True)
class Digest:
    """A digest and its source files."""

    text: str  #: twelve hexadecimal digits
    files: Mapping[Path, str]  #: SHA-256 of each source file and declared data file


@functools.cache
def compute_code_digest(*objects: Any) -> Digest:
    """Digest of classes and functions, with all code of components and user modules that they use.

    It is computed once per process, because code is imported once. A missing source or data file is an error.
    """
    followed_packages.clear()  # a digest must not depend on earlier digests
    followed_packages.update(item.__module__.partition(".")[0] for item in objects)
    bases = [base for item in objects if isinstance(item, type) for base in item.__mro__[1:]]
    return _compute_digest_of_names(map(_locate_definition, objects), is_hashed_module, map(_locate_definition, bases))


def recompute_code_digests(*object_groups: tuple[Any, ...]) -> list[str]:
    """Digests of the current files. :func:`compute_code_digest` returns those of the first call in this process."""
    return [compute_code_digest.__wrapped__(*objects).text for objects in object_groups]


@functools.cache
def compute_shared_code_digest() -> str:
    """Digest of the code that all runs share, such as executors, optimizers, random streams and base classes.

    It takes half a second. So a file next to Python's bytecode stores it, with the hash of all files of fedpipe. It is
    stored only if this process has imported and parsed the hashed files.
    """
    path, hashes = Path(importlib.util.cache_from_source(__file__)).with_suffix(".txt"), hash_package_files()
    lines = (f"{file.relative_to(PACKAGE_FOLDER).as_posix()} {sha256}\n" for file, sha256 in hashes.items())
    package = hashlib.sha256("".join(lines).encode()).hexdigest()
    with suppress(OSError, ValueError):
        stored_package, stored_digest = path.read_text().split()
        if stored_package == package:
            for _, file in _list_component_files():
                reject_stale_bytecode(file)
            return stored_digest
    digest, components = compute_shared_digest_and_files(), parse_component_modules()
    parsed_hashes = {**digest.files, **{source.path: source.sha256 for source in components if source.path}}
    is_unchanged = hashes == hash_package_files() == HASHES_ON_IMPORT and parsed_hashes.items() <= hashes.items()
    if is_unchanged and not sys.dont_write_bytecode:
        with suppress(ArtifactError):
            write_bytes(path, f"{package} {digest.text}\n".encode())
    return digest.text


def compute_shared_digest_and_files() -> Digest:
    """Digest of everything that the entry points of jobs reach and that components import, except for components."""
    return _compute_digest_of_names(
        [*SHARED_ENTRY_POINTS, *_list_imports_of_shared_code()],
        lambda module: is_shared_module(module) and module not in MODULES_WITHOUT_NUMBERS,
    )


def parse_component_modules() -> list[syntax.ParsedModule]:
    """Parse the modules of all components, so that processes that are forked later need not."""
    return [parse_module(module) for module, _ in _list_component_files()]


def _list_component_files() -> list[tuple[str, Path]]:
    """List the modules of all components with their files."""
    root = PACKAGE_FOLDER.parent
    files = [
        path for package in COMPONENT_PACKAGES for path in sorted(root.joinpath(*package.split(".")).rglob("*.py"))
    ]
    return [(".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"), path) for path in files]


def _list_imports_of_shared_code() -> Iterator[tuple[str, str]]:
    """List the names that components import from shared code. Digests of components do not follow them."""
    for source in parse_component_modules():
        for target in itertools.chain(*source.imports.values()):
            module, _, name = target.rpartition(".")
            if is_shared_module(target) and is_first_party_module(target):
                if target.count("."):  # `import fedpipe.x`, but not `import fedpipe`
                    yield target, ""
            elif is_shared_module(module) and is_first_party_module(module):
                yield module, name


@functools.cache
def compute_diagnostic_digest(kind: str) -> str:
    """Digest of the code of a kind of diagnostic, such as ``head-norms``, within `fedpipe.engine.diagnostics`."""
    return _compute_digest_of_names(
        [(DIAGNOSTIC_MODULES[kind], "compute_table")], lambda module: module.startswith("fedpipe.engine.diagnostics.")
    ).text


def _locate_definition(value: Any) -> tuple[str, str]:
    return value.__module__, value.__qualname__.partition(".")[0]


# -- the walk ----------------------------------------------------------------------------------------------------------


def _compute_digest_of_names(
    names: Iterable[tuple[str, str]], is_followed: Callable[[str], bool], optional_names: Iterable[tuple[str, str]] = ()
) -> Digest:
    """Digest of names of modules. Optional names count if digests follow their module."""
    for lookup in (find_source_file, is_first_party_module, is_external_package):
        lookup.cache_clear()
    walk = _DependencyWalk(is_followed)
    for module, name in names:
        try:
            walk.visit_entry_point(module, name)
        except (OSError, ModuleNotFoundError):
            raise SettingsError(f"'{module}.{name}' has no readable source. Define it in a file.") from None
    for module, name in optional_names:
        if is_followed(module):
            walk.visit_name(module, name)
    walk.add_statement_order()
    text = "\n".join(f"{location}: {code}" for location, code in sorted(walk.texts.items()))
    return Digest(hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:DIGEST_DIGITS], walk.files)


class _DependencyWalk:
    """Collects the canonical text, by location, of all code that names reach."""

    def __init__(self, is_followed: Callable[[str], bool]) -> None:
        self._is_followed, self._visited_names = functools.cache(is_followed), set[tuple[str, str]]()
        self._visited_targets = set[tuple[str, ...]]()
        self.texts: dict[str, str] = {}
        self.files: dict[Path, str] = {}

    def visit_entry_point(self, module: str, name: str) -> None:
        """Visit an entry point, or its complete module if the name is not bound there."""
        source = parse_module(module)
        if name in source.bindings or name in source.imports:
            self.visit_name(module, name)
        else:
            self._visit_complete_module(module)

    def visit_name(self, module: str, name: str) -> None:
        """Visit a name of a module and everything it uses."""
        if (module, name) in self._visited_names:
            return
        self._visited_names.add((module, name))
        self._visit_import_effects(module)
        source = parse_module(module)
        for number, statement in enumerate(source.bindings.get(name, ())):
            self._visit_statement(source, f"{module}.{name}/{number}", statement)
        self._visit_imported_names(f"{module}.{name}", source.imports.get(name, ()), [])
        for star in filter(self._is_followed, source.star_imports):
            self.visit_name(star, name)
            if is_first_party_module(f"{star}.{name}"):  # may be in `__all__`, or imported elsewhere
                self._visit_complete_module(f"{star}.{name}")

    def _visit_import_effects(self, module: str) -> None:
        """Visit the effects of importing a module, and its declared data files."""
        if (module, "") in self._visited_names:
            return
        self._visited_names.add((module, ""))
        parent = module.rpartition(".")[0]
        if parent and self._is_followed(parent):
            self._visit_import_effects(parent)
        source = parse_module(module)
        if source.path is not None:
            self.files[source.path] = source.sha256
            if source.path.suffix != ".py":
                self.texts[module] = source.sha256
        # A key covers all imports inside functions. The digest of shared code covers only those on import.
        for target in source.list_imported_names(on_import=is_shared_module(module)) + source.star_imports:
            self._visit_imported_module(target)
        for number, statement in enumerate(source.effect_statements):
            self._visit_statement(source, f"{module}/{number}", statement)
        if not is_user_module(module):
            return
        for name, statements in source.bindings.items():
            if any(self._has_import_side_effects(source, statement) for statement in statements):
                self.visit_name(module, name)
        if DATA_FILES_VARIABLE in source.bindings:
            for path in list_declared_data_files(source):
                self.texts[f"{module}:{path.as_posix()}"] = self.files[path] = compute_file_sha256(path)

    def _find_followed_module(self, target: str) -> str | None:
        """Find the module of a dotted name, which is itself or contains it. None if digests do not follow it."""
        module = target if is_first_party_module(target) else target.rpartition(".")[0]
        return module if module and self._is_followed(module) else None

    def _visit_imported_module(self, target: str) -> None:
        """Visit the effects of importing a dotted name."""
        if module := self._find_followed_module(target):
            self._visit_import_effects(module)

    def _visit_complete_module(self, module: str) -> None:
        """Visit a complete module, because any part of it may be used."""
        self._visit_import_effects(module)
        source = parse_module(module)
        for name in [*source.bindings, *source.imports]:
            self.visit_name(module, name)
        for star in filter(self._is_followed, source.star_imports):
            self._visit_complete_module(star)

    def _visit_statement(self, source: syntax.ParsedModule, location: str, statement: ast.stmt) -> None:
        if location in self.texts:
            return
        self.texts[location] = syntax.convert_node_to_canonical_text(statement)
        statement_imports, is_user_code = source.imports_by_statement[statement], is_user_module(source.name)
        for target in itertools.chain(*statement_imports.values()):
            self._visit_imported_module(target)
        for root, attributes in syntax.find_used_names(statement):
            imported_targets = source.imports.get(root, [])
            if is_user_code and (
                INTROSPECTION_ATTRIBUTES & {*attributes}
                or (imported_targets == ["sys"] and attributes[:1] == ["modules"])
            ):
                self._visit_module_and_imports(source)
            if imported_targets:
                self._visit_imported_names(f"{location}:{root}", statement_imports.get(root, ()), attributes)
                if imported_targets != statement_imports.get(root):
                    self._visit_imported_names(f"{source.name}.{root}", imported_targets, attributes)
                if root in source.bindings:
                    self.visit_name(source.name, root)
            elif root in DYNAMIC_BUILTINS and root not in source.bindings:
                if is_user_code:
                    self._visit_complete_module(source.name)
            else:
                self.visit_name(source.name, root)
        # Such as import_module("helper").
        calls = [targets for name, targets in statement_imports.items() if name.endswith("()")]
        dynamic_imports = find_dynamic_imports(statement, source) if is_user_code else ()
        for target in filter(self._is_followed, itertools.chain(*calls, dynamic_imports)):
            self._visit_complete_module(target)

    def _visit_module_and_imports(self, source: syntax.ParsedModule) -> None:
        """Visit a complete module and all its imports, because its code may reach them without names."""
        self._visit_complete_module(source.name)
        for target in dict.fromkeys(itertools.chain(*source.imports.values())):
            if module := self._find_followed_module(target):
                self._visit_complete_module(module)

    def _has_import_side_effects(self, source: syntax.ParsedModule, statement: ast.stmt) -> bool:
        """Whether a definition has an effect on import, by a user's decorator, a class body or a subclass hook."""
        if not isinstance(statement, syntax.DEFINITIONS):
            return False
        if any(self._is_user_defined_name(source, root) for root in _list_used_names(statement.decorator_list)):
            return True
        if not isinstance(statement, ast.ClassDef):
            return False
        body = (
            node for node in statement.body if not isinstance(node, syntax.DEFINITIONS) and not syntax.is_noop(node)
        )
        if any(isinstance(node, ast.Expr) or syntax.has_attribute_or_item_assignment(node) for node in body):
            return True
        base_names = _list_used_names([*statement.bases, *(word.value for word in statement.keywords)])
        return any(self._has_subclass_hook(source, name) for name in base_names)

    def _is_user_defined_name(self, source: syntax.ParsedModule, name: str) -> bool:
        user_targets = filter(is_user_module, source.imports.get(name, ()))
        return name in source.bindings or any(map(self._find_followed_module, user_targets))

    def _has_subclass_hook(self, source: syntax.ParsedModule, name: str, depth: int = 8) -> bool:
        """Whether a user's class reacts to its subclasses, by `__init_subclass__` or a metaclass."""
        for statement in source.bindings.get(name, ()) if depth else ():
            if not isinstance(statement, ast.ClassDef):
                continue
            if any(getattr(node, "name", "") in {"__init_subclass__", "__new__"} for node in statement.body):
                return True
            if any(word.arg == "metaclass" for word in statement.keywords):
                return True
            if any(self._has_subclass_hook(source, base, depth - 1) for base in _list_used_names(statement.bases)):
                return True
        for target in source.imports.get(name, ()) if depth else ():
            module, _, inner = target.rpartition(".")
            is_name_of_user_module = is_user_module(target) and self._find_followed_module(target) == module
            if is_name_of_user_module and self._has_subclass_hook(parse_module(module), inner, depth - 1):
                return True
        return False

    def _visit_imported_names(self, location: str, targets: Iterable[str], attributes: list[str]) -> None:
        """Visit everything that an imported name may refer to."""
        for number, target in enumerate(targets):
            self._visit_imported_name(f"{location}/{number}" if number else location, target, attributes)

    def _visit_imported_name(self, location: str, target: str, attributes: list[str]) -> None:
        """Visit the object of an imported name. Code that digests do not follow enters only by name."""
        self.texts[location] = f"= {target}"
        if (target, *attributes) in self._visited_targets:  # also ends cycles of packages that import missing names
            return
        self._visited_targets.add((target, *attributes))
        module, _, name = target.rpartition(".")
        if is_first_party_module(target) and self._is_followed(target):
            self._visit_attribute(target, attributes)
            if module and self._is_followed(module):  # the package may bind the name to another object
                parent_module = parse_module(module)
                if name in parent_module.bindings or name in parent_module.imports or parent_module.star_imports:
                    self.visit_name(module, name)
        elif module and not is_first_party_module(target) and self._is_followed(module):
            self._visit_attribute(module, [name, *attributes])
        elif is_first_party_module(target) and any(f"{each}.".startswith(f"{target}.") for each in COMPONENT_PACKAGES):
            self._visit_attribute_chain(target, attributes)

    def _visit_attribute_chain(self, package: str, attributes: list[str]) -> None:
        """Follow a chain such as ``fedpipe.algorithms.fedavg.FedAvg`` to a module that digests follow."""
        for index, part in enumerate(attributes):
            package = f"{package}.{part}"
            if not is_first_party_module(package):
                return
            if self._is_followed(package):
                self._visit_attribute(package, attributes[index + 1 :])
                return

    def add_statement_order(self) -> None:
        """Add the order of statements of user modules in which it matters: effects on import, or names bound twice."""
        for module in {module for module, name in self._visited_names if not name and is_user_module(module)}:
            source = parse_module(module)
            is_rebound = (len(source.bindings.get(name, ())) + (name in source.imports) > 1 for name in source.bindings)
            if not (source.effect_statements or len(source.star_imports) > 1 or any(is_rebound)):
                continue
            statement_texts = []
            for statement in source.imports_by_statement:
                names = [name for name, statements in source.bindings.items() if statement in statements]
                is_visited = any((module, name) in self._visited_names for name in names)
                is_used = is_visited or statement in source.effect_statements
                imported_targets = [target for _, target in syntax.find_imports(statement, source.package)]
                has_followed_import = any(
                    self._is_followed(candidate)
                    for target in imported_targets
                    for candidate in (target, target.rpartition(".")[0])
                )
                is_import = isinstance(statement, syntax.IMPORTS)
                if (is_import and has_followed_import) or (is_used and not syntax.is_inert_on_import(statement)):
                    statement_texts.append(syntax.convert_node_to_canonical_text(statement))
            if len(statement_texts) > 1:
                self.texts[f"{module}#"] = "\n".join(statement_texts)

    def _visit_attribute(self, module: str, attributes: list[str]) -> None:
        """Visit ``module.a.b``: the name ``a`` of the module or its submodule ``a``, otherwise the complete module."""
        if not attributes:
            self._visit_complete_module(module)
            return
        source, (first, *others) = parse_module(module), attributes
        if first == "__file__" and module == PACKAGE:  # a path, no code
            return
        submodule = f"{module}.{first}"
        has_submodule = first not in source.bindings and is_first_party_module(submodule)
        if first in source.bindings or (source.star_imports and first not in source.imports):
            self.visit_name(module, first)
        elif first in source.imports:
            self._visit_import_effects(module)
            self._visit_imported_names(submodule, source.imports[first], others)
        elif has_submodule:
            self._visit_import_effects(module)
        else:
            self._visit_complete_module(module)
        if has_submodule and self._is_followed(submodule):  # an import may bind this name, too
            self._visit_attribute(submodule, others)


def _list_used_names(nodes: Iterable[ast.AST]) -> list[str]:
    """List the names that expressions read, without attributes."""
    return [name for node in nodes for name, _ in syntax.find_used_names(node)]
