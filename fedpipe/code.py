"""What a number was computed by: digests of the code that defines a component, and of the code that all runs share.

A digest is of the syntax trees of a class, its bases and everything that they use, transitively, without comments,
docstrings and formatting; it is the same on every version of Python that fedpipe runs on. What is followed are the
user's own modules and, in fedpipe, the modules that define components; anything else (PyTorch, the shared code) stands
in the digest by name alone. Nothing here executes what it reads. Imports nothing but the standard library.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedpipe.errors import SettingsError

ROOM = "fedpipe"
#: Packages whose modules define components; what several of them share lies in modules that begin with an underscore.
COMPONENTS = ("fedpipe.algorithms", "fedpipe.models", "fedpipe.data.partitions", "fedpipe.data.datasets")
SHARED = (("fedpipe.engine.run", "Run"), ("fedpipe.engine.run", "open_run"))  #: where the shared code begins
PROBES = {  #: kinds of probes, and the modules that compute them
    "head-norms": "fedpipe.probes.norms",
    "features": "fedpipe.probes.features",
    "surface": "fedpipe.probes.surface",
    "gradients": "fedpipe.probes.gradients",
    "locals": "fedpipe.probes.locals",
}
FILES = "FILES"  #: in an own module: the data files that it reads, from the folder of params.yaml
DIGITS = 12


@dataclass(frozen=True)
class Digest:
    """A digest, and what it was made of.

    Parameters
    ----------
    text
        Twelve hexadecimal digits.
    files
        The source files and declared data files.
    """

    text: str
    files: frozenset[Path]


@functools.cache
def of(*objects: Any) -> Digest:
    """The digest of classes and functions, with all that they use of fedpipe's components and of own modules.

    It is computed once a process, as the code is imported once.

    Raises
    ------
    SettingsError
        A source or a declared data file is missing, or the declaration is not a list of names.
    """
    for top in {item.__module__.partition(".")[0] for item in objects} - _followed:
        _followed.add(top)
    bases = [base for item in objects if isinstance(item, type) for base in item.__mro__[1:]]
    return _walked(map(_place, objects), _defines_components, map(_place, bases))


@functools.cache
def shared() -> str:
    """The digest of the code that all runs share: executors, optimizers, streams, layers, base classes, evaluation."""
    return _walked(SHARED, _is_shared).text


@functools.cache
def probe(kind: str) -> str:
    """The digest of the code of a kind of probe, ``head-norms``: of what probes have of their own."""
    return _walked([(PROBES[kind], "probe")], lambda module: module.startswith("fedpipe.probes.")).text


def _place(value: Any) -> tuple[str, str]:
    return value.__module__, value.__qualname__.partition(".")[0]


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
            parts.append(f"{name}=[{','.join([_told(item) for item in listed if not _is_idle(item)])}]")
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


def _within(node: ast.AST) -> list[ast.AST]:
    """A node and all that lies below it."""
    found = [node]
    for node in found:
        found += _children(node)
    return found


def _is_idle(statement: Any) -> bool:
    """Whether a statement does nothing: a docstring or another bare constant, or ``pass``."""
    constant = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return constant or isinstance(statement, ast.Pass)


# -- modules -----------------------------------------------------------------------------------------------------------


_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass
class _Module:
    """A module's source, taken apart: what each name is bound by, what is imported, and what always acts."""

    name: str
    path: Path | None  #: None for a folder without ``__init__.py``
    source: bytes = b""  #: of a module that is no Python source
    bound: dict[str, list[ast.stmt]] = field(default_factory=dict)
    imports: dict[str, str] = field(default_factory=dict)  #: local name: what it stands for, dotted
    within: dict[ast.stmt, dict[str, str]] = field(default_factory=dict)  #: the same by statement
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
        imported = list(_imported(statement, self.package))
        self.within[statement] = dict(imported)
        for name, target in imported:
            if name == "*":
                self.stars.append(target)
            else:
                self.imports[name] = target
        if isinstance(statement, (ast.Import, ast.ImportFrom)) or _is_idle(statement) or _is_for_types(statement):
            return
        for name in _binds(statement):
            self.bound.setdefault(name, []).append(statement)
        if not isinstance(statement, _DEFINITIONS) and not _is_plain(statement):
            self.acting.append(statement)

    @property
    def package(self) -> str:
        """What a relative import starts from."""
        is_package = self.path is None or self.path.stem == "__init__"
        return self.name if is_package else self.name.rpartition(".")[0]


def _binds(statement: ast.stmt) -> Iterator[str]:
    """The names of the module that a statement binds, its own and those of blocks within it."""
    if isinstance(statement, _DEFINITIONS):
        yield statement.name
        return
    for node in _within(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, _DEFINITIONS):
            yield node.name


def _is_plain(statement: ast.stmt) -> bool:
    """Whether a statement gives names a value and does nothing else: ``SIZE = 3``."""
    if isinstance(statement, ast.Assign):
        names = [node for target in statement.targets for node in _within(target) if isinstance(node, ast.expr)]
        plain = all(isinstance(node, (ast.Name, ast.Tuple, ast.List)) for node in names)
    else:
        plain = isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    return plain and not any(isinstance(node, (ast.Call, ast.NamedExpr)) for node in _within(statement))


