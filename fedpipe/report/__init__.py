"""From the files of all runs to tables and figures."""
