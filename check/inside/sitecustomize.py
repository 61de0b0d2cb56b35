"""Python imports this module in every process of a script that a check runs.

The folder is the first on PYTHONPATH and hides a sitecustomize of the environment: that runs here.
"""

import importlib.machinery
import importlib.util
import os
import sys

_here = os.path.dirname(os.path.abspath(__file__))
_others = [folder for folder in sys.path if os.path.abspath(folder or ".") != _here]
_hidden = importlib.machinery.PathFinder.find_spec("sitecustomize", _others)
if _hidden is not None and _hidden.loader is not None:
    _hidden.loader.exec_module(importlib.util.module_from_spec(_hidden))

if "TOOLS_CHECK_PLAN" in os.environ:
    import check_inside

    check_inside.start()
    from check_inside import failures

    sys.excepthook = failures.hook
