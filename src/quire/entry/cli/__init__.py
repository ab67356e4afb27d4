"""The `quire` command: flags in, text and tables out.

Every command is a module with `SUMMARY`, `configure(parser)` and `run(args) -> exit code`. Configuring is light: torch
and the engine are imported when a command runs.
"""
