"""draw_functions.py draws all kinds of functions except dunder methods, and repeats the draw of a seed."""

import subprocess
import sys
from pathlib import Path

from tests.project import draw_functions
from tests.small_studies import ROOT

CODE = """
def add(a, /, b, *others, scale=1, **options): ...
class Mean:
    def __init__(self, axis): ...
    def update(self, value):
        def weigh(one): ...
    @classmethod
    async def from_table(cls, table) -> list[int]: ...
    @cached_property
    def weights(self) -> Floats: ...
if True:
    def subtract(): ...
"""


def test_draw_functions_covers_all_functions(tmp_path: Path) -> None:
    package = tmp_path / "package"
    (package / "room").mkdir(parents=True)
    (package / "room/sums.py").write_text(CODE)
    expected = {
        "package.room.sums  add(a, b, *others, scale, **options)",
        "package.room.sums  Mean.update(value)",
        "package.room.sums  Mean.update.weigh(one)",
        "package.room.sums  Mean.from_table(table) -> list[int]",
        "package.room.sums  Mean.weights -> Floats",
        "package.room.sums  subtract()",
    }
    assert set(draw_functions.draw_functions(package, 1, 100)) == expected
    draws = [draw_functions.draw_functions(package, seed, 2) for seed in range(20)]
    assert all(len(set(draw)) == 2 for draw in draws)
    assert set().union(*draws) == expected


def test_draw_functions_repeats_draw_of_seed() -> None:
    command = [sys.executable, ROOT / "tests/project/draw_functions.py", "--count", "5", "--seed"]
    first, repeated, other = (subprocess.check_output([*command, seed], text=True) for seed in ("1", "1", "2"))
    assert first == repeated != other
    assert len(first.splitlines()) == 5
    assert all(line.startswith("fedpipe.") for line in first.splitlines())
