"""The slimrt command: one module for each verb."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns its exit code."""
    try:
        from slimrt.cli import command  # imported here, so that Ctrl-C during imports prints no traceback either

        return command.main(argv)
    except KeyboardInterrupt:
        return 130
