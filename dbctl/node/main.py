"""`python -m dbctl node NAME`: one process of a run, from its first line of input to its end.

Rules of this file: nothing heavy is imported before the spec is read, but by a template for all its
forks, and never click or yaml; the environment (threads of BLAS) is already right, the
agent set it.

Theory of operation. Standard input carries one line, the NodeSpec as JSON, and then stays open: its
end means that the agent lets go of it or is gone, and the node ends. SIGINT, SIGTERM and SIGHUP are
the controller's to answer: the final checkpoint that they ask for needs the nodes. The parent's
death is also asked for from the kernel, since neither a stopped process nor one that hangs inside a
library would read its input.
"""

from __future__ import annotations

import faulthandler
import os
import signal

from dbctl.process import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_ORPHANED,
    SPEC_BYTES_MAX,
    TEMPLATE,
    end_with_parent,
    leave_signals,
    log,
    read_line,
)


def main(argv: list[str]) -> int:
    """Runs the node NAME; returns its status: 0 finished, 1 failed, 4 fenced, 5 parent gone."""
    leave_signals()
    faulthandler.enable(all_threads=False)
    if len(argv) != 1:
        log("node", f"expected one argument, the node's name, found {len(argv)}")
        return EXIT_FAILED
    name = argv[0]
    end_with_parent(signal.SIGKILL)
    if name == TEMPLATE:
        from dbctl.node.template import wait_for_name

        forked = wait_for_name()
        if forked is None:
            return EXIT_DONE
        name = forked
    line = read_line(0, SPEC_BYTES_MAX)
    if line is None:
        log(name, f"no spec of at most {SPEC_BYTES_MAX} bytes on standard input: the agent is gone")
        return EXIT_ORPHANED

    import msgspec

    from dbctl.plan import NodeSpec

    try:
        spec = msgspec.json.decode(line, type=NodeSpec)
    except msgspec.MsgspecError as error:
        log(name, f"the spec on standard input is not a NodeSpec: {error}")
        return EXIT_FAILED
    if spec.node != name:
        log(name, f"the spec on standard input is for {spec.node!r}, expected {name!r}")
        return EXIT_FAILED
    log(name, f"incarnation {spec.incarnation} of run {spec.run}, pid {os.getpid()}")

    from dbctl.node.loop import run_node

    return run_node(spec)
