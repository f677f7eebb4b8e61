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
import marshal
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType
from typing import Any

from fedpipe import syntax
from fedpipe.errors import SettingsError

ROOM = "fedpipe"
#: Packages whose modules define components; what several of them share lies in modules that begin with an underscore.
COMPONENTS = ("fedpipe.algorithms", "fedpipe.models", "fedpipe.data.partitions", "fedpipe.data.datasets")
SHARED = (  #: where the shared code begins
    ("fedpipe.engine.run", "Run"),
    ("fedpipe.engine.run", "open_run"),
    ("fedpipe.stages.download", "obtain"),
    ("fedpipe.stages.partition", "partition"),
)
PROBES = {  #: kinds of probes, and the modules that compute them
    "head-norms": "fedpipe.probes.norms",
    "features": "fedpipe.probes.features",
    "surface": "fedpipe.probes.surface",
    "gradients": "fedpipe.probes.gradients",
    "locals": "fedpipe.probes.locals",
}
FILES = "FILES"  #: in an own module: the data files that it reads, from the folder of params.yaml
GROWING = {"append", "extend", "insert"}  #: methods of a list that add to it
DIGITS = 12
INSTALLED = {"site-packages", "dist-packages"}  #: folders of what is nobody's own
HIDDEN = {"__globals__", "__subclasses__"}  #: attributes that lead to what no name leads to
UNREAD = {"globals", "locals", "vars", "eval", "exec"}  #: functions of Python that may read any name of a module


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
    _followed.clear()  # a digest must not depend on those that were made before it
    _followed.update(item.__module__.partition(".")[0] for item in objects)
    bases = [base for item in objects if isinstance(item, type) for base in item.__mro__[1:]]
    return _walked(map(_place, objects), _defines_components, map(_place, bases))


def again(*made_of: tuple[Any, ...]) -> list[str]:
    """Digests as they are by now; :func:`of` gives them as they were when a process first asked."""
    return [of.__wrapped__(*objects).text for objects in made_of]


@functools.cache
def shared() -> str:
    """The digest of the code that all runs share: executors, optimizers, streams, layers, base classes, evaluation."""
    return _walked([*SHARED, *_beside()], _is_shared).text


def _beside() -> Iterator[tuple[str, str]]:
    """What fedpipe's components import of the rest of fedpipe: names of modules that no key follows."""
    for package in COMPONENTS:
        folder = _origin(package)
        for path in sorted(folder.parent.rglob("*.py")) if folder else ():
            inner = path.relative_to(folder.parent).with_suffix("").parts if folder else ()
            source = _parsed(".".join((package, *(part for part in inner if part != "__init__"))))
            for target in itertools.chain(*source.imports.values()):
                module, _, name = target.rpartition(".")
                if _is_shared(target) and _is_module(target):
                    if target.count("."):  # `import fedpipe.x`, else fedpipe itself
                        yield target, ""
                elif _is_shared(module) and _is_module(module):
                    yield module, name


@functools.cache
def probe(kind: str) -> str:
    """The digest of the code of a kind of probe, ``head-norms``: of what probes have of their own."""
    return _walked([(PROBES[kind], "probe")], lambda module: module.startswith("fedpipe.probes.")).text


def _place(value: Any) -> tuple[str, str]:
    return value.__module__, value.__qualname__.partition(".")[0]


# -- modules -----------------------------------------------------------------------------------------------------------


def _refuse_stale(path: Path) -> None:
    """Refuse where Python would execute, or has executed, other code than the source: it tells by time and size alone.

    Raises
    ------
    SettingsError
        What it has compiled before is of another source, which was of the same size and time.
    """
    compiled = Path(importlib.util.cache_from_source(str(path)))
    try:
        held, stat = compiled.read_bytes(), path.stat()
    except OSError:
        return
    mark = b"".join((number & 0xFFFFFFFF).to_bytes(4, "little") for number in (int(stat.st_mtime), stat.st_size))
    unchecked = (1).to_bytes(4, "little")  # as `compileall --invalidation-mode unchecked-hash` leaves it
    head = importlib.util.MAGIC_NUMBER
    if held[:16] != head + bytes(4) + mark and held[:8] != head + unchecked:
        return
    try:
        taken = marshal.loads(held[16:])
    except (EOFError, ValueError, TypeError):
        raise SettingsError(f"{compiled} is damaged; delete it.") from None
    if not _alike(taken, compile(path.read_bytes(), str(path), "exec", dont_inherit=True)):
        raise SettingsError(f"{compiled} is of an earlier {path.name}, and Python would execute it; delete it.")


