"""python -m slimrt: the same as the slimrt command."""

import sys

from slimrt.cli import main

if __name__ == "__main__":
    sys.exit(main())
