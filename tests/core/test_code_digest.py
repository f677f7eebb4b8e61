"""Code digests: which edits change them, and equality in all Python versions."""

import ast
import importlib
import os
import py_compile
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fedpipe.core.components import code_digest, component, registry, syntax
from fedpipe.core.errors import SettingsError
from tests.small_studies import ROOT

CUSTOM_MODULE = '''
"""A custom module."""
import math
import helper
from helper import shrink as smaller
from pack import inner

UNUSED = 1
TABLE: dict[str, float] = {"mu": 0.5}


def pull(x):
    """Towards zero."""
    return smaller(x) * TABLE["mu"]  # half of it


class Base:
    rate = 0.1


class Method(Base):
    """A method."""

    scale: float = 1.0
    """Its scale."""

    def step(self, x):
        return pull(x) - self.rate * helper.CONSTANT + inner.deep() + math.tau


class Other:
    weight = 3
'''
HELPER = """
CONSTANT = 2
ASIDE = 5


def shrink(x):
    return x / 2


def stretch(x):
    return x * 2
"""
FILES = {
    "own.py": CUSTOM_MODULE,
    "helper.py": HELPER,
    "pack/__init__.py": "",
    "pack/inner.py": "from .leaf import value\n\n\ndef deep():\n    return value()\n",
    "pack/leaf.py": "def value():\n    return 7\n",
    "pack/apart.py": "def value():\n    return 8\n",
}


