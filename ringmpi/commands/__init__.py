"""The commands of the command line, one a module: ``arguments(parser)`` and ``run(args) -> exit code``."""
