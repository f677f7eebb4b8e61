"""Options of the logger `fedpipe` on Snakemake's command line."""

# Without `from __future__ import annotations`, because Snakemake reads the types of the fields.
from dataclasses import dataclass, field

from snakemake_interface_logger_plugins.settings import LogHandlerSettingsBase


@dataclass
class LogHandlerSettings(LogHandlerSettingsBase):
    """Options of the logger."""

    progress: bool = field(
        default=False, metadata={"help": "Print one line per finished job instead of Snakemake's output."}
    )
