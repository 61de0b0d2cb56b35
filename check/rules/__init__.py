"""The rules that turn what was observed into findings. A rule is a function that takes a Checked
and yields Findings and NotChecked."""

from check.findings import Finding, NotChecked
from check.rules import data, evaluation, files, gradients, models, output

RULES = [
    *data.RULES,
    *evaluation.RULES,
    *gradients.RULES,
    *models.RULES,
    *files.RULES,
    *output.RULES,
]


def judge(checked):
    """All findings, without repetitions, and what could not be checked. Returns two lists."""
    found = dict.fromkeys(result for rule in RULES for result in rule(checked))
    findings = [result for result in found if isinstance(result, Finding)]
    return findings, [result for result in found if isinstance(result, NotChecked)]
