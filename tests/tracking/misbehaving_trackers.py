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

    def log(self, step, metrics):
        self.write(f"{step} {sorted(metrics.items())}")

    def rewind(self, step):
        self.write(f"rewind {step}")

    def close(self):
        self.write("closed")


class Faulty(Recorder):
    """Does after a call what `faults` says of it: of its start, a step's number, any step, or its end."""

    def __init__(self, run_dir, config, identity=None, *, faults):
        super().__init__(run_dir, config, identity)
        self.faults = faults
        self.fault("start")

    def log(self, step, metrics):
        super().log(step, metrics)
        self.fault(str(step))
        self.fault("any step")

    def close(self):
        super().close()
        self.fault("end")

    def fault(self, moment):
        match self.faults.get(moment):
            case None:
                pass
            case "wait":
                while not (self.run_dir / "released").exists():
                    time.sleep(0.02)
            case "be slow":
                time.sleep(0.002)
            case "print":  # what looks like a record, too
                print('{"failed": "a step"}')
                print("to stderr", file=sys.stderr)
            case "steer":  # a terminal; and it cannot be encoded
                raise ValueError("\x1b]0;title\x07\ud800")
            case "tell":
                raise ValueError(f"cannot log in with {os.environ['TRACKER_API_KEY']}")
            case error:
                raise getattr(builtins, error)(f"no route to host, {moment}")


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


class NoClose:
    """Lacks a method."""

    def __init__(self, run_dir, config, identity=None):
        pass

    def log(self, step, metrics):
        pass


NOT_CALLABLE = 3
