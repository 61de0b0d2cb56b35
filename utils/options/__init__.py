"""What a setting switches on, in one table: what watches a run, and options.

To add an option, add a row, its module, and its setting in utils/config.py. To leave one out,
delete the row and the module; the setting then does nothing: delete that, too, and what reads it. A
module is imported only if its setting selects it; if it is missing, the error names both.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from utils.errors import required_by
from utils.hooks import Hook, Hooks
from utils.metrics import History

HOOKS = (  # setting, its value that means off (no setting: always on), module, class
    ("", None, "utils.run_folder", "OutputFolder"),  # before those that write to it
    ("", None, "utils.contract", "CompareSamples"),
    ("save_minutes", 0, "utils.preemption", "Interrupts"),  # before those that ask is_due()
    ("audit", False, "utils.options.audit", "Audit"),
    ("max_skipped_steps", -1, "utils.options.skipped_steps", "SkippedSteps"),
    ("log_steps", 0, "utils.options.step_log", "StepLog"),
    ("timing", False, "utils.options.timing", "Timing"),
    ("profile", "", "utils.options.profile", "Profile"),
    ("logger", "", "utils.options.loggers", "Loggers"),
    ("save_sharded", False, "utils.options.sharded", "ShardedFiles"),
    ("", None, "utils.progress", "Progress"),  # after those that change the sums
    ("", None, "utils.finite", "RefuseNonFinite"),
)


def build_hooks(cfg: Any, state: Mapping[str, Any], *kinds: type[Hook]) -> Hooks:
    """Hooks (utils/hooks.py) of these kinds, and those that the settings select. state: see
    Checkpointer."""
    hooks = Hooks(kind(cfg, state) for kind in (*kinds, History))
    for setting, off, module, name in HOOKS:
        if not setting or getattr(cfg, setting) != off:
            with required_by(f"--{setting.replace('_', '-')}" if setting else module):
                kind = getattr(import_module(module), name)
            hooks.append(kind(cfg, state))
    return hooks
