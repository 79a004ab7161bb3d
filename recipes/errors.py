"""The two kinds of failure a user sees: each is one clear message and an exit code, never a traceback."""

import errno

USAGE = 2  # bad usage, configuration or input
FAILED = 1  # the work itself failed, or a gate broke
INTERRUPTED = 130
TERMINATED = 143
NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})  # OSError.errno of a full disk or quota
MAKE_ROOM = "what was finished is kept: make room and run the same command again"


class DrafthouseError(Exception):
    """Base of the errors that carry a message meant for the user. `exit_code` is the process's."""

    exit_code = FAILED


class ConfigError(DrafthouseError):
    """The recipe, a flag or an input file is wrong: the message names the file, the field and the value."""

    exit_code = USAGE


class RunError(DrafthouseError):
    """The input was acceptable but the work could not be finished, or a check did not hold."""
