"""Says that training has moved: `diff_transformer.train` of version 0.2.0 is `diff_lab.train` now."""

import sys

from diff_transformer._version import INSTALL_LAB

MOVED = f"diff_transformer.train is diff_lab.train now, which {INSTALL_LAB} installs"

if __name__ == "__main__":
    sys.exit(f"error: {MOVED}: python -m diff_lab.train {' '.join(sys.argv[1:])}".rstrip())
raise ModuleNotFoundError(f"{MOVED}.", name=__name__)
