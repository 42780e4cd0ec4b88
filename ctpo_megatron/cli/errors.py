"""How errors are reported: one line where the message is all the user needs, a traceback for a bug."""

from __future__ import annotations

import errno
import os
import select
import signal
import sys
import traceback
from collections.abc import Mapping

from ctpo_megatron.base.files import FULL
from ctpo_megatron.base.installed import SEPARATE, install_command, separate_command
from ctpo_megatron.base.stop import BEGUN, TRY_AGAIN
from ctpo_megatron.base.text import say

# Module (already imported if its error was raised) -> names of exceptions.
_USER_ERRORS = {  # their message is all the user needs
    "ctpo_megatron.config": ("ConfigError",),
    "ctpo_megatron.data": ("DataError",),
    "ctpo_megatron.init": ("InitError",),
    "ctpo_megatron.environments": ("TokenizerError",),
    "ctpo_megatron.base.extensions": ("ExtensionError",),
    "ctpo_megatron.run.directory": ("RunDirectoryError",),
    "ctpo_megatron.run.run": ("TooManyFailed",),
    "ctpo_megatron.base.files": ("DamagedFileError",),
    "ctpo_megatron.policy": ("CheckpointError", "MismatchError"),
    "ctpo_megatron.rollouts": ("ReplayError", "TooManyQuarantined"),
    "ctpo_sandbox": ("SandboxUnavailable", "SandboxStartError"),
}
_FAILED_ELSEWHERE = {  # in another process: a rank, an engine, a reward worker
    "ctpo_megatron.policy": ("RankZeroError", "RankLost"),
    "ctpo_megatron.engines": ("EngineError",),
    "ctpo_megatron.rewards": ("RewardWorkersLost",),
}
_PASSING = {  # of a run that has trained: another start may not meet them
    "ctpo_megatron.policy": ("CheckpointWriteError", "RankLost"),
    "ctpo_megatron.engines": ("EngineError",),
    "ctpo_megatron.rewards": ("RewardWorkersLost",),
    "ctpo_megatron.rollouts": ("TooManyQuarantined",),
    "ctpo_sandbox": ("SandboxUnavailable",),
}
_PASSES = {*FULL, errno.EIO, errno.ESTALE}
"""Error numbers of the file system that are gone with their cause."""
_OF_THE_MACHINE = {
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE),
    *(errno.ENOTDIR, errno.EISDIR),
}
"""Error numbers of the file system that are not bugs; the message needs the path."""
_EXTRAS = {
    "train": (
        *("torch", "megatron", "ray", "transformers", "tokenizers", "safetensors", "tensorboard", "huggingface_hub"),
        *("math_verify", "latex2sympy2_extended", "antlr4", "sympy"),
    ),
    "sandbox": ("fastapi", "starlette", "uvicorn", "httptools", "aiohttp", "httpx", "pyseccomp", "prometheus_client"),
    "engine": ("vllm", "jsonschema"),
    "wandb": ("wandb",),
    "mlflow": ("mlflow",),
}
"""Extra of setup.py -> modules of it that the base install lacks. `engine` is `cpu` or `cuda`."""
_STDOUT = 1


class UsageError(Exception):
    """Invalid arguments of a verb; the message says what to change."""


def report_error(error: Exception, verb: str) -> int:
    """Print an error that ended a verb; returns the exit status.

    2: only the user can mend the cause. TRY_AGAIN: a run that has trained was ended by what may pass. 1: all else.
    """
    status, cause = _report(error, verb), error
    if _is_one_of(error, {"ctpo_megatron.policy": ("RankZeroError",)}) and isinstance(error.__cause__, Exception):
        cause = error.__cause__  # every rank ends with the status of rank zero
        status = 2 if _is_one_of(cause, _USER_ERRORS) else status
    return TRY_AGAIN if _passes(cause) else status