@pytest.fixture
def digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """Compute the digest of ``own.Method`` after edits (file, old, new) of custom modules."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    modules = ("own", "helper", "pack", "other")

    def forget_modules() -> None:
        for module in [name for name in sys.modules if name.partition(".")[0] in modules]:
            del sys.modules[module]

    def digest_edited(*edits: tuple[str, str, str]) -> str:
        for file, text in FILES.items():
            for edited, old, new in edits:
                if edited == file:
                    assert old in text
                    text = text.replace(old, new)
            (tmp_path / file).parent.mkdir(exist_ok=True)
            (tmp_path / file).write_text(text)
        for edited, _, new in edits:
            if edited not in FILES:
                (tmp_path / edited).write_text(new)
        forget_modules()
        shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)
        importlib.invalidate_caches()
        code_digest.compute_code_digest.cache_clear()
        return code_digest.compute_code_digest(importlib.import_module("own").Method).text

    yield digest_edited
    forget_modules()


@pytest.mark.parametrize(
    "edit",
    [
        ("own.py", "  # half of it", "  # a comment"),
        ("own.py", '"""A method."""', '"""Another docstring,\n\n    of several lines.\n    """'),
        ("own.py", '"""Towards zero."""', "pass"),
        ("own.py", '    """Its scale."""\n', ""),
        ("own.py", "smaller(x) * TABLE", "smaller( x )  *  TABLE"),
        ("own.py", '"mu": 0.5', "'mu': 5e-1"),
        ("own.py", "UNUSED = 1", "UNUSED = 2"),
        ("own.py", "weight = 3", "weight = 4"),
        ("helper.py", "ASIDE = 5", "ASIDE = 6"),
        ("helper.py", "return x * 2", "return x * 3"),
        ("pack/apart.py", "8", "9"),
        ("other.py", "", "CONSTANT = 1\n"),
    ],
)
def test_code_digest_ignores_unused_code_and_formatting(digest: Callable[..., str], edit: tuple[str, str, str]) -> None:
    assert digest(edit) == digest()


def test_code_digest_depends_on_order_of_statements_except_plain_functions(digest: Callable[..., str]) -> None:
    digests = [
        digest(("own.py", definition, f"TABLE.update(mu=0.1)\n\n\n{definition}"))
        for definition in ("def pull(x):", "class Base:", "class Other:")
    ]
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize(
    "edit",
    [
        ("own.py", "- self.rate", "+ self.rate"),
        ("own.py", "rate = 0.1", "rate = 0.2"),
        ("own.py", "scale: float = 1.0", "scale: float = 2.0"),
        ("own.py", '"mu": 0.5', '"mu": 0.25'),
        ("own.py", "* TABLE", "* 100 * TABLE"),
        ("own.py", "math.tau", "math.pi"),
        ("own.py", "import shrink as smaller", "import stretch as smaller"),
        ("own.py", "import math", "import cmath as math"),
        ("own.py", "class Method(Base)", "class Method(Base, dict)"),
        ("own.py", "class Other:", "TABLE.update(mu=0.1)\n\n\nclass Other:"),
        ("helper.py", "CONSTANT = 2", "CONSTANT = 3"),
        ("helper.py", "return x / 2", "return x / 3"),
        ("helper.py", "ASIDE = 5", "globals()['CONSTANT'] = 5"),
        ("pack/leaf.py", "7", "8"),
        ("pack/inner.py", ".leaf", ".apart"),
        ("pack/__init__.py", "", "import math\nmath.floor(1)\n"),
    ],
)
def test_code_digest_changes_with_used_code(digest: Callable[..., str], edit: tuple[str, str, str]) -> None:
    assert digest(edit) != digest()


@pytest.mark.parametrize(
    "use",
    [
        "getattr(helper, 'CONS' + 'TANT')",
        "__import__('helper').CONSTANT",
        "vars(helper)['CONSTANT']",
        "importlib.import_module('helper').CONSTANT",
    ],
)
def test_code_digest_covers_whole_module_after_dynamic_access(digest: Callable[..., str], use: str) -> None:
    reads = ("own.py", "helper.CONSTANT", use)
    imports = ("own.py", "import math\n", "import importlib\nimport math\n")
    assert digest(reads, imports, ("helper.py", "ASIDE = 5", "ASIDE = 6")) != digest(reads, imports)


def test_code_digest_follows_local_and_star_imports(digest: Callable[..., str]) -> None:
    inside = (
        "own.py",
        "        return pull(x)",
        "        from pack.apart import value\n        return value() + pull(x)",
    )
    assert digest(inside, ("pack/apart.py", "8", "9")) != digest(inside)
    star = ("own.py", "from helper import shrink as smaller", "from helper import *\nsmaller = shrink")
    assert digest(star, ("helper.py", "x / 2", "x / 3")) != digest(star)
    assert digest(star, ("helper.py", "x * 2", "x * 3")) == digest(star)


def test_code_digest_follows_dotted_names(digest: Callable[..., str]) -> None:
    dotted = ("own.py", "from pack import inner", "import pack.inner\nimport pack.apart")
    reads = ("own.py", "inner.deep()", "pack.inner.deep()")
    assert digest(dotted, reads, ("pack/leaf.py", "7", "6")) != digest(dotted, reads)
    assert digest(dotted, reads, ("pack/apart.py", "return 8", "return 9")) == digest(dotted, reads)


def test_code_digest_covers_all_bindings_of_name(digest: Callable[..., str]) -> None:
    either = "try:\n    import cupy\n    CONSTANT = 2\nexcept ImportError:\n    CONSTANT = 4\n"
    twice = ("helper.py", "CONSTANT = 2\n", either)
    assert digest(twice, ("helper.py", "CONSTANT = 4", "CONSTANT = 5")) != digest(twice)


def test_code_digest_covers_declared_data_files(digest: Callable[..., str], tmp_path: Path) -> None:
    declares = ("helper.py", "ASIDE = 5", "FILES = ['prior.bin']")
    (tmp_path / "prior.bin").write_bytes(b"1")
    first_digest = digest(declares)
    assert first_digest != digest()
    (tmp_path / "prior.bin").write_bytes(b"2")
    assert digest(declares) != first_digest
    assert code_digest.compute_code_digest(importlib.import_module("own").Method).files.keys() >= {
        Path("prior.bin"),
        tmp_path / "helper.py",
    }
    (tmp_path / "prior.bin").unlink()
    with pytest.raises(SettingsError, match=r"^helper\.FILES: prior\.bin is missing"):
        digest(declares)
    with pytest.raises(SettingsError, match=r"^helper\.FILES can't be read\. .*list"):
        digest(("helper.py", "ASIDE = 5", "FILES = sorted({'prior.bin'})"))
    (tmp_path / "prior.bin").write_bytes(b"1")
    with pytest.raises(SettingsError, match=r"^helper\.FILES can't be read, .*line \d+ adds"):
        digest(("helper.py", "ASIDE = 5", "FILES = ['prior.bin']\nfor name in ('a', 'b'):\n    FILES.append(name)"))


def test_code_digest_rejects_class_without_source() -> None:
    scope: dict[str, type] = {}
    exec("class Custom: pass", {"__name__": "nowhere"}, scope)
    with pytest.raises(SettingsError, match=r"^'nowhere\.Custom' has no readable source"):
        code_digest.compute_code_digest(scope["Custom"])


def test_code_digest_follows_components_but_not_shared_code() -> None:
    expected_files = {
        "fedbabu": {"fedbabu.py", "partial_sharing.py"},
        "feddw": {"feddw.py", "soft_labels.py", "class_means.py"},
        "cnn4": {"cnn4.py", "blocks.py"},
    }
    for name, files in expected_files.items():
        kind = component.MODEL if name == "cnn4" else component.ALGORITHM
        digest = code_digest.compute_code_digest(registry.find_component(kind, name))
        assert {path.name for path in digest.files} == files


@pytest.mark.parametrize(
    "statement", ["import fedpipe.algorithms as methods", "from fedpipe import algorithms as methods"]
)
def test_code_digest_follows_package_of_components(statement: str, own_module: Path) -> None:
    own_module.write_text(
        f"{statement}\n\n\nclass Method:\n    def step(self):\n        return methods.scaffold.Scaffold\n"
    )
    digest = code_digest.compute_code_digest(importlib.import_module("own").Method)
    assert {path.name for path in digest.files} == {"own.py", "scaffold.py", "fedavg.py"}


def test_code_digest_of_method_with_dw_covers_dw_module() -> None:
    algorithms = (registry.build_component(component.ALGORITHM, "fedavg", dw) for dw in ({}, {"dw": {}}))
    plain, regularized = (
        code_digest.compute_code_digest(*algorithm.list_hashed_code()).files for algorithm in algorithms
    )
    assert {path.name for path in regularized} - {path.name for path in plain} == {
        *("__init__.py", "dw.py", "feddw.py", "soft_labels.py", "class_means.py")
    }


# -- shared code -------------------------------------------------------------------------------------------------------

#: Edits a copy of fedpipe and prints the digest of the shared code before and after each edit.
EDITING = """
import sys
from pathlib import Path
from fedpipe.core.components import code_digest
print(code_digest.compute_shared_digest_and_files().text)
for file, old, new in zip(*[iter(sys.argv[1:])] * 3):
    path = Path(file)
    text = path.read_text()
    assert text.count(old) == 1, file
    path.write_text(text.replace(old, new))
    print(code_digest.compute_shared_digest_and_files().text)
    path.write_text(text)
