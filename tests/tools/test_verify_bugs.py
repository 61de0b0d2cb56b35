"""make verify: a planted bug fails a case, for the reason that it is about."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.verifying import CASES, ForkServer, parametrize, related, rows_of, selected
from tools.lib.runs import start_run
from tools.verify.cases import SUITES
from tools.verify.plants import PLANTS, planted_copy
from tools.verify.run import Verifier

BUGS = {bug.name: bug for bug in PLANTS}
# Also part of CI, besides the first bug of each kind.
OFTEN = "mean-of-the-ranks-means"
# As a user runs it: processes of their own, under tools.launch, which reports what ends a rank.
REAL_BUGS = ("around-the-wrapper",)


def kind_of(bug):
    """Of the bugs of a kind, CI takes the first: the same comparison of a row fails."""
    problem, _ = bug.problem
    return problem, "resumed" in bug.row


FIRST = {kind_of(bug): bug.name for bug in reversed(PLANTS)}.values()


@pytest.fixture(scope="module")
def planted(request, tmp_path_factory):
    """{bug: the future of its row}. They run in parallel, on the same cores and with the same
    references."""
    folder = tmp_path_factory.mktemp("planted")
    bugs = [BUGS[name] for name in selected(request, BUGS)]

    def row_of(bug):
        name, root = f"{bug.task}: {bug.row}", planted_copy(bug, folder / bug.name / "copy")
        start = start_run if bug.name in REAL_BUGS else server.start
        verifier = related(verifiers[bug.task], folder / bug.name, root=root, start=start)
        return rows_of(verifier, [name])[name]

    with ForkServer() as server, ThreadPoolExecutor(len(bugs)) as pool:
        verifiers = {
            suite.task: Verifier(folder / suite.task, suite, start=server.start)
            for suite in SUITES.values()
        }
        for task, verifier in verifiers.items():
            verifier.run_references(
                [CASES[f"{task}: {bug.row}"][1] for bug in bugs if bug.task == task]
            )
        yield {bug.name: pool.submit(row_of, bug) for bug in bugs}


@parametrize(BUGS, (), BUGS.keys() - {OFTEN, *FIRST})
def test_planted_bug_fails_its_case(name, planted):
    """Not because of a crash that it happens to cause."""
    row = planted[name].result()
    problem, details = BUGS[name].problem
    assert row.problem is problem and details in row.details, row


def test_planted_lines_occur_once(tmp_path):
    for bug in PLANTS:
        copy = planted_copy(bug, tmp_path / bug.name) / bug.file
        if copy.suffix == ".py":
            compile(copy.read_text(), copy, "exec")
        assert bug.replacement in copy.read_text()
        assert f"{bug.task}: {bug.row}" in CASES
