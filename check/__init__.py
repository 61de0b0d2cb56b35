"""Checks anybody's training script for the bugs that the scripts of this project do not have.

__main__.py    the command line
scenarios.py   runs the script: on one process, on two, killed and resumed
mirror.py      the copy of the script's folder in which it runs, and what shows that files changed
confinement.py where it may write, and which services it may use
inside/        what observes PyTorch in the processes of the script
events.py      reads what was observed
rules/         from what was observed to findings
advice.py      why a finding matters, and its fix
report.py      text, JSON and SARIF
tests/         with corpus/: scripts with and without bugs, to measure what is found
"""