"""
#: Edits of the engine, its random streams, partition schemes and modules that it imports inside a function.
NUMBER_EDITS = (
    ("fedpipe/engine/clients/optimizers.py", "alpha=-self.learning_rate", "alpha=-2 * self.learning_rate"),
    ("fedpipe/engine/checkpoint.py", "last = [round_number if client", "last = [-1 if client"),
    ("fedpipe/engine/blocks.py", "def convert_tree_to_state(", "def convert_tree_to_state(_=None, *, "),
    ("fedpipe/core/noise.py", "CHUNK = 2**14", "CHUNK = 2**13"),
    ("fedpipe/data/partitions/base.py", "np.searchsorted(boundaries, np.arange(count)", "np.sort(np.arange(count)"),
)
#: Edits of texts, tables, plans and the command line.
OTHER_EDITS = (
    ("fedpipe/report/words.py", "METRICS: dict", "OTHER_METRICS: dict"),
    ("fedpipe/report/tables.py", "import annotations\n", "import annotations\nprint(1)\n"),
    ("fedpipe/planning/plan.py", "class Plan:", "class Plan(dict):"),
    ("fedpipe/planning/combined.py", "sorted(RESULTS.glob", "list(RESULTS.glob"),
    ("fedpipe/papers/pages.py", "import annotations\n", "import annotations\nprint(1)\n"),
    ("fedpipe/analysis/load.py", "class Results:", "class Results(dict):"),
    ("fedpipe/cli/app.py", "import annotations\n", "import annotations\nprint(1)\n"),
    ("fedpipe/__init__.py", 'import_module("fedpipe.analysis.load")', 'import_module("fedpipe.analysis.load2")'),
)


def test_shared_code_digest_changes_only_with_numeric_code(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "fedpipe", tmp_path / "fedpipe", ignore=shutil.ignore_patterns("__pycache__"))
    edits = [part for edit in (*NUMBER_EDITS, *OTHER_EDITS) for part in edit]
    command = [sys.executable, "-B", "-c", EDITING, *edits]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    process = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    current, *edited = process.stdout.split()
    assert current == code_digest.compute_shared_code_digest()
    assert len({current, *edited[: len(NUMBER_EDITS)]}) == 1 + len(NUMBER_EDITS)
    assert edited[len(NUMBER_EDITS) :] == [current] * len(OTHER_EDITS)


PRINT_SHARED_DIGEST = (
    "from fedpipe.core.components import code_digest\nprint(code_digest.compute_shared_code_digest(), end='')"
)


def copy_package(folder: Path) -> dict[str, str]:
    """Copy fedpipe without bytecode. Return an environment in which Python imports the copy and writes bytecode."""
    shutil.copytree(ROOT / "fedpipe", folder / "fedpipe", ignore=shutil.ignore_patterns("__pycache__"))
    removed_names = ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX")
    environment = {name: value for name, value in os.environ.items() if name not in removed_names}
    return environment | {"PYTHONPATH": str(folder)}


def run_script(
    folder: Path, environment: dict[str, str], *options: str, script: str = PRINT_SHARED_DIGEST
) -> subprocess.CompletedProcess[str]:
    """Run a script that prints the digest of a copy's shared code."""
    command = [sys.executable, *options, "-c", script]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_stored_digest_of_shared_code_is_used_until_a_file_changes(tmp_path: Path) -> None:
    """The file is in ``__pycache__``. Without bytecode, nothing is written."""
    environment = copy_package(tmp_path)

    def compute_digest(*options: str) -> str:
        return run_script(tmp_path, environment, *options).stdout

    digest = compute_digest("-B")
    assert digest == code_digest.compute_shared_code_digest()
    assert not [*tmp_path.rglob("__pycache__")]
    assert compute_digest() == digest
    (stored,) = tmp_path.rglob("__pycache__/*.txt")
    package, _ = stored.read_text().split()
    stored.write_text(f"{package} 123456789abc\n")
    assert compute_digest() == "123456789abc", "the digest is read from the file"
    for damaged in ("", package, f"{package[1:]} 123456789abc"):
        stored.write_text(damaged)
        assert compute_digest() == digest
    assert stored.read_text() == f"{package} {digest}\n", "a damaged file is written again"
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked/fedpipe").symlink_to(tmp_path / "fedpipe")
    environment["PYTHONPATH"] = str(tmp_path / "linked")
    assert compute_digest() == digest
    assert [*tmp_path.rglob("__pycache__/*.txt")] == [stored]
    environment["PYTHONPATH"] = str(tmp_path)
    file, old, new = NUMBER_EDITS[0]
    (tmp_path / file).write_text((tmp_path / file).read_text().replace(old, new))
    edited_digest = compute_digest()
    assert edited_digest != digest
    assert compute_digest("-B") == edited_digest
    (tmp_path / "fedpipe/engine/added.py").write_text("")
    assert compute_digest() == edited_digest
    assert stored.read_text().split()[0] != package