def _alike(one: Any, other: Any) -> bool:
    """Whether two compiled codes do the same; which columns tracebacks name (`PYTHONNODEBUGRANGES`) does not count."""
    if type(one) is not type(other):
        return False
    if isinstance(one, CodeType):
        bare, others = (each.replace(co_consts=(), co_linetable=b"") for each in (one, other))
        return bare == others and _alike(one.co_consts, other.co_consts)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(_alike, one, other))
    if isinstance(one, frozenset):
        return sorted(map(repr, one)) == sorted(map(repr, other))
    return repr(one) == repr(other)  # also NaN


def _spec(top: str) -> ModuleSpec | None:
    loaded = sys.modules.get(top)
    return getattr(loaded, "__spec__", None) or (None if loaded else importlib.util.find_spec(top))


@functools.cache
def _origin(module: str) -> Path | None:
    """The file of a module; None where it is a folder alone. Nothing is imported for it.

    Raises
    ------
    ModuleNotFoundError
        There is no such module, or it is built into Python.
    """
    top, *parts = module.split(".")
    loaded, spec = sys.modules.get(top), _spec(top)
    origin = getattr(loaded, "__file__", None) or (spec.origin if spec else None)
    path = Path(origin).resolve() if origin and Path(origin).is_file() else None
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    if path is None and not folders:
        raise ModuleNotFoundError(module)
    for part in parts:
        if path is not None and path.stem == "__init__" and path.parent not in folders:
            folders.insert(0, path.parent)
        places = [folder / part for folder in folders]
        sources = (file for place in places for file in (place / "__init__.py", place.with_name(f"{part}.py")))
        built = (file for folder in folders for file in folder.glob(f"{part}.*.so"))
        path = next((file.resolve() for file in itertools.chain(sources, built) if file.is_file()), None)
        folders = [place for place in places if place.is_dir()]
        if path is None and not folders:
            raise ModuleNotFoundError(module)
    return path


def _parsed(module: str) -> syntax.Module:
    """A module taken apart; once for as long as its file does not change."""
    path = _origin(module)
    stat = path.stat() if path else None
    return _parse(module, path, (stat.st_mtime_ns, stat.st_size, stat.st_ino) if stat else ())


@functools.cache
def _parse(module: str, path: Path | None, changed: tuple[int, ...]) -> syntax.Module:
    try:
        parsed = syntax.Module(module, path)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise SettingsError(f"{path} can't be read as Python ({error}); the code that is used imports it.") from None
    if path is not None and path.suffix == ".py" and _defines_components(module):
        _refuse_stale(path)
    return parsed


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
    if top == ROOM or (top in _followed and top not in sys.stdlib_module_names):
        return False
    try:
        path = _origin(top)
    except (ModuleNotFoundError, ValueError):
        return True
    if path is None:  # a folder alone; built into Python
        folders = list(getattr(_spec(top), "submodule_search_locations", None) or ())
        installed = bool(folders) and all(INSTALLED & set(Path(folder).parts) for folder in folders)
        return top in sys.stdlib_module_names or installed
    if top in sys.stdlib_module_names and any(path.is_relative_to(place) for place in _standard()):
        return True  # else it is one's own, of the same name
    return bool(INSTALLED & set(path.parts))


@functools.cache
def _standard() -> tuple[Path, ...]:
    """Where Python's own modules lie."""
    return tuple(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib"))


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
    walk.order()
    text = "\n".join(f"{place}: {what}" for place, what in sorted(walk.found.items()))
    return Digest(hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:DIGITS], frozenset(walk.files))


