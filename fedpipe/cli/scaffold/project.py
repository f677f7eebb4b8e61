"""Creates and updates projects outside a clone.

A project has copies of the files that every study needs. In git these files are only in the root of the clone.
`setup.py` copies them into the wheel.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path

#: Files and folders of a project.
PROJECT_FILES = (
    *("Snakefile", "workflow", "profiles", "dvc.yaml", ".dvc/config", ".dvc/.gitignore", ".dvc/plots", ".dvcignore"),
    *(".gitignore", "results/.gitignore", "params.schema.json", "params.yaml"),
)
#: Files that belong to the user and are never updated.
USER_FILES = ("params.yaml", ".gitignore", ".dvc/config", "own.py")
PROFILE_LINKS = {"slurm": "workflow/profiles/slurm"}  #: links for short profile names, `--profile slurm`
BUNDLE_FOLDER = "bundled"  #: folder with these files in an installed wheel
RECORD_PATH = Path("workflow/laid_out.json")  #: version, and the SHA-256 of each created file


def list_project_files(root: Path) -> list[str]:
    """Files of a project below a root, by relative path."""
    file_names = []
    for name in PROJECT_FILES:
        path_in_root = root / name
        paths = sorted(path_in_root.rglob("*")) if path_in_root.is_dir() else [path_in_root]
        file_names += [str(path.relative_to(root)) for path in paths if path.is_file() and path != root / RECORD_PATH]
    return file_names


def read_project_files() -> dict[str, bytes]:
    """Content of this version's project files, by path."""
    import fedpipe
    from fedpipe.cli.scaffold import templates

    package = Path(fedpipe.__file__).parent
    root = package / BUNDLE_FOLDER if (package / BUNDLE_FOLDER).is_dir() else package.parent
    files = {name: (root / name).read_bytes() for name in list_project_files(root)}
    environment = "workflow/envs/fedpipe.yaml"  # which installs fedpipe from the clone
    lines = files[environment].decode().splitlines()
    kept_lines = [line for line in lines if "../.." not in line] + [f"      - fedpipe =={fedpipe.__version__}"]
    files[environment] = ("\n".join(kept_lines) + "\n").encode()
    return files | {"own.py": Path(templates.__path__[0], "own.py").read_bytes()}


def create_project(folder: Path) -> list[str]:
    """Create a project. An existing params.yaml and own.py are kept. Return the names of the kept files.

    Nothing is written if another file exists already.
    """
    from fedpipe.core.errors import SettingsError
    from fedpipe.core.storage.files import write_bytes
    from fedpipe.workflow.selection import require_importable_folder

    require_importable_folder(folder.absolute())
    new_files = read_project_files()
    kept_files = [name for name in ("params.yaml", "own.py") if (folder / name).is_file()]
    new_files = {name: data for name, data in new_files.items() if name not in kept_files}
    existing_files = [name for name in (*new_files, *PROFILE_LINKS) if os.path.lexists(folder / name)]
    if (folder / RECORD_PATH).exists():
        raise SettingsError(f"{folder} is already a project. Type `fedpipe init {folder} --update` to update it.")
    if existing_files:
        raise SettingsError(f"{folder / existing_files[0]} already exists. Use another folder.")
    for name, data in new_files.items():
        write_bytes(folder / name, data)
    _restore_profile_links(folder)
    _write_recorded_hashes(folder, _hash_updatable_files(new_files))
    return kept_files


def update_project(folder: Path) -> tuple[list[str], list[str]]:
    """Update a project's files to this version, except the user's. Return the changed files and the edited ones.

    A file that you have edited is not updated.

    Raises a SettingsError if the folder is not a project.
    """
    from fedpipe.core.storage.files import compute_file_sha256, write_bytes

    recorded_hashes, new_files = _read_recorded_hashes(folder), read_project_files()
    new_hashes = _hash_updatable_files(new_files)
    changed_files, edited_files = [], []
    for name, new_sha256 in new_hashes.items():
        path = folder / name
        current_sha256 = compute_file_sha256(path) if path.is_file() else None
        if current_sha256 in (recorded_hashes.get(name), None) and current_sha256 != new_sha256:
            write_bytes(path, new_files[name])
            changed_files.append(name)
        elif current_sha256 != new_sha256 != recorded_hashes.get(name):  # edited, and this version has a new text
            edited_files.append(name)
    for name in recorded_hashes.keys() - new_hashes.keys():  # removed in this version
        path = folder / name
        is_unedited = path.is_file() and compute_file_sha256(path) == recorded_hashes[name]
        if is_unedited and path.resolve().is_relative_to(folder.resolve()):  # the record may come from others
            path.unlink()
            changed_files.append(name)
    config = folder / ".dvc/config"
    if ".dvc/plots/page.html" in changed_files and config.is_file():  # of 0.2.0. Now DVC's own page is used
        text = config.read_text()
        write_bytes(config, re.sub(r"\n\s*html_template = plots/page.html", "", text).encode())
        changed_files.append(".dvc/config")
    changed_files += _restore_profile_links(folder)
    _write_recorded_hashes(folder, new_hashes)
    return changed_files, edited_files


def _restore_profile_links(folder: Path) -> list[str]:
    """Create the missing links, which for example a copy by zip loses. Return their names."""
    missing_links = [name for name in PROFILE_LINKS if not os.path.lexists(folder / name)]
    for name in missing_links:
        (folder / name).symlink_to(PROFILE_LINKS[name])
    return missing_links


def get_outdated_warning(folder: Path) -> str | None:
    """Warning if another version with other files created the project. None otherwise, and in a clone."""
    from fedpipe import __version__

    if not (folder / RECORD_PATH).is_file():
        return None
    if _hash_updatable_files(read_project_files()) == _read_recorded_hashes(folder):
        return None
    version = json.loads((folder / RECORD_PATH).read_text()).get("version")
    difference = (
        f"are from fedpipe {version}, but {__version__} is installed"
        if version != __version__
        else f"are from another commit of fedpipe {version}"
    )
    return (
        f"the workflow files of this project {difference}. Type `fedpipe init . --update` to update them, except those "
        "that you edited."
    )


def _hash_updatable_files(files: dict[str, bytes]) -> dict[str, str]:
    return {name: hashlib.sha256(data).hexdigest() for name, data in files.items() if name not in USER_FILES}


def _read_recorded_hashes(folder: Path) -> dict[str, str]:
    from fedpipe.core.errors import SettingsError

    try:
        # A TypeError if it is not a mapping.
        recorded_hashes: dict[str, str] = {**json.loads((folder / RECORD_PATH).read_text())["sha256"]}
    except FileNotFoundError:
        raise SettingsError(
            f"{folder} is not a project: {RECORD_PATH} is missing. Create a project with `fedpipe init`."
        ) from None
    except (ValueError, LookupError, TypeError):
        raise SettingsError(
            f"{folder / RECORD_PATH} is damaged. Create a new project, and copy your files into it."
        ) from None
    return recorded_hashes


def _write_recorded_hashes(folder: Path, sha256: dict[str, str]) -> None:
    from fedpipe import __version__
    from fedpipe.core.storage.files import write_json

    write_json(folder / RECORD_PATH, {"version": __version__, "sha256": sha256})