@pytest.mark.slow
def test_stored_digest_rejects_stale_bytecode_and_needs_no_folder(tmp_path: Path) -> None:
    """You revert an edit of a component. Its bytecode is still that of the edit, because no process imports it."""
    environment = copy_package(tmp_path)

    def compute_digest() -> tuple[str, str]:
        process = run_script(tmp_path, environment)
        return process.stdout, process.stderr

    digest = code_digest.compute_shared_code_digest()
    assert compute_digest() == (digest, "")
    (stored,) = tmp_path.rglob("__pycache__/*.txt")
    source = tmp_path / "fedpipe/algorithms/fedala.py"
    text, times = source.read_text(), (source.stat().st_atime_ns, source.stat().st_mtime_ns)
    source.write_text(text.replace("class FedALA", "class FedALB"))
    os.utime(source, ns=times)
    bytecode = py_compile.compile(str(source), doraise=True)
    source.write_text(text)
    os.utime(source, ns=times)
    output, errors = compute_digest()
    assert (output, bytecode in errors) == ("", True), errors
    Path(bytecode).unlink()
    shutil.rmtree(stored.parent)
    stored.parent.write_text("this is no folder")
    assert compute_digest() == (digest, "")


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["before", "during"])
def test_digest_is_not_stored_if_files_change_after_import(tmp_path: Path, moment: str) -> None:
    """A process that has imported or parsed other code computes a digest only for itself."""
    environment = copy_package(tmp_path)
    file, old, new = NUMBER_EDITS[0]
    script = f"""
from pathlib import Path
from fedpipe.core.components import code_digest
path = Path({file!r})
text = path.read_text()
walk = code_digest.compute_shared_digest_and_files
def edit_during_walk():
    path.write_text(text.replace({old!r}, {new!r}))
    digest = walk()
    path.write_text(text)
    return digest
if {moment!r} == "before":
    path.write_text(text.replace({old!r}, {new!r}))
else:
    code_digest.compute_shared_digest_and_files = edit_during_walk
print(code_digest.compute_shared_code_digest())
"""
    process = run_script(tmp_path, environment, script=script)
    assert process.returncode == 0, process.stderr
    assert process.stdout.strip() != code_digest.compute_shared_code_digest()
    assert [*tmp_path.rglob("__pycache__/*.pyc")]
    assert not [*tmp_path.rglob("__pycache__/*.txt")]