class _Walk:
    """Everything that some names of modules reach, as canonical text by place."""

    def __init__(self, follows: Callable[[str], bool]) -> None:
        self._follows, self._seen = functools.cache(follows), set[tuple[str, str]]()
        self._led = set[tuple[str, ...]]()
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
        self._targets(f"{module}.{name}", source.imports.get(name, ()), [])
        for star in source.stars:
            self.name(star, name)
            if self._follows(star) and _is_module(f"{star}.{name}"):  # named in `__all__`, or imported somewhere
                self._whole(f"{star}.{name}")

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
        for target in [*itertools.chain(*source.imports.values()), *source.stars]:
            imported = target if _is_module(target) else target.rpartition(".")[0]
            if imported and self._follows(imported):
                self._module(imported)
        for number, statement in enumerate(source.acting):
            self._statement(source, f"{module}/{number}", statement)
        if module.partition(".")[0] != ROOM:
            for name, statements in source.bound.items():
                if any(self._registers(source, statement) for statement in statements):
                    self._name(module, name)
        if FILES in source.bound and module.partition(".")[0] != ROOM:
            for path in dict.fromkeys(_declared(source)):
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

    def _statement(self, source: syntax.Module, place: str, statement: ast.stmt) -> None:
        if place in self.found:
            return
        self.found[place] = syntax.canonical(statement)
        local, own = source.within[statement], source.name.partition(".")[0] != ROOM
        for root, attributes in syntax.used(statement):
            imported = source.imports.get(root, [])
            if own and (HIDDEN & {*attributes} or (imported == ["sys"] and attributes[:1] == ["modules"])):
                self._everything(source)
            if imported:
                self._targets(f"{place}:{root}", local.get(root, ()), attributes)
                if imported != local.get(root):
                    self._targets(f"{source.name}.{root}", imported, attributes)
                if root in source.bound:
                    self._name(source.name, root)
            elif root in UNREAD and root not in source.bound:
                if own:
                    self._whole(source.name)
            else:
                self._name(source.name, root)
        for name, targets in local.items():
            for target in targets:
                if name.endswith("()") and self._follows(target):  # import_module("helper")
                    self._whole(target)
        for target in _loaded(statement, source) if own else ():
            if self._follows(target):
                self._whole(target)

    def _everything(self, source: syntax.Module) -> None:
        """All of a module and of those that it imports: where code asks for modules by ways that name none."""
        self._whole(source.name)
        for target in dict.fromkeys(itertools.chain(*source.imports.values())):
            module = target if _is_module(target) else target.rpartition(".")[0]
            if module and self._follows(module):
                self._whole(module)

    def _registers(self, source: syntax.Module, statement: ast.stmt) -> bool:
        """Whether a definition does something where it stands: decorated by own code, a subclass that is told of."""
        if not isinstance(statement, syntax.DEFINITIONS):
            return False
        if any(self._is_own(source, root) for node in statement.decorator_list for root, _ in syntax.used(node)):
            return True
        if not isinstance(statement, ast.ClassDef):
            return False
        body = [
            node for node in statement.body if not isinstance(node, syntax.DEFINITIONS) and not syntax.is_idle(node)
        ]
        if any(isinstance(node, ast.Expr) or syntax.sets_elsewhere(node) for node in body):
            return True
        above = [*statement.bases, *(word.value for word in statement.keywords)]
        return any(self._tells(source, root) for node in above for root, _ in syntax.used(node))

    def _is_own(self, source: syntax.Module, root: str) -> bool:
        places = source.imports.get(root, ())
        own = (place for place in places if place.partition(".")[0] != ROOM)
        return root in source.bound or any(
            self._follows(place if _is_module(place) else place.rpartition(".")[0]) for place in own
        )

    def _tells(self, source: syntax.Module, name: str, depth: int = 8) -> bool:
        """Whether a class of one's own is told of its subclasses, by `__init_subclass__` or a metaclass."""
        for statement in source.bound.get(name, ()) if depth else ():
            if not isinstance(statement, ast.ClassDef):
                continue
            if any(getattr(node, "name", "") in {"__init_subclass__", "__new__"} for node in statement.body):
                return True
            if any(word.arg == "metaclass" for word in statement.keywords):
                return True
            roots = (root for node in statement.bases for root, _ in syntax.used(node))
            if any(self._tells(source, root, depth - 1) for root in roots):
                return True
        for target in source.imports.get(name, ()) if depth else ():
            module, _, inner = target.rpartition(".")
            followed = module and module.partition(".")[0] != ROOM and not _is_module(target) and self._follows(module)
            if followed and self._tells(_parsed(module), inner, depth - 1):
                return True
        return False

    def _targets(self, place: str, targets: Iterable[str], attributes: list[str]) -> None:
        """All that an imported name may stand for."""
        for number, target in enumerate(targets):
            self._target(f"{place}/{number}" if number else place, target, attributes)

    def _target(self, place: str, target: str, attributes: list[str]) -> None:
        """What an imported name stands for; the name of what is not followed is all that the digest holds of it."""
        self.found[place] = f"= {target}"
        if (target, *attributes) in self._led:  # also where a package imports what it does not have
            return
        self._led.add((target, *attributes))
        module, _, name = target.rpartition(".")
        if _is_module(target) and self._follows(target):
            self._attribute(target, attributes)
            if module and self._follows(module):  # a package may bind that name to something else
                above = _parsed(module)
                if name in above.bound or name in above.imports or above.stars:
                    self._name(module, name)
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

    def order(self) -> None:
        """Of own modules where it counts what comes first: that something acts, or that a name is bound twice."""
        for module in {module for module, name in self._seen if not name and module.partition(".")[0] != ROOM}:
            source = _parsed(module)
            several = (len(source.bound.get(name, ())) + (name in source.imports) > 1 for name in source.bound)
            if not (source.acting or len(source.stars) > 1 or any(several)):
                continue
            reached = []
            for statement in source.within:
                names = [name for name, statements in source.bound.items() if statement in statements]
                mine = any((module, name) in self._seen for name in names) or statement in source.acting
                imported = [target for _, target in syntax.imports(statement, source.package)]
                own = any(self._follows(place) for target in imported for place in (target, target.rpartition(".")[0]))
                is_import = isinstance(statement, (ast.Import, ast.ImportFrom))
                if (is_import and own) or (mine and not syntax.waits(statement)):
                    reached.append(syntax.canonical(statement))
            if len(reached) > 1:
                self.found[f"{module}#"] = "\n".join(reached)

    def _attribute(self, module: str, attributes: list[str]) -> None:
        """``module.a.b``: what the module binds to ``a``, or its submodule ``a``; all of it where there is neither."""
        if not attributes:
            self._whole(module)
            return
        source, (first, *others) = _parsed(module), attributes
        if first in source.bound or first in source.imports or source.stars:
            if first in source.imports and first not in source.bound:
                self._module(module)
                self._targets(f"{module}.{first}", source.imports[first], others)
            else:
                self.name(module, first)
            if first not in source.bound and _is_module(f"{module}.{first}") and self._follows(f"{module}.{first}"):
                self._attribute(f"{module}.{first}", others)  # what stands behind a star is known to none
        elif _is_module(f"{module}.{first}"):
            self._module(module)
            if self._follows(f"{module}.{first}"):
                self._attribute(f"{module}.{first}", others)
        else:
            self._whole(module)


def _loaded(statement: ast.stmt, source: syntax.Module) -> Iterator[str]:
    """Modules that are imported by ``import_module`` under another name."""
    others = {name for name, targets in source.imports.items() if "importlib.import_module" in targets}
    for node in syntax.within(statement) if others - {"import_module"} else ():
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in others:
            for part in node.args[:1]:
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.value


def _declared(source: syntax.Module) -> Iterator[Path]:
    """The data files that an own module names in ``FILES``, to which nothing is added later: that is not executed."""
    for node in itertools.chain.from_iterable(map(syntax.within, source.acting)):
        if isinstance(node, ast.Attribute) and node.attr in GROWING and getattr(node.value, "id", None) == FILES:
            raise SettingsError(
                f"{source.name}.{FILES} can't be read, since line {node.lineno} adds to it; it should be one list of "
                "names, as ['prior.npy']."
            )
    for statement in source.bound[FILES]:
        yield from _named(source, statement)


def _named(source: syntax.Module, statement: ast.stmt) -> Iterator[Path]:
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
