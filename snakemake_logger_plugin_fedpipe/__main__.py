"""``python -m snakemake_logger_plugin_fedpipe``: Snakemake, as `fedpipe run` starts it.

This takes 0.5 seconds less than `snakemake`. The imports don't look for garbage, and pandas is imported only if it is
needed. Snakemake imports all plugins at its start, and that for Slurm imports pandas for a report of used memory
(docs/upstream.md).
"""

import gc
import sys
from importlib import import_module
from types import ModuleType
from typing import Any

from typing_extensions import override


class DelayedModule(ModuleType):
    """A module that is imported when one of its attributes is used. importlib's LazyLoader imports it too early."""

    @override
    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(import_module(self.__name__), name)


def main() -> None:
    """Run Snakemake with the arguments of this process."""
    sys.argv[0] = "snakemake"
    gc.disable()
    delayed_pandas = sys.modules["pandas"] = DelayedModule("pandas")
    from snakemake import cli

    if sys.modules["pandas"] is delayed_pandas:  # only the plugin keeps it
        del sys.modules["pandas"]
    gc.freeze()
    gc.enable()
    cli.main()


if __name__ == "__main__":
    main()
