"""All attention types that are trained from the start."""

from tiny_model import KINDS, kinds

kind = kinds(KINDS)
