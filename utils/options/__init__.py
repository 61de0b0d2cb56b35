"""What a setting adds to a run: guards that are imported only if their setting asks for them.

To leave one out, delete its lines here and its file.
"""

from typing import Any

from utils.errors import required_by
from utils.guards import Guard


def option_guards(cfg: Any) -> list[Guard]:
    """The guards that the settings select."""
    guards: list[Guard] = []
    if cfg.audit:
        with required_by("--audit"):
            from utils.options.audit import Audit
        guards.append(Audit())
    if cfg.max_skipped_steps >= 0:
        with required_by("--max-skipped-steps"):
            from utils.options.skipped_steps import SkippedSteps
        guards.append(SkippedSteps())
    if cfg.log_steps:
        with required_by("--log-steps"):
            from utils.options.step_log import StepLog
        guards.append(StepLog())
    if cfg.timing:
        with required_by("--timing"):
            from utils.options.timing import Timing
        guards.append(Timing())
    if cfg.profile:
        with required_by("--profile"):
            from utils.options.profile import Profile
        guards.append(Profile(cfg.profile))
    if cfg.logger:
        with required_by("--logger"):
            from utils.options.loggers import Loggers
        guards.append(Loggers())
    return guards
