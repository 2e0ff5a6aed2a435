"""The two families of errors that a user meets; the command line turns them into exit codes."""


class InputError(Exception):
    """Something that was given cannot be used: a setting, a file, a cluster. Exit code 2."""


class RunError(Exception):
    """Something failed while a run was under way. Exit code 1; --resume auto may continue it."""
