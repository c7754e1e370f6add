"""Holds the version of the package, and the sentence on how to install it."""

__version__ = "0.2.0"
# Shown to users who lack the package, which is on no package index, or one of its extras.
CHECKOUT = "in a checkout of the diff-transformer repository"
INSTALL = f"pip install . {CHECKOUT}"
INSTALL_LAB = f"`pip install . ./lab` {CHECKOUT}"