def _is_for_types(statement: ast.stmt) -> bool:
    """Whether it is ``if TYPE_CHECKING:``, which never runs."""
    if not isinstance(statement, ast.If) or statement.orelse:
        return False
    told = statement.test
    return (told.id if isinstance(told, ast.Name) else getattr(told, "attr", "")) == "TYPE_CHECKING"


def _imported(node: ast.AST, package: str) -> Iterator[tuple[str, str]]:
    """What is imported anywhere within a statement: the local name, and what it stands for."""
    for found in _within(node):
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
        elif isinstance(found, ast.Call) and found.args and isinstance(found.args[0], ast.Constant):
            called = found.func.attr if isinstance(found.func, ast.Attribute) else getattr(found.func, "id", "")
            if called in {"import_module", "__import__"} and isinstance(found.args[0].value, str):
                yield f"{found.args[0].value}()", found.args[0].value


@functools.cache
def _origin(module: str) -> Path | None:
    """The file of a module; None where it is a folder alone. Nothing is imported for it.

    Raises
    ------
    ModuleNotFoundError
        There is no such module, or it is built into Python.
    """
    top, *parts = module.split(".")
    loaded = sys.modules.get(top)
    spec = getattr(loaded, "__spec__", None) or (None if loaded else importlib.util.find_spec(top))
    origin = getattr(loaded, "__file__", None) or (spec.origin if spec else None)
    path = Path(origin).resolve() if origin and Path(origin).is_file() else None
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    if path is None and not folders:
        raise ModuleNotFoundError(module)
    for part in parts:
        if path is not None and path.stem == "__init__":
            folders = [path.parent]
        places = [folder / part for folder in folders]
        sources = (file for place in places for file in (place / "__init__.py", place.with_name(f"{part}.py")))
        built = (file for folder in folders for file in folder.glob(f"{part}.*.so"))
        path = next((file.resolve() for file in itertools.chain(sources, built) if file.is_file()), None)
        folders = [place for place in places if place.is_dir()]
        if path is None and not folders:
            raise ModuleNotFoundError(module)
    return path


def _parsed(module: str) -> _Module:
    """A module taken apart; once for as long as its file does not change."""
    path = _origin(module)
    stat = path.stat() if path else None
    return _parse(module, path, (stat.st_mtime_ns, stat.st_size, stat.st_ino) if stat else ())


@functools.cache
def _parse(module: str, path: Path | None, changed: tuple[int, ...]) -> _Module:
    return _Module(module, path)


@functools.cache
def _is_module(name: str) -> bool:
    """Whether it is a module of fedpipe or of somebody's own; others are not looked for, since that may import them."""
    if _is_others(name.partition(".")[0]):
        return False
    try:
        _origin(name)
    except ModuleNotFoundError:
        return False
    return True


#: Top-level packages that are followed although they are installed: those in which a component itself lies.
_followed: set[str] = set()


@functools.cache
def _is_others(top: str) -> bool:
    """Whether a top-level package is Python's own, or installed from somewhere."""
    if top in {*sys.stdlib_module_names, *sys.builtin_module_names}:
        return True
    if top == ROOM or top in _followed:
        return False
    try:
        path = _origin(top)
    except ModuleNotFoundError:
        return True
    return path is not None and bool({"site-packages", "dist-packages"} & set(path.parts))


def _defines_components(module: str) -> bool:
    """Whether a module is followed for a component: one of fedpipe's that defines some, or the user's own."""
    if module.partition(".")[0] == ROOM:
        return module.startswith(tuple(f"{package}." for package in COMPONENTS)) and module.rpartition(".")[2] != "base"
    return _is_module(module)


def _is_shared(module: str) -> bool:
    return module.partition(".")[0] == ROOM and not _defines_components(module)


# -- the walk ----------------------------------------------------------------------------------------------------------


def _walked(
    names: Iterable[tuple[str, str]], follows: Callable[[str], bool], others: Iterable[tuple[str, str]] = ()
) -> Digest:
    """The digest of some modules' names, and of those others that lie in modules that are followed."""
    for lookup in (_origin, _is_module, _is_others):
        lookup.cache_clear()
    walk = _Walk(follows)
    for module, name in names:
        try:
            walk.entry(module, name)
        except (OSError, ModuleNotFoundError):
            raise SettingsError(f"'{module}.{name}' has no source that can be read; it should lie in a file.") from None
    for module, name in others:
        walk.name(module, name)
    text = "\n".join(f"{place}: {what}" for place, what in sorted(walk.found.items()))
    return Digest(hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:DIGITS], frozenset(walk.files))


