"""Tables are read in one thread, because a process with threads of Arrow sometimes aborts when it exits."""

import re
import subprocess
import sys
from pathlib import Path

from tests.small_studies import ROOT

READ_TABLES = """
import os
from pathlib import Path
import pandas, pyarrow, pyarrow.parquet
from fedpipe.core.storage import files
from fedpipe.data.sources.formats import convert_table_to_samples
from fedpipe.data.partitions import file

def count_threads():
    return len(os.listdir("/proc/self/task"))

table = pyarrow.table({name: list(range(50)) for name in "abcd"})
path = Path("table.parquet")
sha256 = files.write_parquet(path, table)
thread_count = count_threads()
assert files.table_to_frame(files.read_parquet(path, sha256)).shape == (50, 4)
file._parse_table(path.read_bytes(), "table.parquet")
file._parse_table(b"sample,client\\n0,1\\n", "table.csv")
assert count_threads() == thread_count, (thread_count, count_threads())
"""


def test_reading_tables_starts_no_threads(tmp_path: Path) -> None:
    process = subprocess.run([sys.executable, "-c", READ_TABLES], cwd=tmp_path, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr


def test_only_one_module_reads_tables() -> None:
    """Other modules must not call the readers of Arrow and pandas, which start threads."""
    reader = re.compile(
        r"read_table\(|pds?\.dataset\(|\.to_pandas\(\)|pd\.read_parquet|pq\.ParquetFile|csv\.read_csv|pq\.read"
    )
    paths = [path for path in (ROOT / "fedpipe").rglob("*.py") if reader.search(path.read_text())]
    assert [str(path.relative_to(ROOT)) for path in paths] == ["fedpipe/core/storage/files.py"]
