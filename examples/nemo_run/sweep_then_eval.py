"""Two trainings with different learning rates, and an evaluation after each.

From a git repository:

    export PYTHONPATH=.:answers:kernels:sandbox:launchers
    ~/.cache/ctpo-megatron/venv-launch/bin/python examples/nemo_run/sweep_then_eval.py

In Slurm an evaluation waits for its training to end well (`afterok`), with the local executor for its end.
"""

import nemo_run as run

from ctpo_launchers import executor, task

CLUSTER, NODES = "my_cluster.yaml", 1

with run.Experiment("learning-rates") as experiment:
    for lr in ("1e-6", "2e-6"):
        name = f"lr-{lr}"
        words = ["my.yaml", f"run.name={name}", f"policy.optimizer.lr={lr}"]
        train = task("train", *words, cluster=CLUSTER, nodes=NODES)
        trained = experiment.add(train, executor=executor(CLUSTER, NODES), name=name)
        score = task("eval", f"runs/{name}", "--data", "heldout.parquet", "-k", "8", cluster=CLUSTER)
        experiment.add(score, executor=executor(CLUSTER), name=f"eval-{name}", dependencies=[trained])
    experiment.run()
