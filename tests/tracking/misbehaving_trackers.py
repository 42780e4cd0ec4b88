"""Trackers that go wrong, as a user's would: found through `extensions.path`."""

import builtins
import os
import subprocess
import sys
import time
from pathlib import Path


class Recorder:
    """Writes what it is told to `recorded_<class>.txt`; the base of those that go wrong."""

    def __init__(self, run_dir, config, identity=None, **arguments):
        self.identity = identity or "first"
        self.arguments = arguments
        self.run_dir = Path(run_dir)
        self.write(f"made {config['run']['name']} {identity} {arguments}")

    def write(self, line):
        with (self.run_dir / f"recorded_{type(self).__name__}.txt").open("a") as file:
            file.write(f"{line}\n")

    def wait_until_released(self):
        while not (self.run_dir / "released").exists():
            time.sleep(0.02)

    def log(self, step, metrics):
        self.write(f"{step} {sorted(metrics.items())}")

    def rewind(self, step):
        self.write(f"rewind {step}")

    def close(self):
        self.write("closed")


class Fails(Recorder):
    """Raises at the steps named."""

    def log(self, step, metrics):
        if step in self.arguments["steps"]:
            error = getattr(builtins, self.arguments.get("error", "OSError"))
            raise error(f"no route to host, step {step}")
        super().log(step, metrics)


class WaitsAndFails(Fails):
    """Waits at the first step, so that later ones queue up."""

    def log(self, step, metrics):
        if step == 1:
            self.wait_until_released()
        super().log(step, metrics)


class Prints(Recorder):
    """Prints at every step, what looks like a record, too."""

    def log(self, step, metrics):
        print(f'{{"failed": "step {step}"}}')
        print("to stderr", file=sys.stderr)
        super().log(step, metrics)


class Changes(Recorder):
    """Changes what it is given."""

    def __init__(self, run_dir, config, identity=None):
        super().__init__(run_dir, config, identity)
        config.clear()

    def log(self, step, metrics):
        super().log(step, metrics)
        metrics.clear()


class Starts(Recorder):
    """Starts a process, as W&B's library does: it has to outlive the signal that ends the run."""

    def __init__(self, run_dir, config, identity=None):
        super().__init__(run_dir, config, identity)
        program = "import signal; print(signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, []))"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        self.write("spared" if done.stdout == "True\n" else "ends")


class Slow(Recorder):
    """Takes 2 ms a record."""

    def log(self, step, metrics):
        time.sleep(0.002)
        super().log(step, metrics)


class Steers(Recorder):
    """Raises text that steers a terminal, and that cannot be encoded."""

    def log(self, step, metrics):
        raise ValueError("\x1b]0;title\x07\ud800")


class Hangs(Recorder):
    """Never comes back from the first step."""

    def log(self, step, metrics):
        super().log(step, metrics)
        self.wait_until_released()


class CannotStart(Recorder):
    """Raises when it is made."""

    def __init__(self, run_dir, config, identity=None):
        raise PermissionError("not logged in")


class HangsAtStart(Recorder):
    """Is never made."""

    def __init__(self, run_dir, config, identity=None):
        super().__init__(run_dir, config, identity)
        self.wait_until_released()


class FailsAtEnd(Recorder):
    """Raises when it is closed."""

    def close(self):
        super().close()
        raise ConnectionError("no route to host at the end")


class HangsAtEnd(Recorder):
    """Never finishes."""

    def close(self):
        super().close()
        self.wait_until_released()


class Speaks(Recorder):
    """Raises its environment's secrets."""

    def log(self, step, metrics):
        raise ValueError(f"cannot log in with {os.environ['TRACKER_API_KEY']}")


class NoClose:
    """Lacks a method."""

    def __init__(self, run_dir, config, identity=None):
        pass

    def log(self, step, metrics):
        pass


NOT_CALLABLE = 3
