"""Options: what they do to the config, and the one table of hooks that they select."""

import sys
from types import SimpleNamespace

import pytest
import torch

from utils.config import load_config
from utils.errors import UserError
from utils.options import build_hooks

# The hooks

TABLE = [  # flags, the hooks that they select, and the module that holds the last of them
    ([], ["Interrupts"], None),
    (["--save-minutes=0"], [], None),
    (["--audit"], ["Interrupts", "Audit"], "audit"),
    (["--max-skipped-steps=0"], ["Interrupts", "SkippedSteps"], "skipped_steps"),
    (["--max-skipped-steps=3"], ["Interrupts", "SkippedSteps"], "skipped_steps"),
    (["--log-steps=5"], ["Interrupts", "StepLog"], "step_log"),
    (["--logger=tensorboard"], ["Interrupts", "Loggers"], "loggers"),
    (["--save-sharded"], ["Interrupts", "ShardedFiles"], "sharded"),
    (["--audit", "--save-sharded"], ["Interrupts", "Audit", "ShardedFiles"], "sharded"),
]


def make_state():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rest = {"loader": None, "meter": SimpleNamespace(), "scheduler": None}
    return {"model": model, "optimizer": optimizer, **rest}


@pytest.mark.parametrize(("flags", "names", "module"), TABLE, ids=lambda value: str(value))
def test_settings_select_hooks(flags, names, module, tmp_path, monkeypatch):
    cfg = load_config(argv=[*flags, f"--output-dir={tmp_path}"])
    hooks = build_hooks(cfg, make_state())
    always = ["History", "OutputFolder", "CompareSamples"], ["Progress", "RefuseNonFinite"]
    assert [type(hook).__name__ for hook in hooks] == [*always[0], *names, *always[1]]
    if module:  # as in a copy without it
        monkeypatch.setitem(sys.modules, f"utils.options.{module}", None)
        text = rf"^{flags[-1].split('=')[0]}.* utils/options/{module}\.py.* --with {module}"
        with pytest.raises(UserError, match=text):
            build_hooks(cfg, make_state())


def test_sharded_checkpoints_exclude_options_for_one_file(capfd):
    with pytest.raises(SystemExit, match="2"):
        load_config(argv=["--save-sharded", "--save-errors=warn"])
    assert "not --save-sharded" in capfd.readouterr().err
