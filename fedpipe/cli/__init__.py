"""The command line, one module per group of commands. `docs` generates pages, `scaffold` writes starting files."""
