"""Where numbers come from, whether they hold, how two runs differ, and what nothing needs any more."""
