"""The command line: one thin module per command. Results go to stdout, everything else to stderr."""
