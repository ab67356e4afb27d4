"""The `quire` command: flags in, text and tables out.

Every command is a module with `SUMMARY`, `configure(parser)` and `run(args) -> exit code`. Only `run` imports torch and
the engine, so that `--help` is fast.
"""