def test_shared_code_covers_modules_that_jobs_import() -> None:
    """Only modules of the engine that do not train are missing."""
    paths = code_digest.compute_shared_digest_and_files().files
    modules, engine = (
        {path.relative_to(ROOT / "fedpipe").with_suffix("").as_posix() for path in files}
        for files in (paths, ROOT.glob("fedpipe/engine/**/*.py"))
    )
    others = {name for name in engine - modules if not name.startswith("engine/diagnostics/")}
    assert others == {"engine/collect", "engine/interrupts"}
    packages = {name.partition("/")[0] for name in modules}
    assert packages == {"__init__", "algorithms", "core", "data", "engine", "models", "planning", "settings"}


# -- Python versions ---------------------------------------------------------------------------------------------------

SAMPLE = r'''
"""Code that Python versions parse differently, or may."""
from __future__ import annotations
import dataclasses as dc, os.path
type_ = "é" "\N{BULLET}"
def f(a, /, b: int = 1, *rest, c=None, **more) -> str:
    x = f"{a!r:>{b}} {{literal}} {b:.2f}{c=}" "tail" f"" f"{'nested'}\n" rf"\d{a}"
    match a:
        case {"k": [1, *_], **others} if (n := len(others)) > 1:
            return x
        case str() | None:
            pass
    return [*rest, 1_000, 0x10, 1e-3, 2j, ..., b"\x00", True, -0.0, 10**2, "\udcff"][b:, ::2] and {**more, "z": c}
@dc.dataclass
class C(object, metaclass=type):
    """Doc."""
    y: list[int] = dc.field(default_factory=list)
    async def g(self):
        async with self as s, s:
            await s
        try:
            yield s
        except* (OSError, ValueError) as e:
            raise e from None
        else:
            global Z
            Z = not s is not None
'''
GOLDEN = "560745e45e1f"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")


