"""Finds the source files of the modules that a component uses, without executing them."""

from __future__ import annotations

import ast
import functools
import importlib.util
import itertools
import marshal
import sys
import sysconfig
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType
from typing import Any

from fedpipe.core.components import syntax
from fedpipe.core.errors import SettingsError

PACKAGE = "fedpipe"
DATA_FILES_VARIABLE = "FILES"  #: variable of a user's module with its data files, relative to params.yaml
LIST_ADDERS = {"append", "extend", "insert"}  #: methods that add to a list
#: Packages of components, each with the modules of its interface, whose code is in no component's digest.
COMPONENT_PACKAGES = {
    "fedpipe.algorithms": ("base", "batch", "passes", "uploads"),
    "fedpipe.models": ("base", "layers"),
    "fedpipe.data.partitions": ("base",),
    "fedpipe.data.datasets": ("base",),
}
SITE_FOLDERS = {"site-packages", "dist-packages"}  #: folders of installed packages


# -- modules -----------------------------------------------------------------------------------------------------------


def reject_stale_bytecode(path: Path) -> None:
    """Reject bytecode of another source, which Python would execute because it compares only time and size."""
    bytecode_path = Path(importlib.util.cache_from_source(str(path)))
    try:
        cached_bytes, stat = bytecode_path.read_bytes(), path.stat()
    except OSError:
        return
    source_stamp = b"".join(
        (number & 0xFFFFFFFF).to_bytes(4, "little") for number in (int(stat.st_mtime), stat.st_size)
    )
    unchecked_flag = (1).to_bytes(4, "little")  # written by `compileall --invalidation-mode unchecked-hash`
    magic = importlib.util.MAGIC_NUMBER
    if cached_bytes[:16] != magic + bytes(4) + source_stamp and cached_bytes[:8] != magic + unchecked_flag:
        return
    try:
        cached_code = marshal.loads(cached_bytes[16:])
    except (EOFError, ValueError, TypeError):
        raise SettingsError(f"{bytecode_path} is damaged. Delete it.") from None
    if not _is_same_bytecode(cached_code, compile(path.read_bytes(), str(path), "exec", dont_inherit=True)):
        raise SettingsError(f"{bytecode_path} contains an earlier {path.name}, which Python would execute. Delete it.")


def _is_same_bytecode(one: Any, other: Any) -> bool:
    """Whether two code objects are equal, apart from column numbers (`PYTHONNODEBUGRANGES`)."""
    if type(one) is not type(other):
        return False
    if isinstance(one, CodeType):
        bare, others = (each.replace(co_consts=(), co_linetable=b"") for each in (one, other))
        return bare == others and _is_same_bytecode(one.co_consts, other.co_consts)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(_is_same_bytecode, one, other))
    if isinstance(one, frozenset):
        return sorted(map(repr, one)) == sorted(map(repr, other))
    return repr(one) == repr(other)  # also equal for NaN


def _find_module_spec(top: str) -> ModuleSpec | None:
    loaded_module = sys.modules.get(top)
    return getattr(loaded_module, "__spec__", None) or (None if loaded_module else importlib.util.find_spec(top))


@functools.cache
def find_source_file(module: str) -> Path | None:
    """File of a module, found without importing it. None for a folder without ``__init__.py``.

    Raises a `ModuleNotFoundError` if there is no such module, or if it is built into Python.
    """
    top, *parts = module.split(".")
    loaded_module, spec = sys.modules.get(top), _find_module_spec(top)
    origin = getattr(loaded_module, "__file__", None) or (spec.origin if spec else None)
    path = Path(origin).resolve() if origin and Path(origin).is_file() else None
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    if path is None and not folders:
        raise ModuleNotFoundError(module)
    for part in parts:
        if path is not None and path.stem == "__init__" and path.parent not in folders:
            folders.insert(0, path.parent)
        candidates = [folder / part for folder in folders]
        sources = (
            file for candidate in candidates for file in (candidate / "__init__.py", candidate.with_name(f"{part}.py"))
        )
        extension_files = (file for folder in folders for file in folder.glob(f"{part}.*.so"))
        path = next((file.resolve() for file in itertools.chain(sources, extension_files) if file.is_file()), None)
        folders = [candidate for candidate in candidates if candidate.is_dir()]
        if path is None and not folders:
            raise ModuleNotFoundError(module)
    return path


def parse_module(module: str) -> syntax.ParsedModule:
    """Parse a module. Cached until its file changes."""
    path = find_source_file(module)
    stat = path.stat() if path else None
    return _parse_module_cached(module, path, (stat.st_mtime_ns, stat.st_size, stat.st_ino) if stat else ())


