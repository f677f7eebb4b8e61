"""Tables are read by one thread: a process in which Arrow has begun others is aborted now and then when it ends."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.small_studies import ROOT

READS = """
import os
from pathlib import Path
import pandas, pyarrow, pyarrow.parquet
from fedpipe.core.storage import files
from fedpipe.data.sources.formats import read_parquet
from fedpipe.data.partitions import file

def threads():
    return len(os.listdir("/proc/self/task"))

table = pyarrow.table({name: list(range(50)) for name in "abcd"})
path = Path("table.parquet")
sha256 = files.write_parquet(path, table)
before = threads()
assert files.table_to_frame(files.read_parquet(path, sha256)).shape == (50, 4)
file._parse_table(path.read_bytes(), "table.parquet")
file._parse_table(b"sample,client\\n0,1\\n", "table.csv")
assert threads() == before, (before, threads())
"""


def test_reading_tables_begins_no_threads(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", READS], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_nothing_reads_tables_in_another_way() -> None:
    """With Arrow's or pandas' own readers, which begin threads."""
    other = re.compile(
        r"read_table\(|pds?\.dataset\(|\.to_pandas\(\)|pd\.read_parquet|pq\.ParquetFile|csv\.read_csv|pq\.read"
    )
    found = [path for path in (ROOT / "fedpipe").rglob("*.py") if other.search(path.read_text())]
    assert [str(path.relative_to(ROOT)) for path in found] == ["fedpipe/core/storage/files.py"]
