"""What torchrun starts for `ctpo launch --check` in place of the trainer: one table of the findings on all nodes."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence

from ctpo_megatron.base.text import say
from ctpo_megatron.checks import BETWEEN, RankCheck, diagnose_node, gpus, has_cuda_device, verdict
from ctpo_megatron.cli.console import print_table
from ctpo_megatron.cli.doctor import STATUS
from ctpo_megatron.config import ConfigError, Job, Problem, failed, load_with_sources

NOT_READY = 2


def main(words: Sequence[str]) -> int:
    """words: configuration file and overrides. Returns 0, or on all ranks 2 where something must be fixed."""
    logging.basicConfig(level=logging.WARNING)
    ranks = RankCheck()
    seen = gpus()
    job = Job(ranks.ranks, ranks.local_ranks, None if isinstance(seen, str) else len(seen), has_cuda_device())

    def findings() -> list[Problem]:
        try:
            return diagnose_node(*load_with_sources(words[0], words[1:]), job)
        except ConfigError as error:  # a file that is not on this node
            return list(error.problems)

    found, ready = ranks.run(findings)
    if ranks.rank == 0:
        everything = list(dict.fromkeys(problem for part in found.values() for problem in part))
        print_table("Check of the job: no training", ("what", "status", "detail"), table(found))
        say(f"\n{verdict(everything)}")
        for problem in failed(everything):
            say(f"  {problem.key}: {problem.advice}")
    return 0 if ready else NOT_READY


def table(found: Mapping[str, Sequence[Problem]]) -> list[tuple[str, str, str]]:
    """Rows (what, status, detail); what several nodes have in common is one row, else the detail names the nodes."""
    where: dict[tuple[str, str, str], list[str]] = {}
    for node, problems in found.items():
        for each in problems:
            where.setdefault((each.key, STATUS[each.severity], each.advice), []).append(node)
    shared = ([name for name in found if name != BETWEEN], [BETWEEN])
    return [row if names in shared else (*row[:2], f"{', '.join(names)}: {row[2]}") for row, names in where.items()]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
