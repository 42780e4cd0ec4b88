"""Which group of tests a process of pytest-xdist gets next: half of the processes prefer tests that mostly wait.

So the cores have work all the time, and never more than that: what goes by the clock needs its share of them.
"""

from __future__ import annotations

from xdist.scheduler import LoadGroupScheduling
from xdist.workermanage import WorkerController

WAITING = (
    "engines/test_private_ray.py",
    "engines/test_ray_",
    "launchers/",
    "rewards/test_rewards_pool.py",
    "run/",
    "sandbox/",
    "test_http_servers.py",
    "test_sweep_command.py",
)
"""How the names of files begin whose tests mostly wait: for limits, for servers, for processes to end."""


def waits(nodeid: str) -> bool:
    """Whether the file of a test is one of `WAITING`."""
    return nodeid.removeprefix("tests/").startswith(WAITING)


class Lanes(LoadGroupScheduling):
    """Gives groups out in their order, to each process those of its lane while there are some."""

    def _assign_work_unit(self, node: WorkerController) -> None:
        lane = int(node.gateway.id.removeprefix("gw")) >= self.numnodes - self.numnodes // 2
        fitting = (name for name, tests in self.workqueue.items() if waits(next(iter(tests))) == lane)
        if (name := next(fitting, None)) is not None:
            self.workqueue.move_to_end(name, last=False)
        super()._assign_work_unit(node)
