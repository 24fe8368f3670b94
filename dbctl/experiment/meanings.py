"""What each key of an experiment file means, in a sentence: what an editor shows for it.

Rules of this file: text only, Markdown without links. `key`, or `Spec.key` where the same name
means something else in that spec. The tables of docs/experiments.md say the same words: a test
compares them, and finds a key without any.
"""

from __future__ import annotations

MEANINGS = {
    "version": "of this format",
    "name": "names the run's directory, `runs/NAME/TIME`",
    "seed": "initial values, who has which rows, their order",
    "data": "what is trained on and measured on",
    "network": "its input, layers and loss",
    "initialize_from": "the parameters begin as those of that run's newest good checkpoint, or "
    "of the one of STEP; all else begins anew",
    "partition": "how one replica is cut over processes",
    "replicas": "how many train at once",
    "min_replicas": "with fewer alive the run ends as failed",
    "shards": "processes that hold the parameters: equal shares, or up to where a partition ends, "
    "if that is less than an eighth off; at most one for each 16 parameters",
    "optimizer": "the method, the mini-batch and the rule of the updates",
    "stop": "whichever comes first",
    "evaluate": "when the test split is measured",
    "checkpoint": "when a checkpoint is made, and how many stay",
    "cluster": "where it runs: `launcher: local`, this machine, or `launcher: ssh` with `hosts`",
    "threads": "BLAS threads of a worker, of each partition. OMP_NUM_THREADS wins if this is not "
    "given; every other process has one",
    "train": "a source",
    "test": "a source; without it nothing is measured",
    "source": "`digits`, `idx`, `npz`, `npy`, `csv`, `synthetic`",
    "scale": "multiplies every feature",
    "standardize": "(x - mean) / deviation, each feature by the *training* rows; a deviation of 0 "
    "counts as 1. The figures are kept in the run directory",
    "rows": "only the first so many; of `synthetic`, required: how many there are",
    "ship": "of files: each host is sent the rows that it needs, and keeps them in its `workdir`; "
    "it has no such files itself. Without effect with `launcher: local`",
    "split": "which rows of `digits`, or of `synthetic`",
    "images": "one row an image",
    "labels": "one number an image",
    "path": "of `npz` and `csv`: the file",
    "x": "features: any number of dimensions, the first is rows",
    "y": "labels (whole numbers), or targets (floats, one row each) for `loss: squared`",
    "label": "the column that is not a feature: its name, or its number from 0",
    "features": "how many each row has",
    "classes": "how many clusters there are",
    "noise": "deviation of a row about its centre",
    "SyntheticSource.seed": "of the clusters; not the experiment's",
    "input": "`[features]`, or `[height, width, channels]`",
    "layers": "in order",
    "loss": "`softmax` (cross-entropy), `logistic` (one-vs-all), `squared` (half the squared "
    "error)",
    "type": "which kind it is",
    "units": "its outputs",
    "activation": "`sigmoid`, `tanh`, `relu`, `linear`; with `softmax` and `logistic` the last "
    "layer is linear",
    "cut": "of `dense`: how the partitions share it; not given: whichever sends less",
    "init": "`glorot`, `he`, or a number: half the width of a uniform distribution. Not given: "
    "`he` for relu, else `glorot`. Biases begin at 0",
    "maps": "of `conv2d` and `local2d`: filters at each position",
    "kernel": "what a filter sees of each map below. With `padding: valid` within the nodes below",
    "stride": "from one position of the filters to the next",
    "padding": "`same`: zeros around the nodes below, so that there are ceil(nodes / `stride`) "
    "positions",
    "kind": "of a pool; `l2` is the root of the sum of squares",
    "size": "of a pool's window, within the nodes below",
    "PoolSpec.stride": "of a pool: from one window to the next",
    "window": "side of the window of `lcn`",
    "floor": "of `lcn`: the least deviation that is divided by",
    "DropoutSpec.rate": "of `dropout`: the probability that a node is 0",
    "count": "of partitions; layers with rows and columns are cut into a grid of rows x columns = "
    "`count` parts, the others into equal runs of units. Of the grids that fit the one of least "
    "traffic is taken among those in which no partition has more than 1.5 times the mean of the "
    "nodes",
    "grid": "that grid; `count` is then rows x columns",
    "batch_size": "rows of one mini-batch of one replica",
    "rule": "what a shard does with a push",
    "clip": "the greatest norm of a mini-batch's gradient",
    "l2": "adds `l2` times the weights (not biases), once a push",
    "n_fetch": "fetch every so many steps",
    "n_push": "push every so many steps, the sum of their gradients",
    "warmstart": "`{steps: N}`: one replica alone does the first N steps",
    "Warmstart.steps": "of the one replica that begins",
    "overlap": "fetch and push while computing; false: wait for both. Not given: true on several "
    "hosts (`launcher: ssh`), false on one, where to wait is faster",
    "max_lead": "how many steps a replica may be ahead of the slowest one",
    "staleness_scaling": "divide the rate by the staleness of a push, if that is above 1",
    "slots": "pushes of a worker that may be unacknowledged; 1 if it waits for each (`overlap`)",
    "method": "`lbfgs`, `gradient_descent`, `conjugate_gradient`",
    "history": "pairs of steps and gradients that `lbfgs` keeps",
    "portion": "rows that a replica computes at a time",
    "send_every": "portions of a bundle: what is handed to a replica, sent and counted at once",
    "batch": "rows of an iteration's batch, a seeded sample drawn anew each time; not given: all "
    "of them",
    "backup": "copies of the bundles still out, for replicas that have nothing to do",
    "line_search": "`{c1, c2, max_trials}`: the strong Wolfe conditions",
    "c1": "the least share of the slope by which the loss must fall",
    "c2": "the greatest share of the slope that may be left. Not given: 0.1 for "
    "`conjugate_gradient`, else 0.9",
    "max_trials": "evaluations of one search",
    "tolerance": "converged where the norm of the gradient is at most this",
    "SandblasterSpec.l2": "adds `l2` / 2 times the squared weights (not biases) to the loss",
    "rate": "a number or a schedule",
    "momentum": "the share of the last step that is kept",
    "beta1": "the share of the mean of the gradients that is kept",
    "beta2": "the share of the mean of their squares that is kept",
    "epsilon": "added to the root that is divided by",
    "warm_up": "the rate rises linearly over the first so many updates of a shard",
    "initial": "of a schedule, `rate: {type: step, initial: 0.1, every: 1000, factor: 0.5}`",
    "ScheduleSpec.every": "updates",
    "factor": "of a schedule: what the rate is multiplied by",
    "epochs": "passes of each replica over its own rows",
    "steps": "mini-batches of all replicas together, exactly; iterations of batch methods",
    "seconds": "of training",
    "test_accuracy": "needs `evaluate`",
    "every": "of `evaluate` and `checkpoint`; a checkpoint is always made at the end. `evaluate: "
    "off` is short for `{every: off}`, which is the default there",
    "keep": "checkpoints that stay",
    "launcher": "`local`: processes of this machine; `ssh`: of the hosts",
    "hosts": "the machines, or the name of a file with `version: 1` and `hosts`",
    "encryption": "of what processes of different hosts say to each other",
    "HostSpec.name": "what tables and errors call it; each has another",
    "ssh": "what the `ssh` of this machine takes: HOST, USER@HOST, ssh://USER@HOST:PORT, a name of "
    "~/.ssh/config. Not given: `name`",
    "address": "where the other hosts connect: IPv4, IPv6 or a name, without a port. Not given: "
    "the host in `ssh`",
    "python": "its Python, 3.11 or later, that can import dbctl: a name or a path there",
    "workdir": "its directory for what a run writes there",
    "env": "variables of every process there, each `NAME=VALUE`",
    "HostSpec.slots": "how many processes it takes; not given: any number",
    "HostSpec.threads": "BLAS threads of a worker there; not given: `threads` of the experiment",
    "HostSpec.labels": "`shard`, `worker`, `evaluator`: what it may run; without any, all three",
}


def meaning(spec: type, key: str) -> str:
    """Of `key` in `spec`; KeyError where nobody wrote it down."""
    return MEANINGS.get(f"{spec.__name__}.{key}") or MEANINGS[key]
