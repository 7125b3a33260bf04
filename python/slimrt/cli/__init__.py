"""The slimrt command: one file a verb."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns its exit code."""
    try:
        from slimrt.cli import command  # here, so that Ctrl-C while modules are imported ends without a traceback too

        return command.main(argv)
    except KeyboardInterrupt:
        return 130
