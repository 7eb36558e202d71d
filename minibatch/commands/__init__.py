"""One file a command. Each has ``add_parser(subparsers)``, which sets ``run``."""