def find_pythons() -> dict[str, str]:
    """Find the interpreters of this machine that fedpipe supports, by version."""
    paths = [shutil.which(f"python{version}") for version in PYTHONS]
    paths += map(str, Path(os.environ.get("PYENV_ROOT", "/nowhere")).glob("versions/3.1[1234].*/bin/python"))
    pythons = {f"{sys.version_info[0]}.{sys.version_info[1]}": sys.executable}
    for path in filter(None, paths):
        command = [path, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        version = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        if version in PYTHONS:
            pythons.setdefault(version, path)
    return pythons


@pytest.mark.slow
@pytest.mark.parametrize("version", PYTHONS)
def test_code_digest_is_equal_in_all_python_versions(tmp_path: Path, version: str) -> None:
    """The digests are those of a sample of the grammar and of fedpipe's shared code."""
    if version not in find_pythons():
        pytest.skip(f"no Python {version} here")
    (tmp_path / "sample.py").write_text(SAMPLE, encoding="utf-8")
    script = (
        "import sys; sys.path[:0] = sys.argv[1:3]\n"
        "from fedpipe.core.components import code_digest as code\n"
        "parts = [type(name, (), {'__module__': 'sample'}) for name in ('C', 'f')]\n"
        "print(code.compute_code_digest(*parts).text, code.compute_shared_digest_and_files().text)"
    )
    command = [find_pythons()[version], "-c", script, str(ROOT), str(tmp_path)]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    assert process.stdout.split() == [GOLDEN, code_digest.compute_shared_code_digest()]


def test_canonical_text_changes_with_every_syntax_field() -> None:
    """A change of a name, number or operator changes the text. Docstrings are ignored."""
    tree = ast.parse(SAMPLE)
    text = syntax.convert_node_to_canonical_text(tree)
    count = 0
    for node in ast.walk(tree):
        for name, value in ast.iter_fields(node):
            is_ignored = isinstance(node, ast.Expr) or (isinstance(node, ast.Constant) and name == "kind")
            if isinstance(value, (str, int)) and not isinstance(value, bool) and not is_ignored:
                setattr(node, name, value + "x" if isinstance(value, str) else value + 1)
                is_changed = syntax.convert_node_to_canonical_text(tree) != text
                setattr(node, name, value)
                count += 1
                is_docstring = isinstance(node, ast.Constant) and node.value in {
                    "Doc.",
                    "Code that Python versions parse differently, or may.",
                }
                assert is_changed != is_docstring, ast.dump(node)
    assert count > 80


def test_component_path_needs_defining_module_or_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs import only the module that defines the class, so changes by other modules would have no effect."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "module_of_mine.py").write_text(
        "from fedpipe.algorithms.fedavg import FedAvg\n\n\nclass Mine(FedAvg):\n    factor = 1.0\n"
    )
    (tmp_path / "patched.py").write_text("from module_of_mine import Mine\n\nMine.factor = 0.0\n")
    with pytest.raises(SettingsError, match=r"^algorithms: 'patched\.Mine' is defined .*'module_of_mine\.Mine'"):
        registry.find_component(component.ALGORITHM, "patched.Mine")
    (tmp_path / "laboratory").mkdir()
    (tmp_path / "laboratory/__init__.py").write_text("from laboratory.inner import Mine\n")
    (tmp_path / "laboratory/inner.py").write_text((tmp_path / "module_of_mine.py").read_text())
    assert registry.find_component(component.ALGORITHM, "laboratory.Mine").__module__ == "laboratory.inner", (
        "Python imports the package with its module"
    )