def _passes(error: Exception) -> bool:
    begun = any(note.startswith(BEGUN) for note in getattr(error, "__notes__", ()))
    if _is_one_of(error, {"ctpo_megatron.policy": ("CheckpointWriteError",)}):
        return True  # nothing is written before a run trains
    full = isinstance(error, OSError) and error.errno in _PASSES
    return begun and (full or _is_one_of(error, _PASSING))


def _report(error: Exception, verb: str) -> int:
    if isinstance(error, UsageError):
        say(f"ctpo {verb}: {error}", error=True)
        return 2
    if _is_one_of(error, _FAILED_ELSEWHERE):
        say(f"ctpo: {error}", error=True)
        return 1
    if isinstance(error, ModuleNotFoundError) and (missing := _missing(error)):
        say(f"ctpo {verb}: {missing}", error=True)
        return 2
    if isinstance(error, OSError) and _output_is_closed(error):
        return 128 + signal.SIGPIPE
    if not _is_one_of(error, _USER_ERRORS):
        if refused := _refused(error):
            say(f"ctpo {verb}: {refused}", error=True)
        else:
            say("".join(traceback.format_exception(error)).rstrip("\n"), error=True)
        return 1
    if is_rank_zero():  # one message per cause, not one per rank
        say(f"ctpo: {error}", error=True)
    return 2


def flush_output() -> None:
    """Flush output now: a failure of Python's flush at exit would change the exit status."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        if not _output_is_closed(error):
            raise


def _output_is_closed(error: OSError) -> bool:
    """Whether the cause is a pipe without a reader, as after `| head`, or a closed terminal.

    Redirects standard output to /dev/null.
    """
    if error.errno not in (errno.EPIPE, errno.EIO):
        return False
    output = select.poll()
    output.register(_STDOUT, 0)
    if not any(event & select.POLLERR for _, event in output.poll(0)):
        return False
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, _STDOUT)  # output at exit would fail, too
    os.close(nothing)
    return True


def is_rank_zero() -> bool:
    """Return whether this process reports for its job, by torchrun's RANK."""
    return os.environ.get("RANK", "0") == "0"


def _missing(error: ModuleNotFoundError) -> str:
    """The message where this verb needs more than the base install; empty for a bug."""
    package = (error.name or "").partition(".")[0]
    extra = next((extra for extra, modules in _EXTRAS.items() if package in modules), "")
    if extra == "engine":
        from ctpo_megatron.checks import has_cuda_device

        extra = "cuda" if has_cuda_device() else "cpu"
    if extra:
        command = install_command(extra)
    elif package in SEPARATE:
        command = separate_command(package)
    else:
        return ""
    return f"{package} is not installed, and this needs it: {command} (`ctpo doctor` lists all that is missing)"


def _refused(error: Exception) -> str:
    """The message for an error of the file system, with its path or our advice; empty for a bug."""
    cause = error.__cause__ if isinstance(error, RuntimeError) else error
    named = cause is not error or getattr(cause, "filename", None) is not None
    said = named and isinstance(cause, OSError) and cause.errno in _OF_THE_MACHINE
    if full := _no_space(error):
        advice = "free space where it writes, in /tmp or in /dev/shm (df -h), and start it again"
        earlier = full is not cause and full.filename is not None
        return f"{full if earlier or not said else error}; {advice}"
    return str(error) if said else ""


def _no_space(error: BaseException | None) -> OSError | None:
    """The first disk-full error behind an error, if any: writes during cleanup fail, too."""
    found = None
    while error is not None:
        if isinstance(error, OSError) and error.errno in FULL and (found is None or error.filename is not None):
            found = error
        error = error.__cause__ or error.__context__
    return found


def _is_one_of(error: Exception, kinds_of: Mapping[str, tuple[str, ...]]) -> bool:
    """Looks up classes in loaded modules only: a module that is not loaded cannot have raised."""
    for module, names in kinds_of.items():
        loaded = sys.modules.get(module)
        kinds = tuple(kind for name in names if isinstance(kind := getattr(loaded, name, None), type))
        if isinstance(error, kinds):
            return True
    return False
