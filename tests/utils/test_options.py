"""Options: guards that a setting adds to a run, and that a copy may lack."""

import sys

import pytest

from utils.config import load_config
from utils.errors import UserError
from utils.options import option_guards

TABLE = [  # a flag, the guard that it selects, and its module
    ("--audit", "Audit", "audit"),
    ("--max-skipped-steps=0", "SkippedSteps", "skipped_steps"),
    ("--log-steps=5", "StepLog", "step_log"),
    ("--timing", "Timing", "timing"),
    ("--profile=10:20", "Profile", "profile"),
    ("--logger=tensorboard", "Loggers", "loggers"),
]


@pytest.mark.parametrize(("flag", "name", "module"), TABLE)
def test_setting_selects_a_guard(flag, name, module, monkeypatch):
    cfg = load_config(argv=[flag])
    assert [type(guard).__name__ for guard in option_guards(cfg)] == [name]
    monkeypatch.setitem(sys.modules, f"utils.options.{module}", None)  # as in a copy without it
    with pytest.raises(UserError, match=f"{flag.split('=')[0]} .*utils.options.{module}"):
        option_guards(cfg)


def test_default_run_has_no_options():
    assert option_guards(load_config(argv=[])) == []
