"""Where every process of dbctl starts: `dbctl ...`, `python -m dbctl node ...`, `... agent`.

Rules of this file: a node and an agent are told apart before click is imported, and nothing heavy
is imported here: what BLAS may use of a machine is set by the node before numpy loads.
"""

from __future__ import annotations

import sys


def main() -> int:
    """Run what the command line says; the exit status of the process."""
    argv = sys.argv[1:]
    if argv[:1] == ["node"]:
        from dbctl.node.main import main as node

        return node(argv[1:]) or 0
    if argv[:1] == ["agent"]:
        from dbctl.agent import main as agent

        return agent(argv[1:]) or 0
    try:
        from dbctl.cli.main import main as command_line
    except KeyboardInterrupt:  # later ones are answered there
        return 130
    return command_line(argv)


if __name__ == "__main__":
    sys.exit(main())