class _Walk:
    """Everything that some names of modules reach, as canonical text by place."""

    def __init__(self, follows: Callable[[str], bool]) -> None:
        self._follows, self._seen = functools.cache(follows), set[tuple[str, str]]()
        self.found: dict[str, str] = {}
        self.files: set[Path] = set()

    def entry(self, module: str, name: str) -> None:
        """What to begin with, wherever it lies; all of its module where that does not say which part it is."""
        source = _parsed(module)
        if name in source.bound or name in source.imports:
            self._name(module, name)
        else:
            self._whole(module)

    def name(self, module: str, name: str) -> None:
        """What a module binds to a name, and what that uses, if the module is followed."""
        if self._follows(module):
            self._name(module, name)

    def _name(self, module: str, name: str) -> None:
        if (module, name) in self._seen:
            return
        self._seen.add((module, name))
        self._module(module)
        source = _parsed(module)
        for number, statement in enumerate(source.bound.get(name, ())):
            self._statement(source, f"{module}.{name}/{number}", statement)
        if name in source.imports:
            self._target(f"{module}.{name}", source.imports[name], [])
        for star in source.stars:
            self.name(star, name)

    def _module(self, module: str) -> None:
        """What importing a module does beside binding names, and the data files that it declares."""
        if (module, "") in self._seen:
            return
        self._seen.add((module, ""))
        parent = module.rpartition(".")[0]
        if parent and self._follows(parent):
            self._module(parent)
        source = _parsed(module)
        if source.path is not None:
            self.files.add(source.path)
        if source.source:
            self.found[module] = hashlib.sha256(source.source).hexdigest()
        for target in [*source.imports.values(), *source.stars]:
            imported = target if _is_module(target) else target.rpartition(".")[0]
            if imported and self._follows(imported):
                self._module(imported)
        for number, statement in enumerate(source.acting):
            self._statement(source, f"{module}/{number}", statement)
        if FILES in source.bound and module.partition(".")[0] != ROOM:
            for path in _declared(source):
                self.files.add(path)
                with path.open("rb") as stream:
                    self.found[f"{module}:{path.as_posix()}"] = hashlib.file_digest(stream, "sha256").hexdigest()

    def _whole(self, module: str) -> None:
        """All of a module, where it can't be told what of it is used."""
        self._module(module)
        source = _parsed(module)
        for name in [*source.bound, *source.imports]:
            self._name(module, name)
        for star in source.stars:
            if self._follows(star):
                self._whole(star)

    def _statement(self, source: _Module, place: str, statement: ast.stmt) -> None:
        if place in self.found:
            return
        self.found[place] = canonical(statement)
        local = source.within[statement]
        for root, attributes in _used(statement):
            if root in local:
                self._target(f"{place}:{root}", local[root], attributes)
            elif root in source.imports:
                self._target(f"{source.name}.{root}", source.imports[root], attributes)
            elif root in {"globals", "vars", "eval", "exec"} and root not in source.bound:
                if source.name.partition(".")[0] != ROOM:
                    self._whole(source.name)
            else:
                self._name(source.name, root)
        for name, target in local.items():
            if name.endswith("()") and self._follows(target):  # import_module("helper")
                self._whole(target)

    def _target(self, place: str, target: str, attributes: list[str]) -> None:
        """What an imported name stands for; the name of what is not followed is all that the digest holds of it."""
        self.found[place] = f"= {target}"
        module, _, name = target.rpartition(".")
        if _is_module(target) and self._follows(target):
            self._attribute(target, attributes)
        elif module and not _is_module(target) and self._follows(module):
            self._attribute(module, [name, *attributes])
        elif target == ROOM or (_is_module(target) and any(package.startswith(f"{target}.") for package in COMPONENTS)):
            self._chain(target, attributes)

    def _chain(self, package: str, attributes: list[str]) -> None:
        """A package that is not followed may lead to a module that is: ``fedpipe.algorithms.fedavg.FedAvg``."""
        for index, part in enumerate(attributes):
            package = f"{package}.{part}"
            if not _is_module(package):
                return
            if self._follows(package):
                self._attribute(package, attributes[index + 1 :])
                return

    def _attribute(self, module: str, attributes: list[str]) -> None:
        """``module.a.b``: what the module binds to ``a``, or its submodule ``a``; all of it where there is neither."""
        if not attributes:
            self._whole(module)
            return
        source, (first, *others) = _parsed(module), attributes
        if first in source.bound or first in source.imports or source.stars:
            if first in source.imports and first not in source.bound:
                self._module(module)
                self._target(f"{module}.{first}", source.imports[first], others)
            else:
                self.name(module, first)
        elif _is_module(f"{module}.{first}"):
            self._module(module)
            if self._follows(f"{module}.{first}"):
                self._attribute(f"{module}.{first}", others)
        else:
            self._whole(module)


def _used(statement: ast.AST) -> Iterator[tuple[str, list[str]]]:
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


def _declared(source: _Module) -> Iterator[Path]:
    """The data files that an own module names in ``FILES``."""
    (statement,) = source.bound[FILES][-1:]
    try:
        names = ast.literal_eval(getattr(statement, "value", ast.Constant(None)))
    except (ValueError, TypeError):
        names = None
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise SettingsError(f"{source.name}.{FILES} can't be read; it should be a list of names, as ['prior.npy'].")
    for name in names:
        if not Path(name).is_file():
            raise SettingsError(f"{source.name}.{FILES}: {name} is missing; it should be a file beside params.yaml.")
        yield Path(name)
