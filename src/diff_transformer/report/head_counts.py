"""The heads of an experiment's arms: how many, and whether DIFF has as many as its authors advise."""

from collections.abc import Mapping, Sequence
from typing import Any

from diff_transformer.report.rows import arm_label

# The authors of the paper advise so many heads or more for DIFF.
ADVISED = 8


def heads_cell(arm: Mapping[str, Any]) -> str:
    """Heads and their width, "4 × 8"; results that were written before heads were have none."""
    return f"{arm['heads']} × {arm['head_dim']}" if "heads" in arm else "–"


def few_heads(arms: Sequence[Mapping[str, Any]]) -> str:
    """A sentence where arms of DIFF have fewer heads than its authors advise; "" where none has."""
    few = [arm for arm in arms if arm.get("differential") and arm["heads"] < ADVISED]
    if not few:
        return ""
    named = ", ".join(f"{_name(arm)}: {arm['heads']}" for arm in few)
    sentence = f"DIFF has fewer heads here than the {ADVISED} or more that its authors advise ({named})."
    sizes = {arm["group"]: arm["heads"] for arm in arms if arm.get("differential")}
    if len(set(sizes.values())) > 1:
        sentence += " Their number changes from group to group, so what it does is not told from what else changes."
    return sentence


def _name(arm: Mapping[str, Any]) -> str:
    return arm_label(arm["name"]) + ("" if arm["group"] is None else f", {arm['group']}")
