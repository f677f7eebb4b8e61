"""Python imports this module when a test starts a process. Some processes become forks, see server_template.py."""

import os
import sys

COMMANDS = ("fedpipe", "snakemake", "dvc")
MODULES = ("fedpipe", "snakemake_logger_plugin_fedpipe")
#: Subcommands of fedpipe whose results could depend on the number of threads.
TRAINING_COMMANDS = ("segment", "initialize", "train", "aggregate", "evaluate", "diagnostic", "verify", "check")


def is_command(arguments: list[str]) -> bool:
    """Return whether a fork can run the command. A command of a job waits for a fork of its job server."""
    is_module = arguments[:1] == ["-m"] and arguments[1:2][0] in MODULES
    is_script = arguments[:1] != [] and arguments[0].rpartition("/")[2] in COMMANDS
    subcommand = arguments[2:3] if is_module else arguments[1:2]
    is_training = subcommand != [] and subcommand[0] in TRAINING_COMMANDS
    is_forked = "FEDPIPE_SNAKEMAKE" not in os.environ and os.environ.get("FEDPIPE_FORKS") != "servers"
    return (is_module or is_script) and not is_training and is_forked


if "FEDPIPE_TEMPLATE" in os.environ:
    if "job_server.main()" in sys.orig_argv[-4:][0]:
        from server_template import delegate_server

        delegate_server(os.environ["FEDPIPE_TEMPLATE"], sys.orig_argv[-4:])
    elif is_command(arguments := sys.orig_argv[1:] if sys.orig_argv[1:2] != ["-P"] else sys.orig_argv[2:]):
        from server_template import delegate_command

        delegate_command(os.environ["FEDPIPE_TEMPLATE"], arguments)
