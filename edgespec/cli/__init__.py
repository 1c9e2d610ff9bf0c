"""The command line: one module a command, each thin. Results go to stdout, everything else to stderr."""