@functools.cache
def _parse_module_cached(module: str, path: Path | None, file_stat: tuple[int, ...]) -> syntax.ParsedModule:
    try:
        parsed_module = syntax.ParsedModule(module, path, has_typing_imports=not is_shared_module(module))
    except (SyntaxError, ValueError, RecursionError) as error:
        raise SettingsError(
            f"{path} can't be read as Python ({error}). Fix it, because a component imports it."
        ) from None
    if path is not None and path.suffix == ".py" and is_hashed_module(module):
        reject_stale_bytecode(path)
    return parsed_module


@functools.cache
def is_first_party_module(name: str) -> bool:
    """Whether a module is of fedpipe or the user. Installed packages are not searched, because that may import them."""
    if is_external_package(name.partition(".")[0]):
        return False
    try:
        find_source_file(name)
    except ModuleNotFoundError:
        return False
    return True


#: Installed top-level packages that are followed because they contain a component.
followed_packages: set[str] = set()


@functools.cache
def is_external_package(top: str) -> bool:
    """Whether a top-level package belongs to Python or is installed."""
    if top == PACKAGE or (top in followed_packages and top not in sys.stdlib_module_names):
        return False
    try:
        path = find_source_file(top)
    except (ModuleNotFoundError, ValueError):
        return True
    if path is None:  # a folder without `__init__.py`, or built into Python
        folders = list(getattr(_find_module_spec(top), "submodule_search_locations", None) or ())
        is_installed = bool(folders) and all(SITE_FOLDERS & set(Path(folder).parts) for folder in folders)
        return top in sys.stdlib_module_names or is_installed
    if top in sys.stdlib_module_names and any(path.is_relative_to(folder) for folder in _find_stdlib_folders()):
        return True  # otherwise a user's module with the same name
    return bool(SITE_FOLDERS & set(path.parts))


@functools.cache
def _find_stdlib_folders() -> tuple[Path, ...]:
    """Folders of the standard library."""
    return tuple(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib"))


def is_user_module(module: str) -> bool:
    """Whether a module is outside fedpipe. A module of another library is one, too, but digests do not follow it."""
    return module.partition(".")[0] != PACKAGE


def is_hashed_module(module: str) -> bool:
    """Whether digests follow a module: a user's module, or one of fedpipe's that defines components."""
    if is_user_module(module):
        return is_first_party_module(module)
    return any(
        module.startswith(f"{package}.") and module.removeprefix(f"{package}.") not in interface
        for package, interface in COMPONENT_PACKAGES.items()
    )


def is_shared_module(module: str) -> bool:
    """Whether a module is part of the code that all runs share."""
    return not (is_user_module(module) or is_hashed_module(module))


def find_dynamic_imports(statement: ast.stmt, source: syntax.ParsedModule) -> Iterator[str]:
    """Modules imported by an alias of ``import_module``."""
    others = {name for name, targets in source.imports.items() if "importlib.import_module" in targets}
    for node in syntax.list_descendant_nodes(statement) if others - {"import_module"} else ():
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in others:
            for part in node.args[:1]:
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.value


def list_declared_data_files(module: syntax.ParsedModule) -> list[Path]:
    """List the data files in a user module's ``FILES``, which must be a literal list that no line changes."""
    variable = f"{module.name}.{DATA_FILES_VARIABLE}"
    for node in itertools.chain.from_iterable(map(syntax.list_descendant_nodes, module.effect_statements)):
        if not isinstance(node, ast.Attribute) or node.attr not in LIST_ADDERS:
            continue
        if getattr(node.value, "id", None) == DATA_FILES_VARIABLE:
            raise SettingsError(
                f"{variable} can't be read, because line {node.lineno} adds to it. Use one list of names, such as "
                "['prior.npy']."
            )
    names: list[str] = []
    for statement in module.bindings[DATA_FILES_VARIABLE]:
        try:
            value = ast.literal_eval(getattr(statement, "value", ast.Constant(None)))
        except (ValueError, TypeError):
            value = None
        if not isinstance(value, (list, tuple)) or not all(isinstance(name, str) for name in value):
            raise SettingsError(f"{variable} can't be read. Use a list of names, such as ['prior.npy'].")
        names += value
    for name in names:
        if not Path(name).is_file():
            raise SettingsError(f"{variable}: {name} is missing. Use a path from the project's root.")
    return [Path(name) for name in names]
