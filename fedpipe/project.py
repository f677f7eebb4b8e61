"""A project outside of a clone: the files that every study needs, laid out in a folder, and brought up to date there.

They stand in the root of the clone, and nowhere else in git; `setup.py` takes them into the wheel.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path

#: What is laid out: files, and folders with all that is in them.
FILES = (
    "Snakefile",
    "workflow",
    "profiles",
    "dvc.yaml",
    ".dvc/config",
    ".dvc/.gitignore",
    ".dvc/plots",
    ".dvcignore",
    ".gitignore",
    "results/.gitignore",
    "params.schema.json",
    "params.yaml",
)
OWN = ("params.yaml", ".gitignore", ".dvc/config", "own.py")  #: what is the user's from then on, and never updated
LINKS = {"slurm": "workflow/profiles/slurm"}  #: so that `--profile slurm` is short
BUNDLED = "bundled"  #: the folder of the package in which an installed wheel has them
RECORD = Path("workflow/laid_out.json")  #: what was laid out: the version, and the SHA-256 of each file


def listed(root: Path) -> list[str]:
    """The files to lay out that lie under a root, by their paths there."""
    found = []
    for name in FILES:
        place = root / name
        paths = sorted(place.rglob("*")) if place.is_dir() else [place]
        found += [str(path.relative_to(root)) for path in paths if path.is_file() and path != root / RECORD]
    return found


def contents() -> dict[str, bytes]:
    """What this version lays out, by path."""
    from fedpipe import __version__, templates

    package = Path(__file__).parent
    root = package / BUNDLED if (package / BUNDLED).is_dir() else package.parent
    found = {name: (root / name).read_bytes() for name in listed(root)}
    if root == package.parent:
        found["params.yaml"] = _committed(root / "params.yaml")
    environment = "workflow/envs/fedpipe.yaml"  # a clone installs itself there
    lines = found[environment].decode().splitlines()
    kept = [line for line in lines if "../.." not in line] + [f"      - fedpipe =={__version__}"]
    found[environment] = ("\n".join(kept) + "\n").encode()
    return found | {"own.py": Path(templates.__path__[0], "own.py").read_bytes()}


def _committed(path: Path) -> bytes:
    """A file of a clone as its last commit has it, since it may be edited there; as it lies there without git."""
    try:
        return subprocess.run(
            ["git", "show", f"HEAD:./{path.name}"], cwd=path.parent, capture_output=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return path.read_bytes()


def init(folder: Path) -> list[str]:
    """Lay out a project; gives what is there now.

    Raises
    ------
    SettingsError
        Something of it is there already; nothing is written.
    """
    from fedpipe import artifacts
    from fedpipe.errors import SettingsError

    new = contents()
    there = [name for name in (*new, *LINKS) if (folder / name).exists() or (folder / name).is_symlink()]
    if (folder / RECORD).exists():
        raise SettingsError(f"{folder} is a project already; `fedpipe init {folder} --update` brings it up to date.")
    if there:
        raise SettingsError(f"{folder / there[0]} is there already, and nothing is overwritten; name another folder.")
    for name, data in new.items():
        artifacts.write_bytes(folder / name, data)
    for name, target in LINKS.items():
        (folder / name).symlink_to(target)
    _record(folder, {name: artifacts.sha256_of(folder / name) for name in new if name not in OWN})
    return [*new, *LINKS]


def update(folder: Path) -> tuple[list[str], list[str]]:
    """Bring a project's files to this version, but those that are the user's; gives what changed, and what was kept.

    What was edited since it was laid out stays as it is, if this version has another text for it.

    Raises
    ------
    SettingsError
        The folder is no project that was laid out.
    """
    from fedpipe import artifacts

    recorded, new = _recorded(folder), _updated()
    changed, kept = [], []
    for name, data in new.items():
        path, wanted = folder / name, _sha256(data)
        here = artifacts.sha256_of(path) if path.is_file() else None
        if here in (recorded.get(name), None) and here != wanted:
            artifacts.write_bytes(path, data)
            changed.append(name)
        elif here != wanted != recorded.get(name):  # edited, and new: told once
            kept.append(name)
    for name in recorded.keys() - new.keys():  # this version does without it
        path = folder / name
        if path.is_file() and artifacts.sha256_of(path) == recorded[name]:
            path.unlink()
            changed.append(name)
    _record(folder, {name: _sha256(data) for name, data in new.items()})
    return changed, kept


def outdated(folder: Path) -> str | None:
    """One sentence where a project was laid out by a version that has other files; None elsewhere, as in a clone."""
    from fedpipe import __version__

    if not (folder / RECORD).is_file():
        return None
    recorded = _recorded(folder)
    if {name: _sha256(data) for name, data in _updated().items()} == recorded:
        return None
    version = json.loads((folder / RECORD).read_text()).get("version")
    return (
        f"the workflow's files here are those of fedpipe {version}, and {__version__} is installed, which has others; "
        "`fedpipe init . --update` brings them, but for what you edited."
    )


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _updated() -> dict[str, bytes]:
    return {name: data for name, data in contents().items() if name not in OWN}


def _recorded(folder: Path) -> dict[str, str]:
    from fedpipe.errors import SettingsError

    try:
        found: dict[str, str] = json.loads((folder / RECORD).read_text())["sha256"]
    except FileNotFoundError:
        raise SettingsError(f"{folder} is no project that `fedpipe init` laid out; there is no {RECORD}.") from None
    except (ValueError, LookupError, TypeError):
        raise SettingsError(
            f"{folder / RECORD} is damaged; lay a project out anew, and copy your files there."
        ) from None
    return found


def _record(folder: Path, sha256: dict[str, str]) -> None:
    from fedpipe import __version__, artifacts

    artifacts.write_json(folder / RECORD, {"version": __version__, "sha256": sha256})
